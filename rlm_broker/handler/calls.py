"""The language model calls of one run tree: counted before, bounded meanwhile, accounted for after."""

import asyncio
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from rlm_broker.clients.base import Client, LMRequest
from rlm_broker.errors import RlmBrokerError
from rlm_broker.handler.handler import LMHandler
from rlm_broker.ledger import Ledger
from rlm_broker.trace.events import CallEnded, CallStarted, Emit
from rlm_broker.types import Call, ChatMessage, Usage
from sandbox_worker.wire.messages import Query, Slot

PREVIEW_CHARS = 80


@dataclass(frozen=True, slots=True)
class Caller:
    """On whose behalf a call is made.

    Attributes:
        run: Name of the run, see `trace.events`.
        depth: 0 for a root's own loop; what its REPL asks is 1.
        question: Of that run, out of band.
    """

    run: str
    depth: int
    question: str | None


class RunCalls:
    """Makes the calls of a tree; every run of the tree shares one."""

    def __init__(self, handler: LMHandler, ledger: Ledger, emit: Emit) -> None:
        self._handler = handler
        self._ledger = ledger
        self._emit = emit
        self._slots = asyncio.Semaphore(ledger.limits.max_concurrent_calls)

    def model_name(self, depth: int) -> str:
        """The model that serves a loop at `depth`."""
        return self._handler.routing.pick(None, depth).model_name

    async def turn(self, caller: Caller, messages: Sequence[ChatMessage], model: str | None = None) -> Call:
        """One turn of a run's loop.

        Raises:
            ModelFailed: The call failed.
            LimitReached: `max_llm_calls` calls were made already.
        """
        request = LMRequest(
            tuple(messages),
            model,
            self._ledger.limits.max_completion_tokens,
            caller.depth,
            caller.question,
            is_loop=True,
        )
        return await self._call(caller, lambda: self._handler.routing.pick(model, caller.depth), request)

    async def slots(self, caller: Caller, query: Query) -> list[Slot]:
        """One plain completion for each prompt of a query that model-written code made.

        A failure fills its own slot and leaves the others alone.
        """
        own_limit = asyncio.Semaphore(query.max_concurrent or len(query.prompts))

        async def one(prompt: str) -> Slot:
            async with own_limit:
                return await self._slot(caller, query, prompt)

        if len(query.prompts) == 1:
            return [await one(query.prompts[0])]
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(one(prompt)) for prompt in query.prompts]
        return [task.result() for task in tasks]

    async def _slot(self, caller: Caller, query: Query, prompt: str) -> Slot:
        system = [ChatMessage("system", query.system)] if query.system else []
        most = [n for n in (query.max_completion_tokens, self._ledger.limits.max_completion_tokens) if n is not None]
        request = LMRequest(
            (*system, ChatMessage("user", prompt)),
            query.model,
            min(most, default=None),
            caller.depth,
            caller.question,
        )
        try:
            call = await self._call(
                caller, lambda: self._handler.routing.pick_for_code(query.model, caller.depth), request
            )
        except RlmBrokerError as error:
            return Slot(error=str(error))
        return Slot(text=call.response)

    async def _call(self, caller: Caller, pick: Callable[[], Client], request: LMRequest) -> Call:
        client = pick()
        number = self._ledger.charge_call()
        self._emit(CallStarted(caller.run, caller.depth, number, request.model, _preview(request)))
        started = time.monotonic()
        try:
            async with self._slots:
                call = await self._handler.complete(client, request, self._ledger.limits.call_timeout_s)
        except BaseException as error:  # recorded, and raised again
            why = str(error) or type(error).__name__
            taken_s = time.monotonic() - started
            self._emit(CallEnded(caller.run, caller.depth, number, client.model_name, Usage(), taken_s, "", why))
            raise
        self._ledger.record(call.root_model, caller.depth, call.usage)
        self._emit(
            CallEnded(caller.run, caller.depth, number, call.root_model, call.usage, call.execution_time, call.response)
        )
        return call


def _preview(request: LMRequest) -> str:
    content = request.messages[-1].content
    return content[:PREVIEW_CHARS] if isinstance(content, str) else f"{len(content)} content parts"
