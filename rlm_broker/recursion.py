"""What a REPL's queries become: a completion, a child run with a REPL of its own, or a call of a tool."""

import asyncio
import json
import re
import time

import msgspec

from rlm_broker.context import store
from rlm_broker.errors import LimitReached, RlmBrokerError
from rlm_broker.handler.calls import Caller, in_words
from rlm_broker.runner import CHARS_PER_TOKEN, Runner, Tree
from rlm_broker.tools import Tools
from rlm_broker.trace.events import PREVIEW_CHARS, RunStarted
from rlm_broker.transport.connection import QueryHandler
from rlm_broker.types import ChildTrace
from sandbox_worker.wire.messages import Query, Slot

_ASKS_FOR_CODE = re.compile(r"```|\b(code|python|compute|calculate|count|sum|sort|add up)\b", re.IGNORECASE)


class Recursion:
    """Answers the REPL of one run. The depth is ours: no frame can claim another.

    Args:
        ends_at: When the run's time is up, as `time.monotonic` says it; None is never.
        tools: What code of this run may call.

    Attributes:
        child_traces: What became of the children, in the order of their ends.
    """

    def __init__(self, tree: Tree, caller: Caller, ends_at: float | None, tools: Tools) -> None:
        self.child_traces: list[ChildTrace] = []
        self._tree = tree
        self._caller = caller
        self._ends_at = ends_at
        self._tools = tools
        self._below = Caller(caller.run, caller.depth + 1, caller.question)  # what its REPL asks
        self._started = 0

    def handler(self) -> QueryHandler:
        """What answers the REPL: this, or what the user puts in its place."""
        replaced = self._tree.query_handler
        return self if replaced is None else replaced(self._caller.run, self._caller.depth, self)

    async def __call__(self, query: Query) -> list[Slot]:
        limits = self._tree.limits
        most = limits.max_batch_prompts
        if len(query.prompts) > most:
            return [Slot(error=f"batch too large: {len(query.prompts)} > {most}")] * len(query.prompts)
        texts = query.texts
        if query.want != "llm" and len(texts) < len(query.prompts):
            return [Slot(error=f"{query.want} takes text, and no content parts")] * len(query.prompts)
        match query.want:
            case "budget":
                return [Slot(text=json.dumps(self._left()))] * len(query.prompts)
            case "tool":
                timeout_s = limits.tool_timeout_s
                return [await self._tools.call(query.tool or "", each, timeout_s) for each in texts]
            case "rlm" if self._below.depth < limits.max_depth:
                slots = await self._children(query, texts)
            case _:
                slots = await self._tree.calls.slots(self._below, query)
        return [_cut(slot, limits.max_result_chars) for slot in slots]

    def _left(self) -> dict[str, float | None]:
        seconds = None if self._ends_at is None else round(max(0.0, self._ends_at - time.monotonic()), 3)
        return {**self._tree.ledger.left(), "run_timeout_s": seconds}

    # -- children ----------------------------------------------------------------------------------------------------

    async def _children(self, query: Query, prompts: list[str]) -> list[Slot]:
        try:
            served_by = self._tree.calls.model_name(self._below.depth, query.model)
        except RlmBrokerError as refused:
            return [Slot(error=in_words(refused))] * len(query.prompts)
        most = self._tree.limits.max_children_per_batch or len(query.prompts)
        async with asyncio.TaskGroup() as group:
            children = [group.create_task(self._answered(query, prompt, served_by)) for prompt in prompts[:most]]
        excess = Slot(error=f"max_children_per_batch exceeded: {len(query.prompts)} > {most}")
        return [*(child.result() for child in children), *[excess] * (len(query.prompts) - len(children))]

    async def _answered(self, query: Query, prompt: str, served_by: str) -> Slot:
        """A child run; or a completion, where `recursion="auto"` finds that one will do."""
        decide = self._tree.needs_repl
        asked = Caller(self._below.run, self._below.depth, self._below.question, query.model)
        if decide is not None and not decide(prompt, self._tree.calls.window_tokens(asked)):
            (slot,) = await self._tree.calls.slots(self._below, msgspec.structs.replace(query, prompts=[prompt]))
            return slot
        return await self._child(prompt, query.model, served_by)

    async def _child(self, prompt: str, model: str | None, served_by: str) -> Slot:
        # Of its depth alone: were there one for all, parents that wait would hold what their children need.
        async with self._tree.child_places[self._below.depth]:
            try:
                self._tree.ledger.charge_child()
            except LimitReached:
                return Slot(error="max_children_total exceeded")
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
        below = Recursion(self._tree, caller, ends_at, self._tools.for_children)
        runner = Runner(self._tree, caller, below.handler(), below.child_traces, self._tools.for_children)
        try:
            with store(prompt) as context:
                self._tree.emit(RunStarted(caller.run, caller.depth, caller.question, served_by, {}))
                completion = await runner.run(context)
        except RlmBrokerError as error:
            is_late = isinstance(error, LimitReached) and error.limit == "child_timeout_s"
            why = f"child timeout after {time.monotonic() - started:.3f}s" if is_late else in_words(error)
            return Slot(text=runner.progress.partial_answer or "", error=why)
        return Slot(text=completion.response or "")


def needs_repl(prompt: str, window_tokens: int) -> bool:
    """For `recursion="auto"`: a prompt that fills half of what its model can read, or that asks for code."""
    return len(prompt) > window_tokens * CHARS_PER_TOKEN // 2 or _ASKS_FOR_CODE.search(prompt) is not None


def _after(started: float, seconds: float | None) -> float | None:
    return None if seconds is None else started + seconds


def _cut(slot: Slot, limit: int | None) -> Slot:
    if limit is None or len(slot.text) <= limit:
        return slot
    return Slot(f"{slot.text[:limit]}\n... [{len(slot.text) - limit:,} characters cut]", slot.error)
