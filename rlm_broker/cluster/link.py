"""A link: one authenticated connection between the broker of a cluster and the agent of a node, the same on both sides.

Flow control: a sender waits while the other side does not read, and a link whose messages are not taken stops reading.
Either way the link is lost after the time that silence may last, so no side waits for ever. So the code that takes
messages begins a task for all that lasts.
"""

import asyncio
import contextlib
import socket
import threading
from collections import deque
from collections.abc import AsyncIterator, Callable
from typing import Generic, TypeVar, cast

import msgspec

from rlm_broker.cluster.messages import (
    BEAT_S,
    FRAME_BYTES,
    PIECE_BYTES,
    SILENCE_S,
    Beat,
    FromAgent,
    FromBroker,
    Message,
    Piece,
    Quit,
)
from rlm_broker.cluster.silence import Silence
from rlm_broker.errors import RlmBrokerError
from rlm_broker.values.text import printable
from sandbox_worker.wire.counting import has_more_values_than
from sandbox_worker.wire.errors import FrameTooLarge, WireError
from sandbox_worker.wire.frames import FrameDecoder, Payload, encode_frame
from sandbox_worker.wire.text_json import encode_written_out

READ_BYTES = 1 << 18
"""Bytes read at once. Between two reads, all other links have their turn."""
UNSENT_BYTES = 64 << 10
"""Bytes of the write buffer beyond which senders wait, so that a small message waits behind little."""
MOST_POSTED_BYTES = 8 << 20
"""Bytes that may be posted while the other side does not read. Beyond, the link is lost."""
MOST_QUEUED = 4_096
"""Messages that arrived and were not taken. Beyond, the link does not read."""
MOST_QUEUED_BYTES = 16 << 20
"""Bytes of such messages, likewise. One message may have more while no other is queued."""
MESSAGES_IN_A_ROW = 32
"""Messages taken in one turn of the event loop."""
COUNTED_BYTES = 1 << 16
"""Bytes of a message from which on its values are counted before it is decoded."""
MAX_VALUES = 1 << 19
"""Maximum JSON values of a message: decoding as many takes some 0.1 s. With 40 MB of empty lists it would be 10 s."""
FLUSH_S = 1.0
"""Seconds that an orderly close waits until the last messages are sent."""
TCP_NOTSENT_LOWAT = 25
"""Socket option of Linux, which Python 3.11 has no name for: bytes that the kernel takes beyond those under way."""

BREACH = "the other side broke the protocol"

Incoming = TypeVar("Incoming")

from_agent: "msgspec.json.Decoder[FromAgent]" = msgspec.json.Decoder(FromAgent)
from_broker: "msgspec.json.Decoder[FromBroker]" = msgspec.json.Decoder(FromBroker)


class LinkLost(RlmBrokerError):
    """The connection with the other side of a cluster has ended; the message says why."""

    kind = "cluster"


class TooManyValues(FrameTooLarge):
    """A message that has more values than the other side decodes, such as a prompt of very many parts."""

    def __str__(self) -> str:
        return f"it has more than {MAX_VALUES:,} values"


class _Incoming(threading.local):
    """The buffer that a thread's loop reads into. All of its links share one: each takes the data at once."""

    def __init__(self) -> None:
        self.buffer = memoryview(bytearray(READ_BYTES))


_incoming = _Incoming()


def encode(message: Message) -> bytes:
    """Return the frame of a message. Lone surrogates in it are written out, see `text_json`.

    Raises:
        FrameTooLarge: The message has more than `FRAME_BYTES` or `MAX_VALUES`, and no side would take it.
    """
    payload = encode_written_out(message, _raw)
    if len(payload) > COUNTED_BYTES and has_more_values_than(MAX_VALUES, payload):
        raise TooManyValues(len(payload), FRAME_BYTES)
    return encode_frame(payload, FRAME_BYTES)


class Link(asyncio.BufferedProtocol, Generic[Incoming]):
    """One side of a link. It is made before the transport is, and begins with `begin`.

    Args:
        name: Name of the node in the cluster.
        decoder: Decoder of the messages that come: `from_agent` or `from_broker`.
        beat: Called for each heartbeat to send. It may be replaced at any time.
        silence_s, patience_s: As for `Silence`; without `patience_s`, it is `silence_s`.

    Attributes:
        why_lost: Why the link has ended; None while it has not.
        farewell: Sentence of the other side that has left by itself (`Quit`), once it was taken.
    """

    def __init__(
        self,
        name: str,
        decoder: "msgspec.json.Decoder[Incoming]",
        beat: Callable[[], Message] = Beat,
        *,
        silence_s: float = SILENCE_S,
        patience_s: float | None = None,
    ) -> None:
        self.name = name
        self.beat = beat
        self.why_lost: str | None = None
        self.farewell: str | None = None
        self._decoder = decoder
        self._bounds_s = (silence_s, patience_s or silence_s)
        self._loop = asyncio.get_running_loop()
        self._silence = Silence(self._loop.time(), *self._bounds_s)
        self._transport: asyncio.Transport | None = None
        self._lost = asyncio.Event()
        # Incoming: frames are decoded when they are taken, so that what is queued weighs its bytes.
        self._frames = FrameDecoder(FRAME_BYTES)
        self._queue: deque[Payload] = deque()
        self._queued_bytes = 0
        self._came = asyncio.Event()
        self._announcing: Incoming | None = None
        self._is_reading = True
        # Outgoing.
        self._room = asyncio.Event()
        self._turn = asyncio.Lock()
        self._turn_of_pieces = asyncio.Lock()
        self._written = self._posted = 0
        self._tick: asyncio.TimerHandle | None = None
        self._due = 0.0

    def begin(self, transport: asyncio.Transport, early: bytes = b"") -> None:
        """Take over a connection whose other side has been admitted.

        Args:
            transport: The connection.
            early: Bytes that arrived behind the first frame.
        """
        transport.set_protocol(self)
        self.connection_made(transport)
        if early:
            self._take_in(early)

    @property
    def is_lost(self) -> bool:
        """Whether the link has ended."""
        return self.why_lost is not None

    async def lost(self) -> str:
        """Wait until the link has ended, and return why."""
        await self._lost.wait()
        return self.why_lost or ""

    # -- sending -----------------------------------------------------------------------------------------------------

    async def send(self, message: Message, raw: bytes | memoryview | None = None) -> None:
        """Write a message, and the bytes that it announces. Wait for the turn and for room in the write buffer first.

        One piece with raw bytes waits at a time, so a message without them waits behind at most two.

        Args:
            message: Message for the other side.
            raw: Bytes that follow as a frame of their own, at most `PIECE_BYTES`.

        Raises:
            LinkLost: The link has ended.
            FrameTooLarge: The message is larger than a frame may be. The link goes on.
        """
        if raw is None:
            frame = encode(message)
            if self._room.is_set() and not self._turn.locked():
                self._write(frame)
                return
            await self._write_in_turn(frame)
            return
        async with self._turn_of_pieces:
            await self._write_in_turn(encode(message) + encode_frame(bytes(raw), PIECE_BYTES))

    def post(self, message: Message) -> None:
        """Write a small message at once. If too much was posted that the other side does not read, the link is lost.

        After the end of the link there is no effect.

        Raises:
            FrameTooLarge: The message is larger than a frame may be. The link goes on.
        """
        if self.why_lost is None:
            frame = encode(message)
            if not self._room.is_set():
                self._posted += len(frame)
                if self._posted > MOST_POSTED_BYTES:
                    self.close(f"the other side left more than {MOST_POSTED_BYTES:,} bytes of messages unread")
                    return
            self._write(frame)

    # -- receiving ---------------------------------------------------------------------------------------------------

    async def receive(self) -> AsyncIterator[tuple[Incoming, Payload | None]]:
        """Yield each message with the bytes that it announced, heartbeats of the broker left out.

        What arrived before the end of the link is still yielded. The iteration ends with the link; `why_lost` says why.
        """
        in_a_row = 0
        while True:
            while self._queue:
                announced = self._next()
                if announced is not None:
                    yield announced
                in_a_row += 1
                if in_a_row >= MESSAGES_IN_A_ROW:
                    in_a_row = 0
                    await asyncio.sleep(0)
            if self.is_lost:
                return
            in_a_row = 0
            self._came.clear()
            await self._came.wait()

    def _next(self) -> tuple[Incoming, Payload | None] | None:
        """Return the first message of the queue; None if it is none for the caller, or not valid, or not complete."""
        payload = self._queue.popleft()
        self._queued_bytes -= len(payload)
        self._regulate()
        if self._announcing is not None:
            message, self._announcing = self._announcing, None
            if len(payload) > PIECE_BYTES:
                self._violated(f"a piece has {len(payload):,} bytes, more than {PIECE_BYTES:,}")
                return None
            return message, payload
        try:
            message = self._decoded(payload)
        except (ValueError, RecursionError) as error:  # errors of msgspec and of UTF-8 are ValueErrors
            self._violated(str(error) or type(error).__name__)
            return None
        if isinstance(message, Quit):
            self.farewell = message.why
        if isinstance(message, Piece):
            self._announcing = message
        elif not isinstance(message, Beat):
            return message, None
        return None

    def _decoded(self, payload: Payload) -> Incoming:
        if len(payload) > COUNTED_BYTES and has_more_values_than(MAX_VALUES, payload):
            raise ValueError(f"a message has more than {MAX_VALUES:,} values")
        return self._decoder.decode(payload)

    def _violated(self, why: str) -> None:
        """End the link because of what the other side sent, and drop all that came behind it."""
        self.close(f"{BREACH}: {why[:200]}")

    # -- ending ------------------------------------------------------------------------------------------------------

    def close(self, why: str = "this side has closed the connection") -> None:
        """End the link at once, and drop what is neither sent nor taken. There is no effect when repeated."""
        self._queue.clear()
        self._lose(why)

    async def aclose(self) -> None:
        """End the link when the last messages are sent, or after `FLUSH_S`."""
        if self.why_lost is None and self._transport is not None:
            self._transport.close()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(FLUSH_S):
                    await self._lost.wait()
        self.close()

    # -- called by asyncio -------------------------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        # A cast and no isinstance: uvloop's transports are not subclasses of asyncio.Transport.
        self._transport = transport = cast("asyncio.Transport", transport)
        if self.is_lost:
            transport.abort()
            return
        transport.set_write_buffer_limits(high=UNSENT_BYTES)
        connected = transport.get_extra_info("socket")
        connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        connected.setsockopt(socket.IPPROTO_TCP, TCP_NOTSENT_LOWAT, UNSENT_BYTES)
        self._room.set()
        self._silence = Silence(self._loop.time(), *self._bounds_s)
        self._due = self._loop.time() + BEAT_S
        self._tick = self._loop.call_at(self._due, self._watch)

    def get_buffer(self, sizehint: int) -> memoryview:  # noqa: ARG002 - asyncio's signature
        return _incoming.buffer

    def buffer_updated(self, nbytes: int) -> None:
        self._take_in(_incoming.buffer[:nbytes])

    def eof_received(self) -> None:
        self._lose("the other side has closed the connection")

    def connection_lost(self, exc: Exception | None) -> None:
        self._lose(f"the connection broke: {exc}" if exc else "the other side has closed the connection")

    def pause_writing(self) -> None:
        if not self.is_lost:
            self._room.clear()

    def resume_writing(self) -> None:
        self._posted = 0
        self._room.set()

    # -- internal ----------------------------------------------------------------------------------------------------

    def _take_in(self, data: bytes | memoryview) -> None:
        """Queue the frames that are complete."""
        self._silence.heard = self._loop.time()
        try:
            payloads = self._frames.feed(data)
        except WireError as error:
            self._violated(str(error))
            return
        if payloads:
            self._queue.extend(payloads)
            self._queued_bytes += sum(map(len, payloads))
            self._came.set()
            self._regulate()
        if self._frames.error is not None:  # the frames before it count
            self._lose(f"{BREACH}: {self._frames.error}")

    def _regulate(self) -> None:
        """Read on or stop reading, by what is queued."""
        reads = len(self._queue) <= MOST_QUEUED and self._queued_bytes <= MOST_QUEUED_BYTES
        if reads != self._is_reading and self._transport is not None and not self.is_lost:
            self._is_reading = reads
            if reads:
                self._transport.resume_reading()
            else:
                self._transport.pause_reading()

    async def _write_in_turn(self, frame: bytes) -> None:
        async with self._turn:
            while not self._room.is_set():
                await self._room.wait()
            self._write(frame)

    def _write(self, frame: bytes) -> None:
        if self.why_lost is not None or self._transport is None:
            raise LinkLost(self.why_lost or "the connection has not begun")
        self._written += len(frame)
        self._transport.write(frame)

    def _watch(self) -> None:
        """Send a heartbeat, and end the link if the other side is silent or takes nothing."""
        assert self._transport is not None
        now, due = self._loop.time(), self._due
        self._due = now + BEAT_S
        self._tick = self._loop.call_at(self._due, self._watch)
        has_room = self._room.is_set()
        why = self._silence.why_lost(
            now,
            due,
            self._written - self._transport.get_write_buffer_size(),
            has_room=has_room,
            is_reading=self._is_reading,
            connected=self._transport.get_extra_info("socket"),
        )
        if why is not None:
            self._lose(why)
        elif has_room:  # else there is enough to hear
            self._write(encode(self.beat()))

    def _lose(self, why: str) -> None:
        if self.why_lost is not None:
            return
        self.why_lost = printable(why[:1_000])  # it may quote the other side, and reaches logs
        if self._tick is not None:
            self._tick.cancel()
        if self._transport is not None:
            self._transport.abort()
        self._frames = FrameDecoder(0)
        for event in (self._lost, self._came, self._room):
            event.set()


def _raw(value: object) -> object:
    """Return JSON that a message has, decoded, for the form of text that msgspec refuses to encode."""
    if isinstance(value, msgspec.Raw):
        return msgspec.json.decode(value)
    raise TypeError(f"a message cannot hold a {type(value).__name__}")
