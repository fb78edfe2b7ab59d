"""The REPL's end of the connection: a blocking socket, on which any thread of model code may send and wait.

There is no reader thread. One of the waiting threads reads for all of them. When it has its reply, another waiting
thread takes over. So the usual case, a single thread, needs no switch between threads.
"""

import contextlib
import itertools
import os
import re
import select
import socket
import threading
import time
from _thread import _count as other_threads
from collections.abc import Callable

import msgspec

from sandbox_worker.repl.interrupts import Interrupts
from sandbox_worker.repl.memory_reserve import Reserve
from sandbox_worker.wire.frames import FrameDecoder, Payload
from sandbox_worker.wire.messages import (
    FEW_BYTES,
    MOST_BYTES,
    Attach,
    Environment,
    Execute,
    FromOrchestrator,
    FromWorker,
    Message,
    Output,
    Provide,
    Query,
    Read,
    Reply,
    Slot,
    Submit,
    decode_from_orchestrator,
    framed,
)
from sandbox_worker.wire.text_json import decodable

READ_BYTES = 1 << 16
"""Maximum bytes of one read from the socket. For a buffer of 128 KiB and more the C library maps memory each time."""
YOUNG_S = 0.001
"""Seconds from a block's start, within which its output waits in the kernel for the next frame (MSG_MORE in send(2)):
that of a short block arrives with its result. The kernel sends it after 0.2 s at the latest, also if the REPL is killed
or stuck in C code."""
AT_ONCE, WITH_NEXT = int(socket.MSG_DONTWAIT), int(socket.MSG_DONTWAIT | socket.MSG_MORE)
"""Flags of a frame. Both let `_send` read while the socket is full."""
OTHER_READS_MS = 20
"""Milliseconds until a thread that waits to send looks whether the thread that read meanwhile still does."""
Given = Environment | Provide | Attach
"""Messages that the orchestrator sends before the `Execute` of a block."""
_REPLY = re.compile(rb'\{"type":"reply","id":"([^"\\]++)"')
"""Beginning of a `Reply`, as msgspec writes it, with its id."""
ONLY_HERE = "another process cannot use the REPL's connection: call llm_query_batched, or use threads"
"""Error message for a query from a process that model code started."""

LOST = "cancelled: the REPL was killed, and its variables are as they were before a block"
"""Error of a child in the background of a REPL that goes on from a checkpoint."""
FORKED = "cancelled: it is a child of the REPL from which this one was forked"
"""Error of such a child in a fork."""


class ConnectionClosed(BaseException):
    """The orchestrator has closed the connection, so the REPL ends. No `except Exception` catches this."""


class CannotAsk(RuntimeError):
    """A query came from another process, or from a thread that outlived its block: a reply could not reach it."""


class Channel:
    """Connection to the orchestrator: sends messages, and passes each reply to the thread waiting for it.

    Attributes:
        read_variables: Function that returns the frame of the answer to a `Read`.
        owner: Pid of the REPL, which alone may use it. Processes that model code forks have others.

    Args:
        connected: Socket that has received `Welcome`.
        max_frame_bytes: Largest payload of a frame, in both directions.
        interrupts: State of SIGINT, which must not interrupt a frame.
        reserve: Address space opened to read, so that a read cannot fail for lack of memory; and to encode a
            message, where there is no other memory.
    """

    def __init__(
        self, connected: socket.socket, max_frame_bytes: int, interrupts: Interrupts, reserve: Reserve
    ) -> None:
        self.read_variables: Callable[[Read], bytes] | None = None
        self._socket = connected
        self._max_frame_bytes = max_frame_bytes
        self._interrupts = interrupts
        self._reserve = reserve
        self._poll = select.poll()
        self._poll.register(connected.fileno(), select.POLLIN)
        self._sending = threading.RLock()
        self._began_at = 0.0
        self._numbers = itertools.count(1)
        self._lock = threading.RLock()
        self._changed = threading.Condition(self._lock)
        self._wanted: set[str] = set()
        self._replies: dict[str, Reply] = {}
        self.begin_anew()

    def begin_anew(self, error: str = LOST) -> None:
        """Begin with a connection of which no byte was read or sent. Called by the only thread of its process, between
        two blocks. Queries in the background that had no reply have this error as theirs."""
        self.owner = os.getpid()
        self._frames = FrameDecoder(self._max_frame_bytes)
        self._outbox: list[tuple[bytes, int]] = []
        self._holds_back = False
        self._block: int | None = None
        self._someone_reads = False
        self._waiters = 0
        came, self._replies = self._replies, {}
        for query_id in self._wanted:
            self._replies[query_id] = came.get(query_id) or Reply("", [Slot(error=error)])
        self._reads: list[Read] = []
        self._next: Execute | None = None
        self._provided: list[Given] = []

    def encode(self, message: FromWorker) -> bytes:
        """Return the message as a frame.

        Raises:
            FrameTooLarge: The frame is larger than the orchestrator accepts.
        """
        return self._reserve.helped(lambda: bytes(framed(message, self.most_bytes(type(message)))))

    def most_bytes(self, kind: type[Message]) -> int:
        """Return the maximum bytes of a message of this kind to the orchestrator."""
        return min(self._max_frame_bytes, MOST_BYTES.get(kind, FEW_BYTES))

    def send(self, frame: bytes) -> None:
        """Send a whole frame. An interrupt meanwhile is raised at the end."""
        with self._interrupts.held(), self._sending:
            self._send(frame)

    def send_output(self, frame: bytes) -> None:
        """Send a frame that may wait for the next one while the block is young."""
        with self._interrupts.held(), self._sending:
            self._holds_back = time.monotonic() - self._began_at < YOUNG_S
            self._send(frame, WITH_NEXT if self._holds_back else AT_ONCE)

    def push(self, empty: Output) -> None:
        """Have the kernel send output that waits for the next frame, by such a frame."""
        if self._holds_back:
            self._holds_back = False
            self.send(self.encode(empty))

    def send_in(self, block: int, frame: bytes) -> None:
        """Send a frame if that block still runs. A thread that comes too late sends no frame."""
        with self._interrupts.held(), self._sending:
            if block == self._block:
                self._send(frame)

    def send_result(self, frame: bytes) -> None:
        """Send the last frame of a block. From here on, `ask` refuses queries until the next block."""
        with self._sending:
            self._block = None
            self._send(frame)

    def ask(self, query: Query | Submit) -> Reply:
        """Give `query` its id, send it, and wait for its reply. An interrupt ends the wait; a late reply is dropped.

        Variables that the orchestrator asks for meanwhile are sent.

        Raises:
            CannotAsk: No block is running, or this is not the REPL's own process.
            FrameTooLarge: The query is larger than the orchestrator accepts. It was not sent.
            MemoryError: There is not enough memory, for the query or for its reply.
        """
        with self._interrupts.held():
            query_id = self.start(query)
            try:
                while query_id not in self._replies:
                    self._wait(lambda: query_id in self._replies or bool(self._reads))
                    self._answer_reads()
                reply = self._replies[query_id]
                if not reply.slots:
                    raise MemoryError
                return reply
            finally:
                self.forget(query_id)

    def start(self, query: Query | Submit) -> str:
        """Give `query` its id, send it, and return the id. `reply` has the reply once it has come.

        Raises:
            CannotAsk, FrameTooLarge, MemoryError: As for `ask`.
        """
        if os.getpid() != self.owner:
            raise CannotAsk(ONLY_HERE)
        with self._interrupts.held():
            block = self._block
            query_id = f"{block}:{next(self._numbers)}"
            # Encode before `_sending` is taken: encoding allocates, so finalizers of model code may run, and print.
            frame = self.encode(msgspec.structs.replace(query, id=query_id))
            with self._sending:
                # Compare again: the block may have ended just now, and the query must not count for the next one.
                if block is None or block != self._block:
                    raise CannotAsk("the block that started this thread has ended: ask while it runs")
                self._wanted.add(query_id)
                self._send(frame)
        return query_id

    def reply(self, query_id: str) -> Reply | None:
        """Return the reply to a started query; None before it has come. Without memory for it, it has no slots."""
        return self._replies.get(query_id)

    def forget(self, query_id: str) -> None:
        """Drop the reply to a started query, also if it has not come yet."""
        with self._lock:
            self._wanted.discard(query_id)
            self._replies.pop(query_id, None)

    def next_block(self) -> tuple[Execute, list[Given]]:
        """Wait for the next block, and return it with the messages before it. The reserve is open afterwards."""
        if other_threads():
            self._reserve.shut()
        self._wait(lambda: self._next is not None)
        self._reserve.open()
        provided, self._provided = self._provided, []
        block, self._next = self._next, None
        self._reads.clear()
        assert block is not None
        with self._sending:
            self._block, self._numbers = block.block, itertools.count(1)
            self._began_at = time.monotonic()
            self._holds_back = False
        return block, provided

    def _answer_reads(self) -> None:
        """Answer each `Read`, unless another thread has. An interrupt leaves one without an answer."""
        while True:
            try:
                read = self._reads.pop(0)
            except IndexError:
                return
            assert self.read_variables is not None
            with self._interrupts.let_through():
                frame = self.read_variables(read)
            self.send_in(read.block, frame)

    def _send(self, frame: bytes, flags: int = AT_ONCE) -> None:
        """Send a frame. The caller holds `_sending`, an RLock.

        A finalizer or signal handler of model code may run in the middle of `sendall`, in this thread, and print. Its
        frame is appended to the outbox, and the outer call sends it after its own.
        """
        self._outbox.append((frame, flags))
        if len(self._outbox) > 1:
            return
        try:
            while self._outbox:
                frame, flags = self._outbox[0]
                try:
                    sent = self._socket.send(frame, flags)
                except BlockingIOError:
                    sent = 0
                if sent < len(frame):
                    self._send_rest(memoryview(frame)[sent:], flags)
                del self._outbox[0]
        except OSError as error:
            raise ConnectionClosed from error
        finally:
            self._outbox.clear()

    def _send_rest(self, rest: memoryview, flags: int) -> None:
        """Send the rest of a frame as the kernel takes it."""
        with self._reserve:  # without memory it would stay half a frame
            while rest:
                self._wait_for_room()
                with contextlib.suppress(BlockingIOError):
                    rest = rest[self._socket.send(rest, flags) :]

    def _wait_for_room(self) -> None:
        """Wait until the kernel takes more bytes. Read meanwhile, unless another thread does.

        The orchestrator takes no message while many of its bytes are unread: the answers of children in the background,
        for which no thread waits.
        """
        with self._lock:
            reads = not self._someone_reads
            self._someone_reads = True
        try:
            poll = select.poll()
            poll.register(self._socket.fileno(), select.POLLOUT | (select.POLLIN if reads else 0))
            events = poll.poll(None if reads else OTHER_READS_MS)
            if reads and events and events[0][1] & ~select.POLLOUT:
                self._read()
        finally:
            if reads:
                with self._lock:
                    self._someone_reads = False
                    self._changed.notify_all()

    def _wait(self, is_there: Callable[[], bool]) -> None:
        while True:
            with self._lock:
                while self._someone_reads and not is_there():
                    self._waiters += 1
                    try:
                        with self._interrupts.let_through():
                            self._changed.wait()
                    finally:
                        self._waiters -= 1
                if is_there():
                    return
                self._someone_reads = True
            try:
                with self._interrupts.let_through():
                    self._poll.poll()
                self._read()
            finally:
                with self._lock:
                    self._someone_reads = False
                    if self._waiters:
                        self._changed.notify_all()

    def _read(self) -> None:
        # If memory were missing here, then bytes that are read would be lost, and all later frames with them.
        with self._reserve:
            try:
                data = self._socket.recv(READ_BYTES)
            except OSError as error:
                raise ConnectionClosed from error
            if not data:
                raise ConnectionClosed
            for payload in self._frames.feed(data):
                message = _decoded(payload)
                if isinstance(message, Execute):
                    self._next = message
                elif isinstance(message, Given):
                    self._provided.append(message)
                elif isinstance(message, Read):
                    self._reads.append(message)
                elif message.id in self._wanted:
                    self._replies[message.id] = message


def _decoded(payload: Payload) -> FromOrchestrator:
    """Return a message. A reply for which there is not enough memory has no slots."""
    try:
        return decode_from_orchestrator(decodable(payload))
    except MemoryError:
        if (reply := _REPLY.match(payload)) is None:
            raise
        return Reply(reply[1].decode(), [])
