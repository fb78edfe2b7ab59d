"""The language model calls of one run tree: counted before, bounded meanwhile, accounted for after."""

import asyncio
import contextlib
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from rlm_broker.clients.base import Client, LMRequest
from rlm_broker.errors import RlmBrokerError
from rlm_broker.handler.handler import LMHandler
from rlm_broker.ledger import Hold, Ledger
from rlm_broker.trace.events import PREVIEW_CHARS, CallEnded, CallStarted, Emit
from rlm_broker.types import Call, ChatMessage, Usage
from sandbox_worker.wire.messages import Query, Slot

WINDOW_TOKENS = 128_000
"""Of a model whose client does not say it: what most models of 2025 and 2026 have at least."""


@dataclass(frozen=True, slots=True)
class Caller:
    """On whose behalf a call is made.

    Attributes:
        run: Name of the run, see `trace.events`.
        depth: 0 for a root's own loop; what its REPL asks is 1.
        question: Of that run, out of band.
        model: That code wants for the run's own loop; the policy judges it.
    """

    run: str
    depth: int
    question: str | None
    model: str | None = None


class RunCalls:
    """Makes the calls of a tree; every run of the tree shares one."""

    def __init__(self, handler: LMHandler, ledger: Ledger, emit: Emit) -> None:
        self._handler = handler
        self._ledger = ledger
        self._emit = emit
        self._slots = asyncio.Semaphore(ledger.limits.max_concurrent_calls)

    def model_name(self, depth: int, wanted: str | None = None) -> str:
        """The model that serves a loop at `depth`.

        Raises:
            UnknownModel: Code may not have the one that it wants.
        """
        return self._handler.routing.pick_for_code(wanted, depth).model_name

    def window_tokens(self, caller: Caller) -> int:
        """How much the model of a run's loop can read: what its client says, else an estimate."""
        client = self._handler.routing.pick_for_code(caller.model, caller.depth)
        return getattr(client, "context_tokens", None) or WINDOW_TOKENS

    async def turn(self, caller: Caller, messages: Sequence[ChatMessage], *, is_loop: bool = True) -> Call:
        """One turn of a run's loop.

        Raises:
            ModelFailed: The call failed.
            LimitReached: `max_llm_calls` calls were made already, or the tokens or the budget are spent.
        """
        request = LMRequest(
            tuple(messages),
            caller.model,
            self._ledger.limits.max_completion_tokens,
            caller.depth,
            caller.question,
            is_loop=is_loop,
        )
        return await self._call(caller, request)

    async def slots(self, caller: Caller, query: Query) -> list[Slot]:
        """One plain completion for each prompt of a query that model-written code made.

        A failure fills its own slot and leaves the others alone; the same prompt twice is sent once, unless samples are
        wanted; what is not there at `timeout_s` is cancelled, and its slot says so.
        """
        if not query.prompts:
            return []
        own_limit = asyncio.Semaphore(query.max_concurrent or len(query.prompts))

        async def one(prompt: str) -> Slot:
            async with own_limit:
                return await self._slot(caller, query, prompt)

        if len(query.prompts) == 1 and query.timeout_s is None:
            return [await one(query.prompts[0])]
        asked = list(enumerate(query.prompts)) if query.samples else [(0, prompt) for prompt in query.prompts]
        async with asyncio.TaskGroup() as group:
            tasks = {each: group.create_task(one(each[1])) for each in dict.fromkeys(asked)}
            with _cancelled_after(query.timeout_s, tasks.values()):
                await asyncio.wait(tasks.values())
        late = Slot(error=f"not done within timeout_s = {query.timeout_s or 0:g}")
        return [late if tasks[each].cancelled() else tasks[each].result() for each in asked]

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
            call = await self._call(caller, request)
        except RlmBrokerError as error:
            return Slot(error=in_words(error))
        return Slot(text=call.response)

    async def _call(self, caller: Caller, request: LMRequest) -> Call:
        client = self._handler.routing.pick_for_code(request.model, caller.depth)
        async with self._slots:
            hold = await self._ledger.hold(_chars(request), request.max_completion_tokens)
            try:
                number = self._ledger.charge_call()  # not before: what is never sent is not counted
                return await self._sent(caller, client, request, number, hold)
            finally:
                self._ledger.release(hold)

    async def _sent(self, caller: Caller, client: Client, request: LMRequest, number: int, hold: Hold) -> Call:
        self._emit(CallStarted(caller.run, caller.depth, number, request.model, _preview(request)))
        started = time.monotonic()
        try:
            call = await self._handler.complete(client, request, self._ledger.limits.call_timeout_s)
        except BaseException as error:  # recorded, and raised again
            taken_s = time.monotonic() - started
            self._emit(
                CallEnded(caller.run, caller.depth, number, client.model_name, Usage(), taken_s, "", in_words(error))
            )
            raise
        self._ledger.settle(hold, caller.run, call.root_model, caller.depth, call.usage)
        self._emit(
            CallEnded(caller.run, caller.depth, number, call.root_model, call.usage, call.execution_time, call.response)
        )
        return call


@contextlib.contextmanager
def _cancelled_after(timeout_s: float | None, tasks: Iterable["asyncio.Task[Slot]"]) -> Iterator[None]:
    """Cancel what is not done by then, once."""
    if timeout_s is None:
        yield
        return
    timer = asyncio.get_running_loop().call_later(timeout_s, lambda: [task.cancel() for task in tasks])
    try:
        yield
    finally:
        timer.cancel()


def in_words(error: BaseException) -> str:
    """What to tell of an error that may have no text of its own."""
    if isinstance(error, asyncio.CancelledError):
        return "cancelled"
    return str(error) or type(error).__name__


def _preview(request: LMRequest) -> str:
    content = request.messages[-1].content
    return content[:PREVIEW_CHARS] if isinstance(content, str) else f"{len(content)} content parts"


def _chars(request: LMRequest) -> int:
    return sum(len(message.content) for message in request.messages if isinstance(message.content, str))
