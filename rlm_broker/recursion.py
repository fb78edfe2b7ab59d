"""What a REPL's queries become: a completion, or a child run with a REPL of its own."""

import asyncio
import time

from rlm_broker.context import store
from rlm_broker.errors import LimitReached, RlmBrokerError
from rlm_broker.handler.calls import PREVIEW_CHARS, Caller
from rlm_broker.runner import Runner, Tree
from rlm_broker.trace.events import RunStarted
from rlm_broker.types import ChildTrace
from sandbox_worker.wire.messages import Query, Slot


class Recursion:
    """Answers the REPL of one run. The depth is ours: no frame can claim another.

    Attributes:
        child_traces: What became of the children, in the order of their ends.
    """

    def __init__(self, tree: Tree, caller: Caller) -> None:
        self.child_traces: list[ChildTrace] = []
        self._tree = tree
        self._caller = caller
        self._below = Caller(caller.run, caller.depth + 1, caller.question)
        # Of this run alone: were it the tree's, parents that wait would hold what their children need.
        self._children = asyncio.Semaphore(tree.limits.max_concurrent_children)
        self._started = 0

    async def __call__(self, query: Query) -> list[Slot]:
        most = self._tree.limits.max_batch_prompts
        if len(query.prompts) > most:
            return [Slot(error=f"batch too large: {len(query.prompts)} > {most}")] * len(query.prompts)
        if query.want == "llm" or self._below.depth >= self._tree.limits.max_depth:
            return await self._tree.calls.slots(self._below, query)
        async with asyncio.TaskGroup() as group:
            children = [group.create_task(self._child(prompt)) for prompt in query.prompts]
        return [child.result() for child in children]

    async def _child(self, prompt: str) -> Slot:
        async with self._children:
            try:
                self._tree.ledger.charge_child()
            except LimitReached:
                return Slot(error="max_children_total exceeded")
            self._started += 1
            caller = Caller(f"{self._caller.run}.{self._started}", self._below.depth, prompt)
            started = time.monotonic()
            slot = await self._run(caller, prompt, started)
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

    async def _run(self, caller: Caller, prompt: str, started: float) -> Slot:
        model = self._tree.calls.model_name(caller.depth)
        self._tree.emit(RunStarted(caller.run, caller.depth, caller.question, model, {}))
        below = Recursion(self._tree, caller)
        runner = Runner(self._tree, caller, below, below.child_traces)
        try:
            with store(prompt) as context:
                async with asyncio.timeout(self._tree.limits.child_timeout_s):
                    completion = await runner.run(context)
        except TimeoutError:
            why = f"child timeout after {time.monotonic() - started:.3f}s"
            return Slot(text=runner.progress.partial_answer or "", error=why)
        except RlmBrokerError as error:
            return Slot(text=runner.progress.partial_answer or "", error=str(error))
        return Slot(text=completion.response or "")
