"""One REPL for several runs: its variables live on, and each run adds its context and, at its end, its messages."""

import contextlib
import json
from collections.abc import AsyncIterator, Sequence
from typing import Any

from rlm_broker.context.stored import StoredContext
from rlm_broker.errors import ConfigurationError, ContextRefused, ValueTooLarge
from rlm_broker.limits import ReplLimits
from rlm_broker.results import ChatMessage
from rlm_broker.run.tools import Tools
from rlm_broker.sandbox.repl import SandboxedRepl
from rlm_broker.sandbox.sandbox import Sandbox
from rlm_broker.transport.connection import QueryHandler, refuse
from sandbox_worker.wire.messages import Query, Slot
from sandbox_worker.wire.names import CONTEXT, HISTORY, numbered
from sandbox_worker.wire.text_json import written_out


def as_values(messages: Sequence[ChatMessage]) -> list[dict[str, Any]]:
    """Return messages as code finds them, with lone surrogates written out."""
    said = [{"role": message.role, "content": message.content} for message in messages]
    values: list[dict[str, Any]] = json.loads(written_out(json.dumps(said, ensure_ascii=False)))
    return values


LATER_CONTEXT_BYTES = 1 << 40
"""Address space for the contexts of later runs, where the limits say nothing of it."""


class PersistentRepl:
    """The REPL of a persistent RLM. `context` and `context_0` are the first run's, `context_1` the second's, and so on;
    `history_0` are the messages of the first run.

    Args:
        sandbox: Where the REPL is, when the first run needs it.
        limits: Its bounds; None takes those of the sandbox.

    Attributes:
        runs: How many runs have had it.
        context_name: Of the variable that holds the context of the last run.
    """

    def __init__(self, sandbox: Sandbox, limits: ReplLimits | None = None) -> None:
        self._sandbox = sandbox
        limits = limits or sandbox.limits
        later_bytes = limits.later_context_bytes or LATER_CONTEXT_BYTES
        self._limits = limits.model_copy(update={"later_context_bytes": later_bytes})
        self._opened = contextlib.AsyncExitStack()
        self._repl: SandboxedRepl | None = None
        self._answer: QueryHandler = refuse
        self.runs = 0
        self.context_name = CONTEXT

    @contextlib.asynccontextmanager
    async def repl(self, context: StoredContext, answer: QueryHandler, tools: Tools) -> AsyncIterator[SandboxedRepl]:
        """The REPL for one run at a time, with `context` in it under `context_name`.

        Raises:
            ContextRefused: A later context has no room.
        """
        self._answer = answer
        try:
            self.context_name = await self._add(context, tools)
            assert self._repl is not None
            yield self._repl
        finally:
            self._answer = refuse

    def remember(self, messages: Sequence[ChatMessage]) -> None:
        """What was said in the run that has just ended."""
        if self._repl is not None:
            said = as_values(messages)
            number = self.runs - 1
            with contextlib.suppress(ValueTooLarge):  # then it is not there: the next question is not to fail for it
                self._repl.provide_known({numbered(HISTORY, number): said, **({HISTORY: said} if number == 0 else {})})

    async def close(self) -> None:
        """End the REPL. Harmless when repeated."""
        self._repl = None
        await self._opened.aclose()

    async def _add(self, context: StoredContext, tools: Tools) -> str:
        if self._repl is None:
            # Of its own: the REPL may be forked anew from it when the run that brought it is long over.
            kept = self._opened.enter_context(context.another())
            made = self._sandbox.repl(kept, self._forward, tools=tools.names, values=tools.values, limits=self._limits)
            self._repl = await self._opened.enter_async_context(made)
            self.runs = 1
            return CONTEXT
        self._repl.renew()
        try:
            name = await self._repl.aadd_context(context)
        except ConfigurationError as error:
            raise ContextRefused(f"{error}, or open another RLM for it") from None
        self.runs += 1
        return name

    async def _forward(self, query: Query) -> list[Slot]:
        return await self._answer(query)
