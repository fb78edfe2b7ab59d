"""A REPL for several runs. Its variables live on; each run adds its context and, at the end, its messages."""

import contextlib
import json
from collections.abc import AsyncIterator, Mapping, Sequence
from typing import Any

from rlm_broker.broker.transport.connection import QueryHandler, refuse
from rlm_broker.concurrency.resource import AsyncResource
from rlm_broker.context.stored_context import StoredContext
from rlm_broker.errors import ConfigurationError, ContextRefused, ReplBusy, ValueTooLarge
from rlm_broker.limits import ReplLimits
from rlm_broker.results import ChatMessage
from rlm_broker.sandbox.repl import SandboxedRepl
from rlm_broker.sandbox.sandbox import Sandbox
from sandbox_worker.wire.names import CONTEXT, HISTORY, numbered
from sandbox_worker.wire.text_json import written_out


def as_values(messages: Sequence[ChatMessage]) -> list[dict[str, Any]]:
    """Return messages for model code: dicts with `role` and `content`, lone surrogates written out."""
    said = [{"role": message.role, "content": message.content} for message in messages]
    values: list[dict[str, Any]] = json.loads(written_out(json.dumps(said, ensure_ascii=False)))
    return values


LATER_CONTEXT_BYTES = 1 << 40
"""Address space in bytes for the contexts of later runs, if the limits do not say: 1 TiB, so that memory is the
bound."""


class PersistentRepl(AsyncResource):
    """A REPL for several runs, one after the other. Made by `RLM.persistent_repl`.

    Use it as a context manager (`with` or `async with`), and give it to `RLM.start`.

    `context` and `context_0` are the context of the first run, `context_1` of the second, and so on; `history_0` holds
    the messages of the first run. The first run opens the REPL.

    Example:
        ```python
        with RLM("offline") as rlm, rlm.persistent_repl() as repl:
            rlm.start("a\\nb", "How many lines are there?", repl=repl).result()
            print(rlm.start("c", "How many lines are there now?", repl=repl).result().response)
        ```

    Args:
        sandbox: Sandbox in which the REPL is made.
        limits: Bounds of the REPL; None takes the sandbox's.

    Attributes:
        runs: Number of runs so far.
        context_name: Name of the variable holding the context of the last run.
    """

    def __init__(self, sandbox: Sandbox, limits: ReplLimits | None = None) -> None:
        self._sandbox = sandbox
        self._event_loop = sandbox.bind_loop()
        limits = limits or sandbox.limits
        later_bytes = limits.later_context_bytes or LATER_CONTEXT_BYTES
        self._limits = limits.replace(later_context_bytes=later_bytes)
        self._opened = contextlib.AsyncExitStack()
        self._repl: SandboxedRepl | None = None
        self._answer: QueryHandler = refuse
        self._is_lent = False
        self.runs = 0
        self.context_name = CONTEXT

    @contextlib.asynccontextmanager
    async def repl(
        self, context: StoredContext, answer: QueryHandler, tools: Sequence[str], values: Mapping[str, Any]
    ) -> AsyncIterator[SandboxedRepl]:
        """Lend the REPL to one run at a time, with `context` in it under `context_name`.

        Args:
            tools: Names of functions for code of the run.
            values: Name → value for code of the run.

        Raises:
            ReplBusy: Another run has the REPL.
            ContextRefused: There is no room for a later context.
        """
        if self._is_lent:
            raise ReplBusy("another run has this REPL: wait for its end")
        self._is_lent, self._answer = True, answer
        try:
            self.context_name = await self._add(context, tools, values)
            assert self._repl is not None
            yield self._repl
        finally:
            self._is_lent, self._answer = False, refuse
            if self._repl is not None:
                self._repl.answer = refuse
                await self._repl.end_children()

    @property
    def sandboxed(self) -> SandboxedRepl | None:
        """The REPL itself, also for blocks between two runs; None before the first run has opened it."""
        return self._repl

    def remember(self, messages: Sequence[ChatMessage]) -> None:
        """Put the messages of the last run into the REPL, as `history_N`. `RLM` does so at the end of each run."""
        if self._repl is not None:
            said = as_values(messages)
            number = self.runs - 1
            with contextlib.suppress(ValueTooLarge):  # without a history the next question can still be answered
                self._repl.provide_known({numbered(HISTORY, number): said, **({HISTORY: said} if number == 0 else {})})

    async def _open(self) -> None:
        """Open nothing: the first run opens the REPL, since it brings the context."""

    async def _close(self) -> None:
        self._repl = None
        await self._opened.aclose()

    async def _add(self, context: StoredContext, tools: Sequence[str], values: Mapping[str, Any]) -> str:
        if self._repl is None:
            # A copy with descriptors of its own: a REPL needs it after a kill, perhaps long after the run.
            kept = self._opened.enter_context(context.another())
            made = self._sandbox.repl(kept, self._answer, tools=tools, values=values, limits=self._limits)
            self._repl = await self._opened.enter_async_context(made)
            self.runs = 1
            return CONTEXT
        self._repl.renew()
        self._repl.answer = self._answer
        self._repl.set_tools(tools)
        self._repl.provide(values)
        try:
            name = await self._repl.aadd_context(context)
        except ConfigurationError as error:
            raise ContextRefused(f"{error}, or open another RLM for it") from None
        self.runs += 1
        return name
