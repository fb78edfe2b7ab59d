"""A session on a socket: the asyncio shell, as thin as it can be."""

import asyncio
import threading
from collections.abc import Callable
from typing import Protocol, cast

from rlm_broker.errors import ProtocolViolation, RlmBrokerError, WorkerDied
from rlm_broker.transport.session import Provided, Session
from sandbox_worker.wire.errors import FrameTooLarge
from sandbox_worker.wire.messages import FromWorker, Output, Query, Ready, Reply, Result, Slot

READ_BYTES = 1 << 16
"""Read at once: between two reads it is everybody else's turn."""
UNREAD_BYTES = 8 << 20
"""Replies that wait for a REPL to read them. Past it nothing more is read from the REPL either: one that only asks and
never listens fills its own socket, not this process."""


class _Incoming(threading.local):
    """Where a thread's loop reads into: one buffer for all of its connections, since each takes it at once."""

    def __init__(self) -> None:
        self.buffer = memoryview(bytearray(READ_BYTES))


_incoming = _Incoming()


class QueryHandler(Protocol):
    """Whoever answers a REPL: given by the runner, so that nothing here knows what a model is."""

    async def __call__(self, query: Query, /) -> list[Slot]:
        """One slot for each prompt, in order. Cancelling it ends whatever was started for it."""
        ...


async def refuse(query: Query) -> list[Slot]:
    """The answer of a REPL without models."""
    reason = f"no model is connected to this sandbox, {query.want}_query is not available"
    return [Slot(error=reason)] * len(query.prompts)


class Connection(asyncio.BufferedProtocol):
    """Runs blocks in the REPL at the other end of a connected socket.

    Made before the socket is: a listener gives it one when somebody shows the right token. When the socket is lost,
    whatever waits here fails with `WorkerDied`, and what was being done for the REPL is cancelled.

    Args:
        session: A fresh one.
        max_queries_in_flight: At this number of open queries nothing more is read, until one of them is answered; the
            same when they hold as many bytes as one frame may have.
    """

    def __init__(self, session: Session, max_queries_in_flight: int) -> None:
        self._session = session
        self._max_queries_in_flight = max_queries_in_flight
        self._transport: asyncio.Transport | None = None
        self._answering: dict[str, asyncio.Task[None]] = {}
        self._cancelled: set[asyncio.Task[None]] = set()
        self._answer: QueryHandler = refuse
        self._on_output: Callable[[Output], None] = _ignore
        self._ready = asyncio.Event()
        self._result: asyncio.Future[Result] | None = None
        self._lost: RlmBrokerError | None = None
        self._writable = True
        self._is_reading = True

    @property
    def block(self) -> int:
        """Number of the last block that was started; the first is 1."""
        return self._session.block

    async def ready(self) -> None:
        """Wait until the REPL can take its first block.

        Raises:
            WorkerDied: The socket was lost first.
            ProtocolViolation: The worker said anything else.
        """
        await self._ready.wait()
        if self._lost:
            raise self._lost

    def execute(self, code: str, answer: QueryHandler, on_output: Callable[[Output], None]) -> asyncio.Future[Result]:
        """Start one block, and answer its queries from now on. `settle` when the future is done.

        Args:
            answer: Called for each query, several at the same time.
            on_output: Called for each piece of output as it comes.

        Returns:
            The block's result; `WorkerDied` or `ProtocolViolation` if the connection ends before.

        Raises:
            WorkerDied, ProtocolViolation: It has ended already.
            FrameTooLarge: The code is longer than a frame may be.
        """
        if self._lost:
            raise self._lost
        self._answer, self._on_output = answer, on_output
        self._write(self._session.execute(code))
        self._result = asyncio.get_running_loop().create_future()
        return self._result

    @property
    def is_open(self) -> bool:
        """Whether there is still somebody at its other end, as far as is known."""
        return self._lost is None

    def provide(self, provided: Provided) -> None:
        """Give the REPL more, see `Session.provide`; code finds it from its next block on."""
        self._session.provide(provided)

    async def settle(self) -> None:
        """Cancel what is still being answered and wait: a model call or a whole child run may hang below it."""
        while self._answering or self._cancelled:
            self._cancel_answers()
            await asyncio.wait(self._cancelled)
            self._cancelled = {task for task in self._cancelled if not task.done()}

    async def close(self) -> None:
        """Hang up, and wait until everything that was being done for the REPL has ended. Harmless when repeated."""
        self._lose(WorkerDied("the connection was closed"))
        await self.settle()

    # -- asyncio's side ----------------------------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        # Not isinstance: that of uvloop is no asyncio.Transport.
        transport = cast("asyncio.Transport", transport)
        if self._lost:  # whoever expected this worker has given up
            transport.abort()
            return
        self._transport = transport
        transport.set_write_buffer_limits(high=UNREAD_BYTES)

    def get_buffer(self, sizehint: int) -> memoryview:  # noqa: ARG002 - asyncio's signature
        return _incoming.buffer

    def buffer_updated(self, nbytes: int) -> None:
        self.receive(_incoming.buffer[:nbytes])

    def receive(self, data: bytes | memoryview) -> None:
        """Take what arrived."""
        try:
            for message in self._session.receive(data):
                self._take(message)
        except ProtocolViolation as violation:
            self._lose(violation)

    def connection_lost(self, exc: Exception | None) -> None:
        reason = f": {exc}" if exc else ""
        self._lose(WorkerDied(f"the REPL's connection to the broker was closed{reason}"))

    def pause_writing(self) -> None:
        self._writable = False
        self._regulate()

    def resume_writing(self) -> None:
        self._writable = True
        self._regulate()

    # -- ours --------------------------------------------------------------------------------------------------------

    def _take(self, message: FromWorker) -> None:
        match message:
            case Query():
                self._answering[message.id] = asyncio.get_running_loop().create_task(self._reply(message))
                self._regulate()
            case Output():
                self._on_output(message)
            case Result():
                if self._result is not None and not self._result.done():
                    self._result.set_result(message)
            case Ready():
                self._ready.set()

    def _cancel_answers(self) -> None:
        """Once each: a second time would hit what is tidying up, and a child run's processes would outlive it."""
        for task in self._answering.values():
            task.cancel()
        self._cancelled.update(self._answering.values())
        self._answering.clear()

    async def _reply(self, query: Query) -> None:
        failed = "cancelled, the block that asked has ended"
        try:
            slots = await self._answer(query)
            if len(slots) == len(query.prompts):
                self._send(query, slots)
            else:
                failed = f"{len(slots)} answers to {len(query.prompts)} prompts"
        except RlmBrokerError as error:
            failed = str(error)
        except Exception as error:  # noqa: BLE001 - a bug of whoever answers must not block the REPL
            failed = f"{type(error).__name__}: {error}"
        finally:  # whatever happened: a query without its reply would block the REPL
            if query.id in self._session.open_queries:
                self._send(query, [Slot(error=failed)] * len(query.prompts))
            self._answering.pop(query.id, None)  # before the REPL can use the id again

    def _send(self, query: Query, slots: list[Slot]) -> None:
        if query.id not in self._session.open_queries:
            return  # answered already, or the connection was lost meanwhile
        try:
            frame = self._frame(query, slots)
        except FrameTooLarge as error:
            self._lose(ProtocolViolation(f"not even the errors of {len(slots):,} prompts fit into a reply: {error}"))
            return
        self._write(frame)
        self._regulate()

    def _frame(self, query: Query, slots: list[Slot]) -> bytes:
        try:
            return self._session.reply(Reply(id=query.id, slots=slots))
        except FrameTooLarge as error:
            errors = [Slot(error=f"the reply is too large: {error}")] * len(slots)
            return self._session.reply(Reply(id=query.id, slots=errors))

    def _regulate(self) -> None:
        """Read on, or leave what comes in the kernel's buffers."""
        if self._transport is None:
            return
        session = self._session
        has_room = (
            len(session.open_queries) < self._max_queries_in_flight and session.open_bytes < session.max_frame_bytes
        )
        if self._is_reading != (self._writable and has_room):
            self._is_reading = not self._is_reading
            if self._is_reading:
                self._transport.resume_reading()
            else:
                self._transport.pause_reading()

    def _write(self, frame: bytes) -> None:
        if self._transport is not None and not self._transport.is_closing():
            self._transport.write(frame)

    def _lose(self, reason: RlmBrokerError) -> None:
        self._session.close()
        self._lost = self._lost or reason
        self._ready.set()
        if self._result is not None and not self._result.done():  # one that was complete before the end counts
            self._result.set_exception(self._lost)
            self._result.exception()  # whoever waits gets it; if nobody does any more, that is no news
        self._cancel_answers()
        if self._transport is not None:
            self._transport.abort()
            self._transport = None


def _ignore(_output: Output) -> None:
    """Output that nobody waits for."""
