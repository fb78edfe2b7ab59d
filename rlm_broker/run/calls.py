"""Language model calls of one run tree: counted before, bounded meanwhile, accounted for after.

`docs/walkthrough.md` ("A block asks a model") lists the stations of a call in order. This module has those of the tree:
a place among its runs, the hold of means, the count, the events and the recording. The stations of the client follow in
`broker.client_queue`.
"""

import asyncio
import sys
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import msgspec

from rlm_broker.broker.broker import Completing
from rlm_broker.broker.clients.base import BaseClient, CallId, LMRequest
from rlm_broker.broker.routing import Routing
from rlm_broker.broker.transport.connection import QueryHandler
from rlm_broker.concurrency.turns import Apart, FairSemaphore, bounded_map
from rlm_broker.errors import RlmBrokerError
from rlm_broker.events.event import CallEnded, CallRetried, CallStarted, CallText, TreeEvents
from rlm_broker.results import Call, ChatMessage
from rlm_broker.run.ledger import NOTHING, Hold, Ledger, smaller
from rlm_broker.run.tokens import SMALL_CHARS, count_tokens, require_fit
from rlm_broker.usage import Usage
from rlm_broker.values.remembered import Remembered
from sandbox_worker.wire.errors import MessageInvalid
from sandbox_worker.wire.messages import DONE, Query, Slot
from sandbox_worker.wire.prompts import ImagePart, MessagePart, Part, Prompt, are_messages

if TYPE_CHECKING:
    from rlm_broker.broker.clients.recording import Recorder, Recording

WINDOW_TOKENS = 128_000
"""Assumed context window in tokens, if a client does not state its own: most models of 2025 and 2026 have as many or
more."""
LARGE_CHARS = 1 << 17
"""Characters of a reply beyond which its event has a turn of the event loop of its own: the search for secrets takes 30
ms a megabyte."""
MOST_ANSWER_BYTES = 32 << 20
"""Maximum memory in bytes of the answers to unfinished batches of one run. Further answers become errors."""
MOST_PAID_BYTES = 32 << 20
"""Maximum memory in bytes of the answered calls of open blocks, and of the answers that blocks cut short have left in
one tree. Further calls are not remembered."""
EXTRA_BYTES = 64
"""Memory in bytes of the ids and log probabilities of a token, if the server gives them."""


class Caller(msgspec.Struct, frozen=True):
    """The run behind a call.

    Attributes:
        run: Name of the run, see `Event.run`.
        depth: Depth of the call: 0 for a root's own loop, 1 for the queries of its REPL.
        question: Question of that run, beside the prompt.
        model: Model named by code for the run's own loop, or None. The model policy judges it.
        block: Number of the asking block, from 1; 0 for the run's own loop.
        has_task_as_context: Whether the run's context is its task. `question` then has the two ends of a long one.
        asked_in: Number of the parent's block behind this child run; 0 for a root.
        whole_task: A long task beside a context, of which `question` has the two ends; None for any other.
    """

    run: str
    depth: int
    question: str | None
    model: str | None = None
    block: int = 0
    has_task_as_context: bool = False
    asked_in: int = 0
    whole_task: str | None = None

    @property
    def time_limit(self) -> str:
        """Name of the limit of the run's time."""
        return "child_timeout_s" if self.depth else "run_timeout_s"


class _Batch:
    """The calls of one query of several prompts, and their progress.

    Attributes:
        todo: Prompt, number of the sample and id of each call. Equal prompts are sent once, unless the query wants
            samples.
        places: For each prompt of the query, the index of its call.
        number: Number among the batches of the tree, from 1; 0 for a query of one prompt.
        done: Number of ended calls.
        answer_bytes: Memory of the answers so far.
    """

    def __init__(self, query: Query, new_id: Callable[[], CallId]) -> None:
        self.todo: list[tuple[Prompt, int, CallId]] = []
        self.places: list[int] = []
        self.number = self.done = self.answer_bytes = 0
        seen: Counter[str] | None = Counter() if query.samples else None
        calls: dict[tuple[str, int], int] = {}
        for prompt in query.prompts:
            key = prompt_key(prompt)
            sample = 0
            if seen is not None:
                sample = seen[key]
                seen[key] += 1
            place = calls.setdefault((key, sample), len(self.todo))
            if place == len(self.todo):
                self.todo.append((prompt, sample, new_id()))
            self.places.append(place)


class BlockCalls:
    """Answered calls of the blocks of a tree. What a killed or interrupted block has paid for is not paid again.

    A call belongs to the innermost open block above it: its own, or one that waits for its run. When that block ends,
    the call goes to the next block above, or is forgotten if there is none. If a block is cut short, its calls become
    answers, and each answers one equal request. Digests are made only then: no other run pays for them.

    Attributes:
        open: Run → answered calls of its open block: request, call, and memory in bytes.
        remembered: Number of answers that no request has taken.
        taken: Number of answers that were taken.
    """

    def __init__(self) -> None:
        self.open: dict[str, list[tuple[LMRequest, Call, int]]] = {}
        self.remembered = self.taken = 0
        self._answers = Remembered[bytes, Call]()
        self._size = 0

    def begin(self, run: str) -> None:
        """Record that a block of a run begins."""
        self.open[run] = []

    def end(self, run: str) -> None:
        """Record that the block of a run has ended."""
        made = self.open.pop(run)
        if made and (above := self._block_above(run)) is not None:
            above += made
        else:
            self._size -= sum([size for _, _, size in made])

    def add(self, run: str, request: LMRequest, call: Call) -> None:
        """Record an answered call of a run."""
        block = self.open.get(run) or self._block_above(run)
        size = sys.getsizeof(call.response) if call.extra is None else _size_of(call)
        for message in request.messages[-1:] if request.is_loop else request.messages:  # a loop shares the others
            said = message.content
            size += sys.getsizeof(said if isinstance(said, str) else repr(said))
        if block is not None and self._size + size <= MOST_PAID_BYTES:
            block.append((request, call, size))
            self._size += size

    async def remember(self, run: str) -> int:
        """Make answers of the calls of a run's block that was cut short; return their number."""
        made, self.open[run] = self.open[run], []
        self._size -= sum([size for _, _, size in made])  # now, since the run may be cancelled while it waits
        keys = await _digests([request for request, _, _ in made]) if made else ()
        for key, (_, call, _) in zip(keys, made, strict=True):
            self._answers.add(key, call)
            self._size += _size_of(call)
        self.remembered += len(made)
        return len(made)

    async def take(self, request: LMRequest) -> Call | None:
        """Return an answer that an equal request has left, once; None if there is none."""
        (key,) = await _digests([request])
        call = self._answers.take(key)
        if call is not None:
            self._size -= _size_of(call)
            self.remembered -= 1
            self.taken += 1
        return call

    def _block_above(self, run: str) -> list[tuple[LMRequest, Call, int]] | None:
        while run and run not in self.open:
            run = run.rpartition(".")[0]
        return self.open.get(run)


class TreeCalls:
    """Makes the calls of a tree. All runs of the tree share one, and take turns at its places.

    Make it in the root run's task: `_is_stopped` looks at a cancellation of that task.

    Args:
        handler: Completes the calls: the broker, or a part before it.
        recorder: Writes down each call; None writes none.
        replay: Recording that is replayed; None for a run with models.
        routing: Picks the client of each call; None takes the routing of the handler.
        tells_text: Whether `CallText` events carry the pieces of a reply as they come.
        sample: Number of the tree among the branches of a run, from 1; 0 for a tree of its own.

    Attributes:
        paid: Answered calls of its blocks.
    """

    def __init__(
        self,
        handler: Completing,
        ledger: Ledger,
        events: TreeEvents,
        recorder: "Recorder | None" = None,
        *,
        replay: "Recording | None" = None,
        routing: Routing | None = None,
        tells_text: bool = False,
        sample: int = 0,
    ) -> None:
        self._handler = handler
        self._sample = sample
        self.routing = routing or handler.routing
        self._ledger = ledger
        self._events = events
        self._recorder = recorder
        self._replay = replay
        self._recorded = set[CallId]()
        self._root_task = None if recorder is None else asyncio.current_task()
        self._tells_text = tells_text
        self.paid = BlockCalls()
        self._places = FairSemaphore(ledger.limits.max_concurrent_calls)
        self._apart = Apart()
        self._answer_bytes = Counter[str]()
        self._numbers: dict[tuple[str, int], int] = {}
        self._batches = 0

    def model_name(self, depth: int, wanted: str | None = None) -> str:
        """Return the name of the model of a loop at `depth`.

        Raises:
            UnknownModel: Model code may not use the wanted one.
        """
        return self.routing.pick_for_code(wanted, depth).model_name

    def known_window(self, caller: Caller) -> int | None:
        """Return the window in tokens of the model of a run's loop; None if its client does not say."""
        return self.routing.pick_for_code(caller.model, caller.depth).context_tokens

    def window_tokens(self, caller: Caller) -> int:
        """Return the window in tokens of the model of a run's loop, if need be the assumed one."""
        return self.known_window(caller) or WINDOW_TOKENS

    async def count_tokens(self, caller: Caller, text: str) -> float:
        """Return the tokens of a text for the model of a run's loop."""
        client = self.routing.pick_for_code(caller.model, caller.depth)
        return await count_tokens(client, text, is_exact=not self.is_recorded)

    @property
    def is_recorded(self) -> bool:
        """Whether calls are recorded. Tokens are then estimated, so that a replay cuts at the same places."""
        return self._recorder is not None

    def limit_tokens(self, caller: Caller) -> float | None:
        """Return the maximum tokens of a request of a run's loop, with room for its reply; None is without a bound."""
        limits, window = self._ledger.limits, self.window_tokens(caller)
        if limits.compaction_threshold is None:
            return None
        return min(limits.compaction_threshold * window, max(window / 2, window - (limits.max_completion_tokens or 0)))

    async def turn(
        self,
        caller: Caller,
        messages: Sequence[ChatMessage],
        *,
        block: int = 0,
        is_loop: bool = True,
        has_own_prompt: bool = False,
    ) -> Call:
        """Make the call of one turn of a run's loop, after its block number `block`.

        Raises:
            ModelFailed: The call failed.
            LimitReached: As for `Ledger.charge_call`.
        """
        request = LMRequest(
            tuple(messages),
            caller.model,
            self._ledger.limits.max_completion_tokens,
            caller.depth,
            caller.question,
            is_loop=is_loop,
            id=self._id(caller, block),
            has_own_prompt=has_own_prompt,
        )
        if not self._places.take():
            await self._place(caller, partial(self._record, request, None))
        try:
            return await self._call(caller, request)
        finally:
            self._places.release()

    async def slots(self, caller: Caller, query: Query) -> list[Slot]:
        """Make one plain completion for each prompt of a query from model code.

        A failure fills its own slot alone. Equal prompts are sent once, unless the query wants samples. A call
        unfinished at `timeout_s` is cancelled, and its slot says so.
        """
        block = block_of(query)
        if len(query.prompts) == 1 and query.timeout_s is None:
            call = (query.prompts[0], 0, self._id(caller, block))
            if not self._places.take():
                await self._place(caller, partial(self._record_unanswered, caller, query, *call))
            try:
                return [await self._answered(caller, query, *call)]
            finally:
                self._places.release()
        batch = _Batch(query, lambda: self._id(caller, block))
        if len(query.prompts) > 1:
            self._batches += 1
            batch.number = self._batches
        done: Sequence[Slot | None] = [None] * len(batch.todo)
        try:
            done = await bounded_map(
                batch.todo,
                lambda call: self._kept(caller, batch, self._answered(caller, query, *call, batch)),
                smaller(query.max_concurrent, self._ledger.limits.max_concurrent_calls) or len(done),
                query.timeout_s,
                places=self._places,
                session=caller.run,
            )
        finally:  # the answers belong to the REPL now
            self._answer_bytes[caller.run] -= batch.answer_bytes
            if not self._answer_bytes[caller.run]:
                del self._answer_bytes[caller.run]
        for call, slot in zip(batch.todo, done, strict=True) if self._recorder else ():
            if slot is None:
                await self._apart.do(partial(self._record_unanswered, caller, query, *call))
        # Without a time limit, a call has no outcome only if its client cancelled the task it was called in.
        late = None if query.timeout_s is None else f"not done within timeout_s = {query.timeout_s:g}"
        missing = Slot(error=late or "the client cancelled its own call")
        return [done[place] or missing for place in batch.places]

    async def waited(self, run: str, query: Query, wait: QueryHandler) -> list[Slot]:
        """Answer a query of the kind "wait" by `wait`. A recording has the outcome, and a replay the same one."""
        if self._replay is not None and (done := self._replay.next_done(run, query.id)) is not None:
            await wait(msgspec.structs.replace(query, prompts=done, count=len(done), timeout_s=None))
            return [Slot(DONE if id in done else "") for id in query.texts]
        slots = await wait(query)
        self.record_news(run, query.id, [id for id, slot in zip(query.texts, slots, strict=True) if slot.text])
        return slots

    def record_news(self, run: str, query: str | None = None, done: Sequence[str] = ()) -> None:
        """Write down that a child run was cancelled, or which children had answered, if calls are recorded."""
        if self._recorder is not None:
            self._recorder.add_news(run, query, done)

    async def _place(self, caller: Caller, record_unanswered: Callable[[], None]) -> None:
        """Wait for a place of the tree; call `record_unanswered` if the wait is cancelled."""
        try:
            await self._places.acquire(caller.run)
        except asyncio.CancelledError:
            record_unanswered()
            raise

    async def _kept(self, caller: Caller, batch: _Batch, answering: Awaitable[Slot]) -> Slot:
        """Await an answer and count its memory. Beyond `MOST_ANSWER_BYTES`, return an error in its place."""
        slot = await answering
        size = sys.getsizeof(slot.text)
        if self._answer_bytes[caller.run] + size > MOST_ANSWER_BYTES:
            why = f"its batches hold {MOST_ANSWER_BYTES:,} bytes of answers already: ask in smaller batches"
            return Slot(error=f"the answer of {len(slot.text):,} characters was dropped: {why}")
        batch.answer_bytes += size
        self._answer_bytes[caller.run] += size
        return slot

    async def _answered(
        self, caller: Caller, query: Query, prompt: Prompt, sample: int, id: CallId, batch: _Batch | None = None
    ) -> Slot:
        """Answer one prompt. The caller has a place for it."""
        if not isinstance(prompt, str) and (problem := problem_with(prompt, query.system)) is not None:
            return Slot(error=problem)
        request = self._request(caller, query, prompt, sample, id)
        try:
            call = await self._call(caller, request, batch)
        except RlmBrokerError as error:
            return Slot(error=in_words(error))
        return Slot(text=call.response, error=call.problem)

    def _request(self, caller: Caller, query: Query, prompt: Prompt, sample: int, id: CallId) -> LMRequest:
        return LMRequest(
            conversation(prompt, query.system),
            query.model,
            smaller(query.max_completion_tokens, self._ledger.limits.max_completion_tokens),
            caller.depth,
            caller.question,
            sample=sample,
            id=id,
            temperature=query.temperature,
        )

    def _id(self, caller: Caller, block: int) -> CallId:
        place = (caller.run, block)
        self._numbers[place] = number = self._numbers.get(place, 0) + 1
        return CallId(caller.run, block, number)

    async def _call(self, caller: Caller, request: LMRequest, batch: _Batch | None = None) -> Call:
        client = self.routing.pick_for_code(request.model, caller.depth)
        if self._sample:
            request = request.in_sample(self._sample)
        if not request.is_loop and request.chars > SMALL_CHARS:
            await require_fit(client, request, is_exact=not self.is_recorded)  # before the provider is paid
        if self.paid.remembered and caller.depth and (call := await self.paid.take(request)) is not None:
            return await self._sent(caller, client, request, self._ledger.calls, NOTHING, batch, call)
        hold = NOTHING
        try:
            if self._ledger.has_bounded_means:
                hold = await self._ledger.hold(request.chars, request.max_completion_tokens)
            number = self._ledger.charge_call()  # after the wait for means: a call that is never sent is not counted
            return await self._sent(caller, client, request, number, hold, batch)
        except asyncio.CancelledError:
            self._record(request, None)
            raise
        finally:
            if hold is not NOTHING:
                self._ledger.release(hold)

    async def _sent(
        self,
        caller: Caller,
        client: BaseClient,
        request: LMRequest,
        number: int,
        hold: Hold,
        batch: _Batch | None,
        remembered: Call | None = None,
    ) -> Call:
        """Make a call that is counted, or take an answer that was paid for."""
        number += self.paid.taken  # which the ledger does not count
        emit, run, depth = self._events.emit, caller.run, caller.depth  # an `Emitter` would take 1.8 us more
        is_wanted = self._events.is_wanted
        if is_wanted:
            prompt, system = shown(request, is_of_code=caller.block > 0), new_system(request)
            place = () if batch is None or not batch.number else (batch.number, len(batch.todo))
            emit(CallStarted, run, depth, number, request.model, prompt, system, caller.block, *place)
        if self._tells_text:
            on_text = lambda text: emit(CallText, run, depth, number, text)  # noqa: E731
            request = msgspec.structs.replace(request, on_text=on_text)
        started = time.monotonic()
        try:
            call = remembered or await self._handler.complete(
                client,
                request,
                self._ledger.limits.call_timeout_s,
                session=(id(self), run),
                on_retry=(lambda *told: emit(CallRetried, run, depth, number, *told)) if is_wanted else None,
            )
        except BaseException as error:  # also a cancellation: the event and the recording must have each call's end
            why = in_words(error)
            if isinstance(error, RlmBrokerError):
                self._record(request, error, client.model_name)
            taken_s = time.monotonic() - started
            emit(CallEnded, run, depth, number, client.model_name, Usage(), taken_s, "", why, *_counted(batch))
            raise
        if self.paid.open:
            self.paid.add(run, request, call)
        usage, taken_s = call.usage, call.execution_time
        if remembered is not None:  # a recording has it already, and a replay remembers it in the same place
            usage, taken_s = Usage(total_cost=0.0), 0.0
        else:
            if self._recorder is not None:
                self._record(request, call, call.root_model)
            self._ledger.settle(hold, run, call.root_model, depth, usage, len(call.response))
        if is_wanted:
            answered = (call.root_model, usage, taken_s, call.response, None)
            more = {"extra": call.extra, "is_remembered": remembered is not None}
            if len(call.response) <= LARGE_CHARS:
                emit(CallEnded, run, depth, number, *answered, *_counted(batch), **more)
            else:
                await self._apart.do(lambda: emit(CallEnded, run, depth, number, *answered, *_counted(batch), **more))
        return call

    def _record_unanswered(self, caller: Caller, query: Query, prompt: Prompt, sample: int, id: CallId) -> None:
        if self._recorder is not None:
            self._record(self._request(caller, query, prompt, sample, id), None)

    def _record(self, request: LMRequest, outcome: Call | RlmBrokerError | None, model: str = "") -> None:
        """Write a call down once, if calls are recorded. The outcome None is a cancelled call."""
        if self._recorder is None or request.id is None or request.id in self._recorded:
            return
        from rlm_broker.broker.clients.recording import Counted, Failure, Recorded, recorded_request

        self._recorded.add(request.id)
        asked = recorded_request(request)
        match outcome:
            case None:
                recorded = Recorded(request.id, asked, model, cancelled=True, run_stopped=self._is_stopped())
            case Call(usage=usage):
                used = Counted(usage.total_input_tokens, usage.total_output_tokens, usage.total_cost)
                recorded = Recorded(request.id, asked, model, outcome.response, outcome.problem, used=used)
            case _:
                failure = Failure(str(outcome), getattr(outcome, "cause", "provider"))
                recorded = Recorded(request.id, asked, model, failure=failure)
        self._recorder.add(recorded)

    def _is_stopped(self) -> bool:
        """Whether the run was stopped from outside. A time limit of the run cancels only tasks below the root's."""
        return self._root_task is not None and self._root_task.cancelling() > 0


async def _digests(requests: Sequence[LMRequest]) -> list[bytes]:
    from rlm_broker.broker.clients.recording import request_digests  # a run without kills and recordings needs none

    return await request_digests(requests)


def _size_of(call: Call) -> int:
    """Return the memory of an answer in bytes."""
    return sys.getsizeof(call.response) + (EXTRA_BYTES * call.usage.total_tokens if call.extra else 0)


def in_words(error: BaseException) -> str:
    """Return the text of an error; its class name, or "cancelled", if it has no text of its own."""
    if isinstance(error, asyncio.CancelledError):
        return "cancelled"
    return str(error) or type(error).__name__


def _counted(batch: _Batch | None) -> tuple[int, ...]:
    """Count a call as ended; return its batch's number, ended calls and all calls. Empty without a batch."""
    if batch is None or not batch.number:
        return ()
    batch.done += 1
    return batch.number, batch.done, len(batch.todo)


def block_of(query: Query) -> int:
    """Return the block in a query's id. The REPL counts it, so it is a label, and no decision depends on it."""
    number = query.id.partition(":")[0]
    return int(number) if number.isdecimal() and len(number) < 10 else 0


# -- prompts of model code as messages: text, content parts, or a conversation of the code's own ----------------------


def conversation(prompt: Prompt, system: str | None) -> tuple[ChatMessage, ...]:
    """Return the messages of a prompt, behind a system prompt if there is one."""
    asked: tuple[ChatMessage, ...]
    if isinstance(prompt, str):
        asked = (ChatMessage("user", prompt),)
    elif messages := _messages(prompt):
        asked = tuple(ChatMessage(each.role, msgspec.to_builtins(each.content)) for each in messages)
    else:
        asked = (ChatMessage("user", msgspec.to_builtins(prompt)),)
    return (ChatMessage("system", system), *asked) if system else asked


def problem_with(prompt: Sequence[Part | MessagePart], system: str | None) -> str | None:
    """Return why a prompt of content parts or messages is refused, or None if it may be sent.

    Images must be `data:` addresses. Providers, and some clients on this machine, fetch any other: model code could
    have addresses of the local network requested.
    """
    try:
        has_messages = are_messages(prompt)
    except MessageInvalid as problem:
        return str(problem)
    messages = _messages(prompt)
    if system and any(message.role == "system" for message in messages):
        return "a prompt with a system message takes no system prompt beside it"
    contents = [message.content for message in messages if not isinstance(message.content, str)]
    parts = [part for content in contents for part in content] if has_messages else prompt
    if all(part.image_url.url.startswith("data:image/") for part in parts if isinstance(part, ImagePart)):
        return None
    return "an image is given as data: {'type': 'image_url', 'image_url': {'url': 'data:image/png;base64,...'}}"


def prompt_key(prompt: Prompt) -> str:
    """Return a key for comparing prompts."""
    return prompt if isinstance(prompt, str) else repr(prompt)


def shown(request: LMRequest, *, is_of_code: bool) -> str | list[Any]:
    """Return the prompt for the event of a call: the last message, or all if model code asks with a conversation."""
    messages = request.messages
    if not is_of_code or len(messages) == 1 or (len(messages) == 2 and messages[0].role == "system"):
        return messages[-1].content
    return [{"role": message.role, "content": message.content} for message in messages]


def new_system(request: LMRequest) -> str | None:
    """Return the system prompt of a call if it is new in the trace; None for the later turns of a loop."""
    first = request.messages[0]
    is_new = first.role == "system" and len(request.messages) == 2
    return str(first.content) if is_new else None


def _messages(prompt: Sequence[Part | MessagePart]) -> list[MessagePart]:
    return [part for part in prompt if isinstance(part, MessagePart)]
