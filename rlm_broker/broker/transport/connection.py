"""A session on a socket: the asyncio shell around `Session`.

This is the door for a REPL's messages. Behind it no query is weighed again. A query beyond the maximum length is
answered with an error, and its bytes are not kept (`FrameDecoder`). Beyond `max_queries_in_flight` or
`MOST_OPEN_WEIGHT` no further query is taken. A REPL with too many unread replies is not read. Its further bytes fill
the kernel's buffers, and then the REPL's own, limited memory.
"""

import asyncio
import threading
import time
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Iterable, Sequence
from typing import NamedTuple, Protocol, cast

from rlm_broker.broker.transport.provisions import Provisions
from rlm_broker.broker.transport.session import BYTE_WEIGHT, NOTHING, RefusedQuery, Session, State, Wanted
from rlm_broker.concurrency.deadline import begun_task
from rlm_broker.errors import ProtocolViolation, RlmBrokerError, ValueUnavailable, WorkerDied
from sandbox_worker.wire.errors import FrameTooLarge
from sandbox_worker.wire.messages import (
    DONE,
    DisplayMessage,
    FromWorker,
    Output,
    Query,
    Ready,
    Reply,
    Result,
    Slot,
    Submit,
    Values,
)

READ_BYTES = 1 << 16
"""Bytes read at once. Between two reads, all other connections have their turn."""
MESSAGES_IN_A_ROW = 32
"""Messages taken at once; the rest waits for the next turn of the event loop. A read may hold a thousand messages, work
for a tenth of a second."""
MOST_OPEN_WEIGHT = 64 << 20
"""Maximum bytes of memory for the open queries of one connection, see `Session.open_queries`. Beyond it, no further
query is taken until one of them is answered. A single query may take more while no other is open."""
MOST_LOAD = 1 << 30
"""Maximum weight in bytes of the open queries of all connections of one listener. Beyond it, connections with an open
query are not read until others were answered. A connection without one is read, so that every REPL makes progress."""
UNREAD_BYTES = 8 << 20
"""Bytes of unread replies beyond which the connection does not read from the REPL either. So a REPL without reads fills
its own socket, and not this process."""
MOST_UNREAD_BYTES = 32 << 20
"""Bytes of unread replies beyond which a further reply is replaced by an error."""
MOST_BACKGROUND_WEIGHT = 32 << 20
"""Maximum bytes of memory for the open background queries of one connection, beside `MOST_OPEN_WEIGHT`. Beyond it, a
further one is refused. A single one may take more."""

CANCELLED = "cancelled, the block that asked has ended"
ENDED = "cancelled"
"""Error of a child in the background that was ended."""


class _ReadBuffer(threading.local):
    """The read buffer of a thread's loop. All of its connections share one: each takes the data at once."""

    def __init__(self) -> None:
        self.buffer = memoryview(bytearray(READ_BYTES))


_read_buffer = _ReadBuffer()


class QueryHandler(Protocol):
    """Answers the queries of a REPL.

    An async function with this signature, given by the caller of `execute`: the transport depends on no model.

    Example:
        ```python
        async def answer(query: Query) -> list[Slot]:
            return [Slot(str(prompt).upper()) for prompt in query.prompts]

        with sandbox.repl("some text", answer) as repl:
            print(repl.execute("print(llm_query(context))").stdout)  # SOME TEXT
        ```
    """

    async def __call__(self, query: Query, /) -> list[Slot]:
        """Answer one query.

        Cancelled when the block ends or is interrupted, or when the connection is lost. It must then end all its work
        for the query. One with `background` goes on when its block has ended.

        Args:
            query: Query of model code, with its prompts. Its content is untrusted.

        Returns:
            One slot for each prompt, in order. With any other number, each prompt gets an error.

        Raises:
            Exception: Any error becomes the text of each slot's error; the block goes on.
        """
        ...


OnSubmit = Callable[[Submit], Awaitable[list[Slot]]]
"""Checks the fields that a block submits, and returns one slot, with an error unless all are right."""
OnShown = Callable[[Output | DisplayMessage], None]
"""Called with each piece of output and each display of a block, as it comes."""
OnAnswered = Callable[[Query | Submit, list[Slot], int], object]
"""Called with each query, its answer as it was sent, and the bytes of the query, roughly."""
_CALLED = {"llm": "llm_query", "rlm": "rlm_query", "keep": "rlm_start", "budget": "budget()"}
"""Kind of query → name of its function in model code."""


async def refuse(query: Query) -> list[Slot]:
    """Refuse every prompt of a query: the answer of a REPL without models."""
    if query.want == "tool":
        reason = f"the tool {query.tool}() is not available: this REPL was opened without answer="
    else:
        reason = f"{_CALLED[query.want]} is not available: no model is connected to this sandbox"
    return [Slot(error=reason)] * len(query.prompts)


async def refuse_fields(_submitted: Submit) -> list[Slot]:
    """Refuse fields: the answer to a block that was not asked for any."""
    return [Slot(error="this block has no fields to submit")]


class _Background(NamedTuple):
    """An open background query: the task that answers it, and its weight in bytes."""

    task: asyncio.Task[None]
    weight: int


class QueryLoad:
    """A sum of weights, and the connections paused because of it, longest first.

    Args:
        most: Bytes from which on the load is high.

    Attributes:
        weight: Weight of the open queries in bytes, see `Session.open_weight`. Callers add to it; `lighten` takes off.
    """

    def __init__(self, most: int = MOST_LOAD) -> None:
        self.weight = 0
        self._most = most
        self._paused: OrderedDict[object, Callable[[], None]] = OrderedDict()
        self._resumes = False

    @property
    def is_high(self) -> bool:
        """Whether the weight has reached its bound."""
        return self.weight >= self._most

    def lighten(self, by: int) -> None:
        """Take `by` bytes off, and let waiting connections read on while the load is not high."""
        self.weight -= by
        if self._resumes:  # a connection read on, and its query was answered at once: the loop below goes on
            return
        self._resumes = True
        try:
            while by and self._paused and not self.is_high:
                _, resume = self._paused.popitem(last=False)
                resume()
        finally:
            self._resumes = False

    def wait(self, who: object, resume: Callable[[], None]) -> None:
        """Call `resume` once the load has fallen, unless `who` is forgotten before."""
        self._paused.setdefault(who, resume)

    def forget(self, who: object) -> None:
        """Undo `wait` for `who`. Has no effect when repeated."""
        self._paused.pop(who, None)


class Connection(asyncio.BufferedProtocol):
    """Runs blocks in the REPL at the other end of a connected socket.

    Made before the socket: the listener gives it the socket with its token. When the socket is lost, `ready` and the
    future of `execute` fail with `WorkerDied`, and each query being answered is cancelled.

    Args:
        session: A fresh session, owned by the connection.
        max_queries_in_flight: Maximum open queries. Beyond it, as at `MOST_OPEN_WEIGHT`, a further one waits for a
            reply to one of them.

    Attributes:
        on_answered: See `OnAnswered`.
    """

    def __init__(self, session: Session, max_queries_in_flight: int) -> None:
        self._session = session
        self._max_queries_in_flight = max_queries_in_flight
        self._transport: asyncio.Transport | None = None
        self._answering: dict[str, asyncio.Task[None]] = {}
        self._cancelled: set[asyncio.Task[None]] = set()
        self._background: dict[str, _Background] = {}
        self._background_weight = 0
        self._answer: QueryHandler = refuse
        self._on_submit: OnSubmit = refuse_fields
        self._on_shown: OnShown = _ignore
        self._ready = asyncio.Event()
        self._result: asyncio.Future[Result] | None = None
        self._reads: dict[int, asyncio.Future[Values]] = {}
        self._on_end: Callable[[], object] = _ignore
        self.on_answered: OnAnswered = _ignore
        self._lost: RlmBrokerError | None = None
        self._writable = True
        self._is_reading = True
        self._held_back: Query | Submit | None = None
        self._takes_more_soon = False
        self._lets_go = False
        self._load = QueryLoad()
        self._load_share = 0

    def share(self, load: QueryLoad) -> None:
        """Count the open queries in `load`, together with other connections'."""
        self._load = load

    @property
    def block(self) -> int:
        """Number of the last started block; the first is 1."""
        return self._session.block

    def count_from(self, block: int) -> None:
        """Have the next block get the number after this one."""
        self._session.block = block

    async def ready(self) -> None:
        """Wait until the REPL can take its first block.

        Raises:
            WorkerDied: The socket was lost first.
            ProtocolViolation: The worker sent any other message.
        """
        await self._ready.wait()
        if self._lost:
            raise self._lost

    def execute(
        self,
        code: str,
        answer: QueryHandler,
        on_shown: OnShown,
        wanted: Wanted = NOTHING,
        on_end: "Callable[[], object] | None" = None,
        on_submit: OnSubmit = refuse_fields,
    ) -> asyncio.Future[Result]:
        """Start one block, and answer its queries from now on. Call `settle` when the future is done.

        Args:
            code: Python source.
            answer: Called for each query, several at the same time.
            on_shown: Called for each piece of output and each display as it comes.
            wanted: Input of the block beside its code, and values for its result.
            on_submit: Called for the fields that the block submits.
            on_end: Called as soon as the future is done. A callback of the future waits for the loop's next turn.

        Returns:
            A future of the block's result. It fails with `WorkerDied` or `ProtocolViolation` if the connection ends
            first.

        Raises:
            WorkerDied, ProtocolViolation: The connection has ended already.
            FrameTooLarge: `code` and `stdin` are longer than a frame may be.
        """
        if self._lost:
            raise self._lost
        self._answer, self._on_shown, self._on_end, self._lets_go = answer, on_shown, on_end or _ignore, False
        self._on_submit = on_submit
        self._write(self._session.execute(code, wanted))
        self._result = asyncio.get_running_loop().create_future()
        return self._result

    @property
    def is_open(self) -> bool:
        """Whether the worker is there, as far as is known: the news of its death may still be on its way."""
        return self._lost is None

    def provide(self, provisions: Provisions) -> None:
        """Give the REPL more tools and values from its next block on, see `Session.provide`."""
        self._session.provide(provisions)

    @property
    def waits(self) -> bool:
        """Whether a thread of the block waits for a reply, so that its variables can be read."""
        return self._session.state is State.RUNNING and self._waiting > 0 and not self._lets_go

    @property
    def _waiting(self) -> int:
        """Number of open queries for whose replies threads wait: all but those in the background."""
        return len(self._session.open_queries) - len(self._background)

    async def read(self, names: Sequence[str]) -> Values:
        """Return variables of the block that `waits`. See `Wanted.names`.

        Raises:
            ValueUnavailable: The block has ended or was interrupted meanwhile.
            FrameTooLarge: The names are longer than a frame may be.
        """
        number, frame = self._session.read(names)
        answer: asyncio.Future[Values] = asyncio.get_running_loop().create_future()
        self._reads[number] = answer
        self._write(frame)
        try:
            return await answer
        finally:
            self._reads.pop(number, None)

    def _take_variables(self, message: Values) -> None:
        answer = self._reads.get(message.number)
        if answer is not None and not answer.done():
            answer.set_result(message)

    def _end_reads(self) -> None:
        for answer in self._reads.values():
            if not answer.done():
                answer.set_exception(ValueUnavailable("variables cannot be read: the block does not wait any more"))

    def let_go(self) -> None:
        """Answer all present and further queries of an interrupted block with an error.

        A query without room holds back all messages behind it, perhaps the block's result.
        """
        self._lets_go = True
        self._end_reads()
        self._cancel_answers()
        self._go_on()

    async def settle(self) -> None:
        """Cancel all answering of the block, and wait for its end: a model call or a child run may be below."""
        self._end_reads()
        while self._answering or self._cancelled:
            self._cancel_answers()
            await asyncio.wait(self._cancelled)
            self._cancelled = {task for task in self._cancelled if not task.done()}

    async def answered(self, query: Query) -> list[Slot]:
        """Wait for background queries as a query of the kind "wait" wants it, and say which were answered."""
        ids = query.texts
        ends_at = None if query.timeout_s is None else time.monotonic() + query.timeout_s
        pending = {self._background[id].task for id in ids if id in self._background}
        while len(pending) > max(0, len(ids) - query.count):
            left_s = None if ends_at is None else ends_at - time.monotonic()
            done, pending = await asyncio.wait(pending, timeout=left_s, return_when=asyncio.FIRST_COMPLETED)
            if not done:
                break
        return [Slot("" if id in self._background else DONE) for id in ids]

    async def end_background(self, ids: Iterable[str] | None = None) -> None:
        """Cancel background queries, all if no ids are given, and wait until they have ended."""
        if ending := self._cancel_background(self._background if ids is None else ids):
            await asyncio.wait(ending)

    async def close(self) -> None:
        """Close the socket, and wait until all answering for the REPL has ended. Has no effect when repeated."""
        self._lose(WorkerDied("the connection was closed"))
        await self.end_background()
        await self.settle()

    # -- called by asyncio -------------------------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        # A cast and no isinstance: uvloop's transports are not subclasses of asyncio.Transport.
        transport = cast("asyncio.Transport", transport)
        if self._lost:  # closed before the worker came
            transport.abort()
            return
        self._transport = transport
        transport.set_write_buffer_limits(high=UNREAD_BYTES)

    def get_buffer(self, sizehint: int) -> memoryview:  # noqa: ARG002 - asyncio's signature
        return _read_buffer.buffer

    def buffer_updated(self, nbytes: int) -> None:
        self.receive(_read_buffer.buffer[:nbytes])

    def receive(self, data: bytes | memoryview) -> None:
        """Take received bytes, also those right behind the token."""
        try:
            self._session.feed(data)
        except ProtocolViolation as violation:
            self._lose(violation)
        else:
            if not self._takes_more_soon:
                self._take_messages()

    def connection_lost(self, exc: Exception | None) -> None:
        reason = f": {exc}" if exc else ""
        self._lose(WorkerDied(f"the REPL's connection to the broker was closed{reason}"))

    def pause_writing(self) -> None:
        self._writable = False
        self._regulate()

    def resume_writing(self) -> None:
        self._writable = True
        self._regulate()

    # -- internal ----------------------------------------------------------------------------------------------------

    def _take_messages(self) -> None:
        """Take up to `MESSAGES_IN_A_ROW` messages; the others wait for the next turn of the loop.

        A query without room waits for a reply to another one, and all messages behind it wait with it.
        """
        self._takes_more_soon = False
        try:
            for _ in range(MESSAGES_IN_A_ROW):
                if self._held_back is not None:
                    break
                message = self._session.next_message()
                if message is None:
                    break
                self._take(message)
            else:
                self._take_more_soon()
        except ProtocolViolation as violation:
            self._lose(violation)
        self._regulate()

    def _take_more_soon(self) -> None:
        if not self._takes_more_soon:
            self._takes_more_soon = True
            asyncio.get_running_loop().call_soon(self._take_messages)

    def _take(self, message: FromWorker | RefusedQuery) -> None:
        match message:
            case Query() | Submit() if self._has_room:
                self._begin(message)
            case Query() | Submit():
                self._held_back = message
                self._go_on()
            case Output() | DisplayMessage():
                self._on_shown(message)
            case Result():
                if self._result is not None and not self._result.done():
                    self._result.set_result(message)
                    self._on_end()
            case Values():
                self._take_variables(message)
            case RefusedQuery():
                self._begin(message.query, message.why)
            case Ready():
                self._ready.set()

    def _begin(self, query: Query | Submit, refusal: str | None = None) -> None:
        weight = self._session.open_queries[query.id]
        self._load_share += weight
        self._load.weight += weight
        if query.background and refusal is None:
            refusal = self._refusal(query, weight)
        if refusal is not None or self._lets_go:
            self._send(query, [Slot(error=refusal or CANCELLED)] * len(query.prompts))
            return
        task = begun_task(self._reply(query), query.id)
        if task.done():
            return
        if query.background:
            self._background[query.id] = _Background(task, weight)
            self._background_weight += weight
        else:
            self._answering[query.id] = task

    def _refusal(self, query: Query | Submit, weight: int) -> str | None:
        """Return why a background query is refused; None if it is not."""
        if query.want not in ("rlm", "keep"):
            return f"{query.want} cannot run in the background"
        if len(self._background) >= self._max_queries_in_flight:
            return (
                f"{len(self._background):,} children of this code are open already (max_queries_in_flight): wait for "
                "one, or cancel one"
            )
        if self._background and self._background_weight + weight > MOST_BACKGROUND_WEIGHT:
            return "the tasks of children that are open take too much memory: hand long texts over as contexts"
        return None

    @property
    def _has_room(self) -> bool:
        """Whether the last query may be answered now, beside the others."""
        if self._lets_go or self._waiting <= 1:
            return True
        return (
            self._waiting <= self._max_queries_in_flight
            and self._session.open_weight - self._background_weight <= MOST_OPEN_WEIGHT
            and not self._load.is_high
        )

    def _go_on(self) -> None:
        """Begin the held back query if there is room now, and read on if there is room for more."""
        if self._held_back is not None:
            if self._has_room:
                query, self._held_back = self._held_back, None
                self._begin(query)
                self._take_more_soon()
            elif self._load.is_high:
                self._load.wait(self, self._go_on)
        self._regulate()

    def _cancel_answers(self) -> None:
        """Cancel each answering task once: a second cancellation would hit the clean-up that ends a child run."""
        for task in self._answering.values():
            task.cancel()
        self._cancelled.update(self._answering.values())
        self._answering.clear()

    def _cancel_background(self, ids: Iterable[str]) -> set[asyncio.Task[None]]:
        tasks = {self._background[id].task for id in ids if id in self._background}
        for task in tasks:
            if not task.cancelling():  # as in `_cancel_answers`: each task once
                task.cancel()
        return tasks

    async def _reply(self, query: Query | Submit) -> None:
        failed = ENDED if query.background else CANCELLED
        try:
            slots = await (self._answer(query) if isinstance(query, Query) else self._on_submit(query))
            if not isinstance(slots, list) or not {*map(type, slots)} <= {Slot}:
                failed = "the function that answers this REPL must return a list of Slot"
            elif len(slots) == len(query.prompts):
                self._send(query, slots)
            else:
                failed = f"{len(slots)} answers to {len(query.prompts)} prompts"
        except RlmBrokerError as error:
            failed = str(error)
        except Exception as error:  # noqa: BLE001 - a bug in the answering function must not block the REPL
            failed = f"{type(error).__name__}: {error}"
        finally:  # also when cancelled: without a reply, the REPL would wait for as long as the block may take
            if query.id in self._session.open_queries:
                self._send(query, [Slot(error=failed)] * len(query.prompts))
            self._answering.pop(query.id, None)  # before the REPL can use the id again
            if query.background and (ended := self._background.pop(query.id, None)) is not None:
                self._background_weight -= ended.weight

    def _send(self, query: Query | Submit, slots: list[Slot]) -> None:
        weight = self._session.open_queries.get(query.id)
        if weight is None:
            return  # answered already, or the connection was lost since
        if self._transport is not None and self._transport.get_write_buffer_size() > MOST_UNREAD_BYTES:
            why = f"dropped: more than {MOST_UNREAD_BYTES:,} bytes of earlier replies are still unread"
            slots = [Slot(error=why)] * len(slots)
        try:
            frame = self._session.reply(Reply(query.id, slots))
        except FrameTooLarge as error:
            too_large = [Slot(error=f"the reply is too large: {error}")] * len(slots)
            try:
                frame = self._session.reply(Reply(query.id, too_large))
            except FrameTooLarge as error:
                why = f"the errors of {len(slots):,} prompts do not fit into a reply: {error}"
                self._lose(ProtocolViolation(why))
                return
        self._write(frame)
        self.on_answered(query, slots, weight // BYTE_WEIGHT)
        self._load_share -= weight
        self._load.lighten(weight)
        if not self._is_reading or self._held_back is not None:  # else the connection reads on as it did
            self._go_on()

    def _regulate(self) -> None:
        """Read on, or leave further bytes in the kernel's buffers, by the bounds at the top of this module."""
        if self._transport is None:
            return
        reads = self._writable and self._held_back is None and not self._takes_more_soon
        if self._is_reading != reads:
            self._is_reading = reads
            if reads:
                self._transport.resume_reading()
            else:
                self._transport.pause_reading()

    def _write(self, frame: bytes | bytearray) -> None:
        if self._transport is not None and not self._transport.is_closing():
            self._transport.write(memoryview(frame))  # a view: asyncio slices off what the kernel took

    def _lose(self, reason: RlmBrokerError) -> None:
        self._session.close()
        self._held_back = None
        self._load.forget(self)
        share, self._load_share = self._load_share, 0
        self._load.lighten(share)
        self._lost = self._lost or reason
        self._ready.set()
        if self._result is not None and not self._result.done():  # a complete result counts
            self._result.set_exception(self._lost)
            self._result.exception()  # read, or asyncio would report it as never retrieved if its caller was cancelled
            self._on_end()
        self._end_reads()
        self._cancel_answers()
        self._cancel_background(self._background)
        # Those of the last block have this connection.
        self._answer, self._on_shown, self._on_submit = refuse, _ignore, refuse_fields
        if self._transport is not None:
            self._transport.abort()
            self._transport = None


def _ignore(*_news: object) -> None:
    """Drop news: the default before the first block."""
