"""Supplies of a REPL between its blocks: values, contexts and tools."""

import contextvars
from collections.abc import Mapping, Sequence
from typing import Any

from rlm_broker.broker.transport.connection import QueryHandler, refuse
from rlm_broker.broker.transport.provisions import Provisions
from rlm_broker.concurrency.resource import AsyncResource
from rlm_broker.errors import ReplClosed, require_kind
from rlm_broker.limits import ReplLimits
from rlm_broker.sandbox.repl_process import ReplWorker
from rlm_broker.sandbox.tools import Tools
from rlm_broker.values.names import require_apart, require_given, require_names
from sandbox_worker.wire.messages import Query, Slot


class SuppliedRepl(AsyncResource):
    """A REPL that is given values, contexts and tools. `SandboxedRepl` is the only one."""

    answer: QueryHandler
    _limits: ReplLimits
    _scaffold: bool
    _tools: Tools | None
    _worker: ReplWorker

    def provide(self, values: Mapping[str, Any], *, restore: bool = True) -> None:
        """Give code more values by name. They are there from the next block on, also after a kill.

        A text or bytes object of more than 65,536 characters or bytes that is given again under its name costs nothing:
        the REPL has kept it.

        Example:
            ```python
            repl.provide({"limit": 10})
            print(repl.execute("print(limit)").stdout)  # 10
            ```

        Args:
            values: Name → value, as for `Sandbox.repl`.
            restore: Whether each later block finds these values again, although code has bound the names to others.

        Raises:
            ConfigurationError: A value cannot be sent as it is, or a name is a tool's. No value is given then.
            ValueTooLarge: A value is longer than a message may be. No value is given then.
            ReplClosed: The REPL was closed.
        """
        require_kind("restore", restore, bool)
        require_given(self._worker.provisions.tools() or (), values, self._scaffold)
        more = Provisions.of(
            values, self._limits.max_frame_bytes, are_restored=restore, earlier=self._worker.provisions
        )
        self._provide(more)

    def add_context(self, context: object) -> str:
        """Give code one more context, mapped as the first, from the next block on; return the name of its variable.

        The names are `context_1`, `context_2` and so on. Texts are mapped; all other objects are decoded in the REPL,
        and count towards its `memory_bytes`.

        Example:
            ```python
            with sandbox.repl("first", limits=ReplLimits(later_context_bytes=1 << 20)) as repl:
                repl.add_context("second")  # 'context_1'
            ```

        Args:
            context: As for `Sandbox.repl`.

        Raises:
            ConfigurationError: The REPL's `later_context_bytes` have no room for it.
            ContextRefused: The context cannot be read.
            ReplClosed, SandboxFailed: As for `execute`.
        """
        return self.bind_loop().run(self._worker.add_context(context))

    async def aadd_context(self, context: object) -> str:
        """Give code one more context as `add_context` does, awaited."""
        return await self.bind_loop().arun(self._worker.add_context(context))

    def set_tools(self, tools: Sequence[str] | Mapping[str, Any] | Tools) -> None:
        """Give code these tools, and no others, from the next block on.

        Example:
            ```python
            repl.set_tools({"price": lambda name: 5})
            print(repl.execute("print(price('lens'))").stdout)  # 5
            ```

        Args:
            tools: All tools, as for `Sandbox.repl`.

        Raises:
            ConfigurationError: A name is not an identifier, or is a value's. The tools do not change then.
            ReplClosed: The REPL was closed.
        """
        earlier = self._tools
        try:
            names = self._take_tools(tools)
            require_names(names, self._scaffold)
            require_apart(names, self._worker.provisions.names())
            self._provide(Provisions.of({}, self._limits.max_frame_bytes, names))
        except BaseException:
            self._tools = earlier
            raise

    def _take_tools(self, tools: Sequence[str] | Mapping[str, Any] | Tools) -> Sequence[str]:
        """Call these functions from now on, if they are functions and no names; return the names of all tools."""
        if not isinstance(tools, Mapping | Tools):
            self._tools = None
            return tools
        self._tools = made = Tools.of(tools, self._scaffold)
        return made.names

    def provide_known(self, values: Mapping[str, Any]) -> None:
        """Give code values under names of our own. They come out of JSON: checking large ones would take seconds."""
        self._provide(Provisions.of(values, self._limits.max_frame_bytes, are_json=True))

    def _provide(self, more: Provisions) -> None:
        if self._worker.is_closed:
            raise ReplClosed("this REPL was closed")
        self._worker.provide(more)

    async def _answered(self, tools: Tools, callers: contextvars.Context, query: Query) -> list[Slot]:
        """Answer a query: call the function that it wants, with the context variables of the block's caller."""
        name = query.tool or ""
        if query.want != "tool" or (name not in tools.functions and self.answer is not refuse):
            return await self.answer(query)
        if len(query.texts) != 1 or len(query.prompts) != 1:
            return [Slot(error="tool takes one prompt, the arguments of one call")] * len(query.prompts)
        return [await tools.call(name, query.texts[0], None, self._limits.max_frame_bytes, callers)]
