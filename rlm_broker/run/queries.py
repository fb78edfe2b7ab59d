"""Answers to a REPL's queries: a completion, child runs (see `children`), a call of a tool, or what is left."""

import json
import time

import msgspec

from rlm_broker.broker.transport.connection import QueryHandler
from rlm_broker.events.event import ToolEnded, ToolStarted
from rlm_broker.run.calls import Caller
from rlm_broker.run.children import Children
from rlm_broker.run.output_type import OutputType
from rlm_broker.run.persistent_repl import PersistentRepl
from rlm_broker.run.runner import Runner
from rlm_broker.run.tools import Tools
from rlm_broker.run.tree import Progress, Tree
from rlm_broker.values.text import shorten
from sandbox_worker.wire.messages import Query, Slot


class QueryAnswers:
    """Answers the REPL of one run. It knows the depth from its run: no message of a REPL can claim another.

    Args:
        ends_at: `time.monotonic()` at which the run's time is up; None is never.
        tools: Functions and values that code of this run may use.
        progress: Progress of the run; it has the number of the block that asks.

    Attributes:
        child_traces: Traces of the children, in the order of their ends.
        tools: Functions that code may call from now on.
    """

    def __init__(self, tree: Tree, caller: Caller, ends_at: float | None, tools: Tools, progress: Progress) -> None:
        self._tree = tree
        self._caller = caller
        self._ends_at = ends_at
        self._children = Children(tree, caller, ends_at, self._begin)
        self.child_traces = self._children.traces
        self.tools = tools
        self._progress = progress
        self._emit = tree.events.of(caller.run, caller.depth)
        self._tool_calls = 0

    @property
    def _below(self) -> Caller:
        """Caller of the queries of this REPL: one depth below the run, with the block that runs now."""
        return Caller(self._caller.run, self._caller.depth + 1, self._caller.question, block=self._progress.blocks)

    def _begin(self, caller: Caller, ends_at: float | None) -> Runner:
        return open_run(self._tree, caller, ends_at, self.tools.for_children)

    def handler(self) -> QueryHandler:
        """Return the handler of the REPL's queries: this object, or the handler that the user puts in its place."""
        replaced = self._tree.query_handler
        return self if replaced is None else replaced(self._caller.run, self._caller.depth, self)

    async def __call__(self, query: Query) -> list[Slot]:
        """Answer each prompt of a query. Errors are texts in the slots: model code must be able to go on."""
        limits = self._tree.limits
        if len(query.prompts) > limits.max_batch_prompts:
            why = f"batch too large: {len(query.prompts)} > {limits.max_batch_prompts}; ask in smaller batches"
            return [Slot(error=why)] * len(query.prompts)
        if query.want != "llm" and not query.is_text:
            return [Slot(error=f"{query.want} takes text, and no content parts")] * len(query.prompts)
        match query.want:
            case "budget":
                return [Slot(text=json.dumps(self._left()))] * len(query.prompts)
            case "tool":
                return [await self._tool(query)] * len(query.prompts)
            case "rlm" if self._below.depth < limits.max_depth or query.contexts:
                slots = await self._children.slots(query, self._below)
            case _:
                slots = await self._tree.calls.slots(self._below, query)
        most = limits.max_result_chars
        return slots if most is None else [_cut(slot, most) for slot in slots]

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
            slot = await self.tools.call(name, arguments, self._tree.limits.tool_timeout_s)
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
    ends_at: float | None,
    tools: Tools,
    output_type: OutputType | None = None,
    persistent_repl: PersistentRepl | None = None,
) -> Runner:
    """Compose one run: its loop, and what answers its REPL. The root is made of the same parts as each child.

    Args:
        tree: What all runs of its tree share.
        caller: The run: its name, depth and question.
        ends_at: `time.monotonic()` at which its time is up; None is never.
        tools: Functions and values that its code may use.
        output_type: Type that its answer must have; None takes any text.
        persistent_repl: REPL that several runs share; None opens one for this run.
    """
    progress = Progress()
    queries = QueryAnswers(tree, caller, ends_at, tools, progress)
    return Runner(tree, caller, queries.handler(), queries.child_traces, progress, tools, output_type, persistent_repl)


def _cut(slot: Slot, limit: int) -> Slot:
    if len(slot.text) <= limit:
        return slot
    return msgspec.structs.replace(slot, text=shorten(slot.text, limit, end=0))
