"""What a REPL's queries become: a completion, a child run with a REPL of its own, or a call of a tool."""

import asyncio
import json
import re
import time
from collections.abc import Sequence
from dataclasses import replace

import msgspec

from rlm_broker.clients.base import estimate_tokens
from rlm_broker.concurrency.allowance import Allowance
from rlm_broker.concurrency.bounded_map import bounded_map
from rlm_broker.context.store import store_as_it_is
from rlm_broker.errors import LimitReached, RlmBrokerError
from rlm_broker.results import ChildTrace
from rlm_broker.run.calls import MOST_DECODED_BYTES, Caller, in_words
from rlm_broker.run.output_type import OutputType
from rlm_broker.run.persistent_repl import PersistentRepl
from rlm_broker.run.runner import Runner
from rlm_broker.run.tools import Tools
from rlm_broker.run.tree import Progress, Tree
from rlm_broker.trace.events import PREVIEW_CHARS, RunStarted, ToolEnded, ToolStarted
from rlm_broker.transport.connection import QueryHandler
from sandbox_worker.wire.errors import MessageInvalid
from sandbox_worker.wire.messages import Query, Slot
from sandbox_worker.wire.prompts import Prompt, Prompts

VALUE_WEIGHT = 512
"""Bytes of memory for each value among a tool's arguments: what pydantic makes of it, or notes as wrong with it."""
TOO_MANY_CHILDREN = Slot(error="max_children_total exceeded")
_ASKS_FOR_CODE = re.compile(r"```|\b(code|python|compute|calculate|count|sum|sort|add up)\b", re.IGNORECASE)


class QueryAnswers:
    """Answers the REPL of one run. The depth is ours: no frame can claim another.

    Args:
        ends_at: When the run's time is up, as `time.monotonic` says it; None is never.
        tools: What code of this run may call.
        progress: How far the run has come: which block asks.

    Attributes:
        child_traces: What became of the children, in the order of their ends.
        tools: What code may call from now on.
    """

    def __init__(self, tree: Tree, caller: Caller, ends_at: float | None, tools: Tools, progress: Progress) -> None:
        self.child_traces: list[ChildTrace] = []
        self._tree = tree
        self._caller = caller
        self._ends_at = ends_at
        self.tools = tools
        self._progress = progress
        self._emit = tree.events.of(caller.run, caller.depth)
        self._started = 0
        self._tool_calls = 0
        self._arguments = Allowance(MOST_DECODED_BYTES)

    @property
    def _below(self) -> Caller:
        """On whose behalf the REPL asks just now."""
        return Caller(self._caller.run, self._caller.depth + 1, self._caller.question, block=self._progress.blocks)

    def handler(self) -> QueryHandler:
        """What answers the REPL: this, or what the user puts in its place."""
        replaced = self._tree.query_handler
        return self if replaced is None else replaced(self._caller.run, self._caller.depth, self)

    async def __call__(self, query: Query) -> list[Slot]:
        limits = self._tree.limits
        most = limits.max_batch_prompts
        if len(query.prompts) > most:
            return [Slot(error=f"batch too large: {len(query.prompts)} > {most}")] * len(query.prompts)
        if query.want != "llm" and not query.is_text:
            return [Slot(error=f"{query.want} takes text, and no content parts")] * len(query.prompts)
        match query.want:
            case "budget":
                return [Slot(text=json.dumps(self._left()))] * len(query.prompts)
            case "tool":
                return [await self._tool(query.tool or "", query.prompts, index) for index in range(len(query.prompts))]
            case "rlm" if self._below.depth < limits.max_depth:
                slots = await self._children(query)
            case _:
                slots = await self._tree.calls.slots(self._below, query)
        return [_cut(slot, limits.max_result_chars) for slot in slots]

    async def _tool(self, name: str, prompts: Sequence[Prompt], index: int) -> Slot:
        """Call a tool. What its arguments may take in memory, as text and as values, is part of an allowance."""
        if index:
            await asyncio.sleep(0)  # many that are refused at once would hold the event loop
        if name not in self.tools.names:
            return self.tools.unknown(name)
        encoded = prompts.encoded(index) if isinstance(prompts, Prompts) else str(prompts[index]).encode()
        values = encoded.count(b",") + encoded.count(b"[") + encoded.count(b"{")
        async with self._arguments.held(4 * len(encoded) + VALUE_WEIGHT * values):
            return await self._called(name, str(prompts[index]))

    async def _called(self, name: str, arguments: str) -> Slot:
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
        return {**self._tree.ledger.left(), "run_timeout_s": seconds}

    # -- children ----------------------------------------------------------------------------------------------------

    async def _children(self, query: Query) -> list[Slot]:
        """Child runs; and completions, for the prompts that `recursion="auto"` gives no REPL.

        A prompt stays data until there is a place for its child: prompts beyond a limit never become more.
        """
        limits, count = self._tree.limits, len(query.prompts)
        try:
            served_by = self._tree.calls.model_name(self._below.depth, query.model)
        except RlmBrokerError as refused:
            return [Slot(error=in_words(refused))] * count
        most = limits.max_children_per_batch or count
        slots = [Slot(error=f"max_children_per_batch exceeded: {count} > {most}")] * count
        runs, completions = await self._divided(query, min(count, most))
        left = self._tree.ledger.left()["max_children_total"]
        allowed = len(runs) if left is None else int(left)
        room = self._tree.child_places[self._below.depth]
        async with asyncio.TaskGroup() as group:
            completing = group.create_task(self._completions(query, completions))
            children = await bounded_map(
                runs[:allowed],
                lambda index: self._child(query, index, served_by, room.memory),
                limits.max_concurrent_children,
                places=room.places,
                session=self._caller.run,
            )
        answers = [*children, *[TOO_MANY_CHILDREN] * (len(runs) - len(children)), *completing.result()]
        for index, slot in zip([*runs, *completions], answers, strict=True):
            assert slot is not None  # without a time limit, each piece of work is done
            slots[index] = slot
        return slots

    async def _divided(self, query: Query, count: int) -> tuple[list[int], list[int]]:
        """Indexes of the first `count` prompts: those that get a REPL, and those that get a completion."""
        decide = self._tree.needs_repl
        if decide is None:
            return list(range(count)), []
        window = self._tree.calls.window_tokens(replace(self._below, model=query.model))
        runs: list[int] = []
        completions: list[int] = []
        for index in range(count):
            try:
                has_repl = decide(str(query.prompts[index]), window)
            except MessageInvalid:  # its child will say so
                has_repl = True
            (runs if has_repl else completions).append(index)
            await asyncio.sleep(0)  # a decision looks through a text
        return runs, completions

    async def _completions(self, query: Query, indexes: list[int]) -> list[Slot]:
        if not indexes:
            return []
        prompts = query.prompts
        some = prompts.subset(indexes) if isinstance(prompts, Prompts) else [prompts[index] for index in indexes]
        return await self._tree.calls.slots(self._below, msgspec.structs.replace(query, prompts=some))

    async def _child(self, query: Query, index: int, served_by: str, memory: Allowance) -> Slot:
        prompts = query.prompts
        if not isinstance(prompts, Prompts):
            return await self._child_about(str(prompts[index]), query.model, served_by)
        async with memory.held(prompts.decoded_bytes(index)):
            try:
                prompt = str(prompts[index])
            except MessageInvalid as problem:
                return Slot(error=str(problem))
            return await self._child_about(prompt, query.model, served_by)

    async def _child_about(self, prompt: str, model: str | None, served_by: str) -> Slot:
        try:
            self._tree.ledger.charge_child()
        except LimitReached:
            return TOO_MANY_CHILDREN
        self._started += 1
        caller = Caller(f"{self._caller.run}.{self._started}", self._below.depth, prompt, model)
        started = time.monotonic()
        slot = Slot(error="cancelled")
        try:
            slot = await self._run(caller, prompt, served_by)
        except Exception as error:  # noqa: BLE001 - of the user's own functions: its siblings go on
            slot = Slot(error=f"{type(error).__name__}: {error}")
        finally:
            self.child_traces.append(
                ChildTrace(
                    depth=caller.depth,
                    duration_s=time.monotonic() - started,
                    prompt_preview=prompt[:PREVIEW_CHARS],
                    result_preview=slot.text[:PREVIEW_CHARS] or None,
                    error=slot.error,
                )
            )
        return slot

    async def _run(self, caller: Caller, prompt: str, served_by: str) -> Slot:
        started = time.monotonic()
        ends = [self._ends_at, _after(started, self._tree.limits.child_timeout_s)]
        ends_at = min((end for end in ends if end is not None), default=None)
        runner = open_run(self._tree, caller, ends_at, self.tools.for_children)
        try:
            with store_as_it_is(prompt) as context:
                emit = self._tree.events.of(caller.run, caller.depth)
                emit(RunStarted, caller.question, served_by, {}, self._progress.blocks)
                completion = await runner.run(context)
        except RlmBrokerError as error:
            is_late = isinstance(error, LimitReached) and error.limit == "child_timeout_s"
            why = f"child timeout after {time.monotonic() - started:.3f}s" if is_late else in_words(error)
            return Slot(text=runner.progress.partial_answer or "", error=why)
        return Slot(text=completion.response or "")


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
        tree: What all its runs share.
        caller: Which run it is, at which depth, about which question.
        ends_at: When its time is up, as `time.monotonic` says it; None is never.
        tools: What its code may call.
        output_type: What its answer has to be; None is any text.
        persistent_repl: The REPL of several runs; None is one of its own.
    """
    progress = Progress()
    queries = QueryAnswers(tree, caller, ends_at, tools, progress)
    return Runner(tree, caller, queries.handler(), queries.child_traces, progress, tools, output_type, persistent_repl)


def needs_repl(prompt: str, window_tokens: int) -> bool:
    """For `recursion="auto"`: a prompt that fills half of what its model can read, or that asks for code."""
    return estimate_tokens(len(prompt)) > window_tokens / 2 or _ASKS_FOR_CODE.search(prompt) is not None


def _after(started: float, seconds: float | None) -> float | None:
    return None if seconds is None else started + seconds


def _cut(slot: Slot, limit: int | None) -> Slot:
    if limit is None or len(slot.text) <= limit:
        return slot
    return Slot(f"{slot.text[:limit]}\n... [{len(slot.text) - limit:,} characters cut]", slot.error)
