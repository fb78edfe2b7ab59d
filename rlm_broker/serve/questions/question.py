"""A run that a request asks for, whichever interface it came by."""

import asyncio
import dataclasses
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rlm_broker.context.store import store_as_it_is
from rlm_broker.context.stored import StoredContext
from rlm_broker.limits import RunLimits
from rlm_broker.run.persistent_repl import PersistentRepl
from rlm_broker.run.prompts.instructions import Instructions
from rlm_broker.serve.materials import Material, Text, stored_of
from rlm_broker.serve.models import ServedModel
from rlm_broker.serve.questions.client_tools import FunctionTool
from rlm_broker.serve.questions.conversation import CONVERSATION


@dataclass(frozen=True, slots=True, kw_only=True)
class QuestionRequest:
    """A run that a request asks for.

    Attributes:
        model: Model that was named, with its context of the server's.
        materials: Texts and files that the question is about.
        value: Context of plain values, in place of materials; None is none.
        question: Question; None: the task is in the context.
        history: Earlier turns, as dicts of `role` and `content`, the oldest first.
        system: Instructions of the caller, which stand beside our prompt; empty if there are none.
        limits: Limits of the request.
        output_type: JSON Schema of the answer, or None.
        tools: Functions of the client.
        one_at_a_time: Whether the client gets one call of its tools in each response.
        repl: REPL of an earlier run that this one goes on with, or None.
        outlives_s: Seconds for which the run goes on without a follower; None is to its end.
        key: Idempotency key, or None.
        fingerprint: Digest of the request.
    """

    model: ServedModel
    materials: Sequence[Material] = ()
    value: Any = None
    question: str | None = None
    history: Sequence[Mapping[str, Any]] = ()
    system: str = ""
    limits: RunLimits | None = None
    output_type: Mapping[str, Any] | None = None
    tools: Sequence[FunctionTool] = ()
    one_at_a_time: bool = False
    repl: PersistentRepl | None = None
    outlives_s: float | None = 0.0
    key: str | None = None
    fingerprint: str = ""

    @property
    def task(self) -> str | None:
        """Text that has the task: the question, or the last text of the materials."""
        texts = [each.text for each in self.materials if isinstance(each, Text)]
        return self.question or (texts[-1] if texts else None)

    def instructions(self, base: Instructions) -> Instructions | None:
        """Return the instructions of the server with those of the caller beside them, or None if it has none."""
        if not self.system.strip():
            return None
        own = f"Instructions of the caller:\n{self.system.strip()}"
        return dataclasses.replace(base, prologue=f"{base.prologue}\n\n{own}" if base.prologue else own)

    def variables(self) -> dict[str, Any]:
        """Return what code finds beside the context, as values for `Tools`."""
        if not self.history:
            return {}
        told = (
            f"the {len(self.history):,} earlier messages of this conversation, a list of dicts with `role` and "
            "`content`, the oldest first. The question may refer to them"
        )
        return {CONVERSATION: {"tool": [dict(message) for message in self.history], "description": told}}


@dataclass(frozen=True, slots=True)
class About:
    """Context and question of a run.

    Attributes:
        context: The context.
        question: Question; None: the task is in the context.
        is_lent: Whether the context is the server's, which the run must not close.
    """

    context: StoredContext
    question: str | None
    is_lent: bool = False

    def close(self) -> None:
        """Close the context, unless it is the server's."""
        if not self.is_lent:
            self.context.close()


async def about(wanted: QuestionRequest) -> About:
    """Store the context of a request. A question without any context is the context itself, with its task in it.

    Raises:
        ContextRefused: A file has no text, or there is no memory for it.
        UnknownHandle: A file was deleted meanwhile.
    """
    question, served = wanted.question, wanted.model.context
    if wanted.value is not None:
        return About(await asyncio.to_thread(store_as_it_is, wanted.value), question)
    if served is not None and not wanted.materials:
        return About(served, question, is_lent=True)
    if served is not None:
        return About(await _beside(served, wanted), question)
    if wanted.materials:
        return About(await stored_of(wanted.materials), question)
    return About(await stored_of([Text("question", question or "")]), None)


async def _beside(served: StoredContext, wanted: QuestionRequest) -> StoredContext:
    """Return the server's context together with what the request brings, as a dict."""
    brought = await stored_of(wanted.materials)
    with brought:
        name = wanted.model.name.rpartition("@")[2]
        return await asyncio.to_thread(store_as_it_is, {name: served, "attached": brought})


def as_json(value: Any) -> str:
    """Return an answer of a type as JSON text."""
    return json.dumps(value, ensure_ascii=False)
