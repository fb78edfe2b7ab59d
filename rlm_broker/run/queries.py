"""Answers to a REPL's queries: a completion, child runs (see `children`), a call of a tool, or the budget."""

import json
import time
from functools import cached_property

import msgspec

from rlm_broker.broker.transport.connection import QueryHandler
from rlm_broker.events.event import ToolEnded, ToolStarted
from rlm_broker.run.calls import Caller
from rlm_broker.run.children import Children
from rlm_broker.run.ledger import smaller
from rlm_broker.run.output_type import OutputType
from rlm_broker.run.persistent_repl import PersistentRepl
from rlm_broker.run.runner import Runner
from rlm_broker.run.tree import Progress, Tree
from rlm_broker.sandbox.tools import Tools
from rlm_broker.values.text import shorten
from sandbox_worker.wire.messages import Query, Slot

FAILED = "Error: "
"""Beginning of the text that code is handed in place of an answer; see `sandbox_worker.repl.queries`."""
FAILURE_CHARS = 200
"""Characters of a failure by which an answer is recognised as one."""
MOST_FAILURES = 20
"""Failures of one query that are remembered until the turn ends; of children in the background, until the run ends."""


class QueryAnswers:
    """Answers the REPL of one run. It knows the depth from its run: no message of a REPL can claim another.

    Args:
        ends_at: `time.monotonic()` at the end of the run's time; None is never.
        tools: Functions and values for code of this run.
        progress: Progress of the run, with the number of the asking block.

    Attributes:
        tools: Functions and values for code from now on.
    """

    def __init__(self, tree: Tree, caller: Caller, ends_at: float | None, tools: Tools, progress: Progress) -> None:
        self._tree = tree
        self._caller = caller
        self._ends_at = ends_at
        self.tools = tools
        self._progress = progress
        self._emit = tree.events.of(caller.run, caller.depth)
        self._tool_calls = 0

    @cached_property
    def _children(self) -> Children:
        # Made for the first child alone: it has a method of this object, and the collector would have to free each run.
        return Children(self._tree, self._caller, self._progress.child_traces, self._begin)

    @property
    def _below(self) -> Caller:
        """Caller of the queries of this REPL: one depth below the run, with the present block."""
        return Caller(self._caller.run, self._caller.depth + 1, self._caller.question, block=self._progress.blocks)

    def _begin(self, caller: Caller, kept: PersistentRepl | None) -> Runner:
        return open_run(
            self._tree, caller, time.monotonic(), self._ends_at, self.tools.for_children, persistent_repl=kept
        )

    def handler(self) -> QueryHandler:
        """Return the handler of the REPL's queries: this object, or the user's handler in its place."""
        replaced = self._tree.query_handler
        return self if replaced is None else replaced(self._caller.run, self._caller.depth, self)

    async def __call__(self, query: Query) -> list[Slot]:
        """Answer each prompt of a query. Errors are texts in the slots: model code must be able to go on."""
        limits = self._tree.limits
        if len(query.prompts) > limits.max_batch_prompts or (query.want != "llm" and not query.is_text):
            return _refused(query, limits.max_batch_prompts)
        match query.want:
            case "budget":
                return [Slot(text=json.dumps(self._left()))] * len(query.prompts)
            case "tool":
                return [await self._tool(query)] * len(query.prompts)
            case "keep":
                return [await self._children.keep(query.id, self._below.depth)] * len(query.prompts)
            case "rlm" if self._below.depth < limits.max_depth or query.contexts:
                slots = await self._children.slots(query, self._below)
            case _:
                slots = await self._tree.calls.slots(self._below, query)
        progress, failed = self._progress, 0
        progress.asked[len(slots)] += 1
        failures = progress.late_failures if query.background else progress.failures
        most_failures = MOST_FAILURES - len(failures) if query.background else MOST_FAILURES
        for slot in slots:
            if slot.error is not None:
                failed += 1
                if failed <= most_failures:
                    failures.add(f"{FAILED}{slot.error[:FAILURE_CHARS]}")
        if failed and not query.background:
            progress.failed_batch = failed if failed == len(slots) > 1 else 0
        most = limits.max_result_chars
        return slots if most is None else [_cut(slot, most) for slot in slots]

    async def waited(self, query: Query, wait: QueryHandler) -> list[Slot]:
        """Answer a query of the kind "wait" by `wait`, which the connection has."""
        return await self._tree.calls.waited(self._caller.run, query, wait)

    async def _tool(self, query: Query) -> Slot:
        name = query.tool or ""
        if name not in self.tools.names:
            return self.tools.unknown(name)
        if len(query.prompts) != 1:
            return Slot(error="tool takes one prompt, the arguments of one call")
        arguments = str(query.prompts[0])
        self._tool_calls += 1
        number, started = self._tool_calls, time.monotonic()
        self._emit(ToolStarted, number, self._progress.blocks, name, arguments)
        slot = Slot(error="cancelled")
        try:
            limits = self._tree.limits
            slot = await self.tools.call(name, arguments, limits.tool_timeout_s, limits.max_frame_bytes)
        finally:
            self._emit(ToolEnded, number, name, time.monotonic() - started, slot.text, slot.error)
        return slot

    def _left(self) -> dict[str, float | None]:
        seconds = None if self._ends_at is None else round(max(0.0, self._ends_at - time.monotonic()), 3)
        left = {**self._tree.ledger.left(), "run_timeout_s": seconds}
        if self._progress.turns_left is None:
            return left
        blocks = self._tree.limits.max_blocks
        left["max_blocks"] = None if blocks is None else max(0, blocks - self._progress.blocks)
        return {**left, "max_iterations": self._progress.turns_left}


def open_run(
    tree: Tree,
    caller: Caller,
    began: float,
    parent_ends_at: float | None,
    tools: Tools,
    output_type: OutputType | None = None,
    persistent_repl: PersistentRepl | None = None,
    progress: Progress | None = None,
) -> Runner:
    """Compose one run: its loop, and the answers to its REPL. The root is made of the same parts as each child.

    Args:
        began: `time.monotonic()` at the beginning of its time.
        parent_ends_at: `time.monotonic()` at the end of its parent's time; None is never.
        persistent_repl: A REPL for several runs; None opens one for this run.
        progress: Earlier turns, from which the run goes on; None begins anew.
    """
    progress = Progress() if progress is None else progress
    limit_s: float | None = getattr(tree.limits, caller.time_limit)
    ends_at = smaller(parent_ends_at, None if limit_s is None else began + limit_s)
    answer = QueryAnswers(tree, caller, ends_at, tools, progress).handler()
    return Runner(tree, caller, began, answer, progress, tools, output_type, persistent_repl)


def _refused(query: Query, most: int) -> list[Slot]:
    """Refuse a query with more than `most` prompts, or with prompts of a wrong type."""
    why = f"{query.want} takes text, and no content parts"
    if len(query.prompts) > most:
        why = f"batch too large: {len(query.prompts)} > {most}; ask in smaller batches"
    return [Slot(error=why)] * len(query.prompts)


def _cut(slot: Slot, limit: int) -> Slot:
    if len(slot.text) <= limit:
        return slot
    return msgspec.structs.replace(slot, text=shorten(slot.text, limit, end=0))
