"""What answers the REPL of a loop that is the user's own: with a budget, a depth and a usage of its own."""

import secrets
from collections.abc import Mapping, Sequence
from typing import Any

from rlm_broker.concurrency.event_loop import EventLoopRef
from rlm_broker.errors import ConfigurationError, require_kind
from rlm_broker.handler.broker import Broker
from rlm_broker.limits import Limits
from rlm_broker.prompts.instructions import Instructions
from rlm_broker.results import Usage, UsageSummary
from rlm_broker.run.calls import Caller, TreeCalls, block_of
from rlm_broker.run.ledger import Ledger
from rlm_broker.run.queries import QueryAnswers
from rlm_broker.run.run import ID_BYTES
from rlm_broker.run.tools import Tools
from rlm_broker.run.tree import Progress, Tree
from rlm_broker.sandbox.sandbox import Sandbox
from rlm_broker.trace.events import Emit, TreeEvents
from sandbox_worker.wire.messages import Query, Slot

REPL_RUN = "1"
"""Name of what stands for a run in the events: the REPL whose loop is the user's own."""


class Budget:
    """Means that several REPLs or runs share, beside what each of them may use.

    Args:
        limits: What counts are `max_llm_calls`, `max_tokens`, `max_budget_usd` and `max_children_total`.
    """

    def __init__(self, limits: Limits) -> None:
        require_kind("limits", limits, Limits)
        self.ledger = Ledger(limits)

    @property
    def usage(self) -> UsageSummary:
        """What all of them have used so far, by model."""
        return self.ledger.summary()

    def left(self) -> dict[str, float | None]:
        """What may still be used, by the name of its limit; None is without a bound."""
        return self.ledger.left()


class ReplAnswers:
    """Answers what one REPL asks: `llm_query`, `rlm_query`, tools, `budget`. Made by `LMHandler.answers`.

    Give it to one REPL: `sandbox.repl(context, answer=answers, tools=answers.tools, values=answers.values)`.

    Attributes:
        id: Unique text of 16 characters, which is also the field `tree` of all its events.
        tools: Names of the functions that code may call.
        values: Name → value that code finds, of those given as tools.
    """

    def __init__(
        self,
        handler: Broker,
        event_loop: EventLoopRef,
        limits: Limits | None,
        depth: int,
        tools: Tools | Mapping[str, Any] | None,
        on_event: Emit | None,
        question: str | None,
        sandbox: Sandbox | None,
        budget: Budget | None,
    ) -> None:
        require_kind("limits", limits, Limits, type(None))
        require_kind("budget", budget, Budget, type(None))
        require_kind("sandbox", sandbox, Sandbox, type(None))
        require_kind("question", question, str, type(None))
        if isinstance(depth, bool) or not isinstance(depth, int) or depth < 1:
            raise ConfigurationError(f"depth is that of what the REPL asks, 1 or more, and not {depth!r}")
        limits = limits or Limits()
        if "run_timeout_s" in limits.model_fields_set:
            raise ConfigurationError("run_timeout_s has no effect here: the loop is yours, and so is its time")
        if sandbox is None and "max_depth" in limits.model_fields_set and limits.max_depth > depth:
            raise ConfigurationError(f"max_depth = {limits.max_depth} needs sandbox=, where children have their REPLs")
        if sandbox is None:  # then no child can have a REPL
            limits = limits.model_copy(update={"max_depth": min(limits.max_depth, depth)})
        self.id = secrets.token_hex(ID_BYTES)
        given = tools if isinstance(tools, Tools) else Tools(tools)
        self.tools: Sequence[str] = given.names
        self.values: Mapping[str, Any] = given.values
        self._event_loop = event_loop
        self._ledger = Ledger(limits, None if budget is None else budget.ledger)
        events = TreeEvents(self.id, [] if on_event is None else [on_event])
        calls = TreeCalls(handler, self._ledger, events)
        tree = Tree(calls, self._ledger, sandbox, events, Instructions())
        self._progress = Progress()
        self._answers = QueryAnswers(tree, Caller(REPL_RUN, depth - 1, question), None, given, self._progress)

    def set_tools(self, tools: Tools | Mapping[str, Any] | None) -> None:
        """Answer calls of these tools from now on, and of no others.

        Tell the REPL: `repl.set_tools(answers.tools)`, and of values `repl.provide(answers.values)`.

        Raises:
            ConfigurationError: As for `LMHandler.answers`. Then nothing changes.
        """
        given = tools if isinstance(tools, Tools) else Tools(tools)
        self.tools, self.values = given.names, given.values
        self._answers.tools = given

    async def __call__(self, query: Query) -> list[Slot]:
        """Answer a query, on the event loop of the handler."""
        if self._event_loop.is_here:
            return await self._answered(query)
        return await self._event_loop.arun(self._answered(query))

    @property
    def usage(self) -> UsageSummary:
        """What the REPL and all below it have used so far, by model."""
        return self._ledger.summary()

    @property
    def usage_by_depth(self) -> Mapping[int, Usage]:
        """The same by depth."""
        return self._ledger.by_depth()

    def left(self) -> dict[str, float | None]:
        """What the REPL may still use, by the name of its limit; None is without a bound."""
        return self._ledger.left()

    async def _answered(self, query: Query) -> list[Slot]:
        self._progress.blocks = block_of(query)
        return await self._answers(query)
