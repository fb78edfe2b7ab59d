"""Answers for a REPL with a loop of the user's own: it has a budget, a depth and a usage of its own."""

import secrets
from collections.abc import Mapping, Sequence
from typing import Any

from rlm_broker.broker.broker import Broker
from rlm_broker.concurrency.event_loop import EventLoopRef
from rlm_broker.errors import ConfigurationError, require_kind
from rlm_broker.events.event import Emit, TreeEvents
from rlm_broker.limits import Limits
from rlm_broker.run.calls import Caller, TreeCalls, block_of
from rlm_broker.run.ledger import Ledger
from rlm_broker.run.prompts.instructions import Instructions
from rlm_broker.run.queries import QueryAnswers
from rlm_broker.run.run import ID_BYTES
from rlm_broker.run.tree import Progress, Tree
from rlm_broker.sandbox.sandbox import Sandbox
from rlm_broker.sandbox.tools import Tools
from rlm_broker.usage import Usage, UsageSummary
from sandbox_worker.wire.messages import Query, Slot

REPL_RUN = "1"
"""Run name in the events of a REPL with a loop of the user's own."""


class Budget:
    """Means shared by several REPLs or runs, beside the limits of each of them.

    Example:
        ```python
        budget = Budget(Limits(max_budget_usd=1))
        first, second = handler.answers(budget=budget), handler.answers(budget=budget)
        ```

    Args:
        limits: Only `max_llm_calls`, `max_tokens`, `max_budget_usd` and `max_children_total` count.
    """

    def __init__(self, limits: Limits) -> None:
        require_kind("limits", limits, Limits)
        self.ledger = Ledger(limits)

    @property
    def usage(self) -> UsageSummary:
        """Usage so far of all its REPLs and runs, by model."""
        return self.ledger.summary()

    def left(self) -> dict[str, float | None]:
        """Return the remaining means by the name of their limit; None means that there is no bound.

        Example:
            ```python
            Budget(Limits(max_llm_calls=5)).left()["max_llm_calls"]  # 5
            ```
        """
        return self.ledger.left()


class ReplAnswers:
    """Answers the queries of one REPL: `llm_query`, `rlm_query`, tools, `budget`. `LMHandler.answers` makes it.

    Give it to one REPL: `sandbox.repl(context, answer=answers, tools=answers.tools, values=answers.values)`.

    Example:
        ```python
        answers = handler.answers(tools={"price": lambda name: 5})
        with sandbox.repl("some text", answers, tools=answers.tools, values=answers.values) as repl:
            print(repl.execute("print(price('lens'), llm_query('Say a word.'))").stdout)  # 5 an answer
        ```

    Attributes:
        id: Unique text of 16 characters. All events of the REPL have it in their field `tree`.
        tools: Names of the functions for model code.
        values: Name → value in the REPL, of the tools other than functions.
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
            raise ConfigurationError(
                f"depth must be an integer of 1 or more, the depth of the REPL's calls, not {depth!r}"
            )
        limits = limits or Limits()
        if "run_timeout_s" in limits.given:
            raise ConfigurationError("run_timeout_s has no effect on a loop of your own: bound its time there instead")
        if sandbox is None and "max_depth" in limits.given and limits.max_depth > depth:
            raise ConfigurationError(
                f"max_depth = {limits.max_depth} needs sandbox=, in which children get their REPLs"
            )
        if sandbox is None:  # without one no child can have a REPL: each is a plain completion at this depth
            limits = limits.replace(max_depth=min(limits.max_depth, depth))
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

        Tell the REPL, too: `repl.set_tools(answers.tools)`, and `repl.provide(answers.values)` for values.

        Example:
            ```python
            answers = handler.answers()
            answers.set_tools({"price": lambda name: 5})
            repl.set_tools(answers.tools)
            ```

        Raises:
            ConfigurationError: As for `LMHandler.answers`. The earlier tools then stay in force.
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
        """Usage so far of the REPL and of all runs below it, by model."""
        return self._ledger.summary()

    @property
    def usage_by_depth(self) -> Mapping[int, Usage]:
        """Usage so far of the REPL and of all runs below it, by depth."""
        return self._ledger.by_depth()

    def left(self) -> dict[str, float | None]:
        """Return the remaining means of the REPL, as `Budget.left` does."""
        return self._ledger.left()

    async def _answered(self, query: Query) -> list[Slot]:
        self._progress.blocks = block_of(query)
        return await self._answers(query)
