"""A run that a request asks for, whichever interface it came by."""

import asyncio
import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rlm_broker import Instructions, PersistentRepl, RunLimits, StoredContext, store_as_it_is
from rlm_broker.serve.errors import ApiError
from rlm_broker.serve.materials import Material, Text, stored_of
from rlm_broker.serve.models import AT, ServedModel
from rlm_broker.serve.questions.client_tools import CONVERSATION
from rlm_broker.serve.questions.conversation import Dialogue, divided
from rlm_broker.serve.questions.request import AnswerForm, DialectRequest


@dataclass(frozen=True, slots=True, kw_only=True)
class QuestionRequest:
    """A run that a request asks for.

    Attributes:
        model: Model that was named, with its context of the server's.
        form: What the answer must be, and the functions of the client.
        materials: Texts and files that the question is about.
        value: Context of plain values, in place of materials; None is none.
        question: Question; None: the task is in the context.
        history: Earlier turns, as dicts of `role` and `content`, the oldest first.
        system: Instructions of the caller, which stand beside our prompt; empty if there are none.
        limits: Limits of the request.
        one_at_a_time: Whether the client gets one call of its tools in each response.
        ignored: Fields and tools of the request without effect.
        repl: REPL of an earlier run that this one goes on with, or None.
        outlives_s: Seconds for which the run goes on without a follower; None is to its end.
    """

    model: ServedModel
    form: AnswerForm = AnswerForm()  # noqa: RUF009 - it is frozen
    materials: Sequence[Material] = ()
    value: Any = None
    question: str | None = None
    history: Sequence[Mapping[str, Any]] = ()
    system: str = ""
    limits: RunLimits | None = None
    one_at_a_time: bool = False
    ignored: tuple[str, ...] = ()
    repl: PersistentRepl | None = None
    outlives_s: float | None = 0.0

    @classmethod
    def of(
        cls,
        request: DialectRequest,
        said: Dialogue,
        model: ServedModel,
        form: AnswerForm,
        *,
        earlier: Sequence[Material],
        inline_chars: int,
    ) -> "QuestionRequest":
        """Return what a request asks for.

        Args:
            request, said: The request, and its conversation.
            model, form: What it names.
            earlier: Files of earlier messages.
            inline_chars: Characters beyond which a text cannot be a question.

        Raises:
            ApiError: 400: there is no question, or the model cannot take what the request has.
        """
        options, has_context = request.options, model.context is not None
        materials, question = divided(said, earlier, options, inline_chars=inline_chars, has_context=has_context)
        ignored = request.ignored()
        made = cls(
            model=model,
            form=form,
            materials=materials,
            value=options.context,
            question=question,
            history=said.history,
            system="\n\n".join([*said.system, *([_LATE_RESULTS] if said.results else [])]),
            limits=request.limits(),
            one_at_a_time=request.parallel_tool_calls is False,
        )
        if model.is_plain:
            ignored += ["tools"] if form.tools else []
            made = made._plain()
        return dataclasses.replace(made, ignored=tuple(dict.fromkeys(ignored)))

    def _plain(self) -> "QuestionRequest":
        """Return the same for a model without a REPL: it gets the messages themselves."""
        if any(not isinstance(each, Text) for each in self.materials):
            said = f"the model {self.model.name} takes texts alone: name it without @plain to ask about a file"
            raise ApiError(400, said, code="unsupported_content", param="model")
        limits = RunLimits(**{**(self.limits.model_dump(exclude_unset=True) if self.limits else {}), "max_depth": 0})
        form = dataclasses.replace(self.form, tools=())
        if self.value is not None:
            return dataclasses.replace(self, form=form, limits=limits, history=())
        last = [each.text for each in self.materials if isinstance(each, Text)] + [self.question or ""]
        system = [{"role": "system", "content": self.system}] if self.system else []
        messages = [*system, *map(_as_text, self.history), {"role": "user", "content": "\n\n".join(filter(None, last))}]
        return dataclasses.replace(
            self, form=form, limits=limits, history=(), system="", materials=(), value=messages, question=None
        )

    @property
    def task(self) -> str | None:
        """Text with the task: the question, or the last text of the materials or messages."""
        texts = [each.text for each in self.materials if isinstance(each, Text)]
        if self.model.is_plain and isinstance(self.value, list) and not self.question:
            texts = [self.value[-1]["content"]]
        return self.question or (texts[-1] if texts else None)

    def instructions(self, base: Instructions) -> Instructions | None:
        """Return the instructions of the server with the caller's beside them, or None if it has none."""
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


_LATE_RESULTS = (
    f"Functions were called for this question before. The calls and their results are at the end of `{CONVERSATION}`."
)


def _as_text(message: Mapping[str, Any]) -> dict[str, str]:
    """Return a message of the history for a model that takes texts of a user, an assistant and a system alone."""
    content, role = message["content"], message["role"]
    said = [content] if isinstance(content, str) else list(content)
    said += [f"[calls {call['name']}({call['arguments']})]" for call in message.get("tool_calls", ())]
    if role == "tool":
        said, role = ["[result]", *said], "user"
    return {"role": role, "content": "\n".join(filter(None, said))}


async def about(wanted: QuestionRequest) -> tuple[StoredContext, str | None]:
    """Return the context of a request, which the caller closes, and its question; None: the task is in the context.

    A question without any context is the context itself, with its task in it.

    Raises:
        ContextRefused: A file has no text, or there is no memory for it.
        UnknownHandle: A file was deleted meanwhile.
    """
    question, served = wanted.question, wanted.model.context
    if wanted.value is not None:
        return await asyncio.to_thread(store_as_it_is, wanted.value), question
    if served is None:
        return await stored_of(
            wanted.materials or [Text("question", question or "")]
        ), question if wanted.materials else None
    if not wanted.materials:
        return served.another(), question
    with await stored_of(wanted.materials) as brought:
        name = wanted.model.name.rpartition(AT)[2]
        return await asyncio.to_thread(store_as_it_is, {name: served, "attached": brought}), question
