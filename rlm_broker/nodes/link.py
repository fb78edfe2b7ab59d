"""One link between an orchestrator and an agent: messages and streams over one connection, with heartbeats.

Theory of operation. Frames of all streams share the connection. No stream holds up another: a stream sends no more than
its receiver has room for (`streams.py`), and all streams pause while the connection takes no bytes, so that at most
`HIGH_BYTES` are ahead of a message. Messages themselves never wait: each is small, and each answers something.

A link is lost when its connection ends, when the other side says nothing for `SILENCE_S`, or when it breaks a bound.
Then `lost` is called once, and what belongs to the link ends with it. An orchestrator whose event loop stands still,
for example during an import, sends no heartbeats. Its kernel still acknowledges what an agent sends, which the kernel
of a dead machine or behind a cut does not. So an agent is patient while there are acknowledgements.
"""

import asyncio
import contextlib
import socket
import struct
from collections import deque
from collections.abc import Callable
from typing import Any, cast

import msgspec

from rlm_broker.errors import ProtocolViolation
from rlm_broker.nodes.messages import MAX_FRAME_BYTES, Beat, Credit, encoded
from sandbox_worker.wire.errors import WireError
from sandbox_worker.wire.frames import PREFIX, FrameDecoder, Payload

HEAD = struct.Struct(">II")
"""Head of a frame: the length of the rest, and the number of the stream."""
BEAT_S, SILENCE_S, PATIENCE_S = 0.5, 2.0, 30.0
"""Seconds between two heartbeats; without a byte until the other side is lost; and the same for an agent, while
the orchestrator's kernel acknowledges what it sends."""
HIGH_BYTES = 1 << 18
"""Unsent bytes; beyond it, all streams pause."""
FRAMES_IN_A_ROW = 64
"""Frames taken at once; the rest waits for the next turn of the event loop."""
LAST_ACK = struct.Struct("56xI")
"""Place of `tcpi_last_ack_recv` in Linux's `struct tcp_info`: milliseconds since the last acknowledgement."""


class StreamEnd:
    """Our end of a stream: a base. An end that sends nothing needs neither `credit` nor `resume`."""

    def take(self, data: Payload) -> None:
        """Take bytes. Raises `ProtocolViolation` for more bytes than permitted."""
        raise NotImplementedError

    def take_end(self) -> None:
        """Learn that no more bytes come."""
        raise NotImplementedError

    def credit(self, size_bytes: int) -> None:
        """Learn that so many more bytes may be sent."""

    def resume(self) -> None:
        """Learn that the link takes bytes again."""

    def close(self) -> None:
        """Close the descriptor of this end, since the link is lost. Has no effect when repeated."""
        raise NotImplementedError


class Link(asyncio.Protocol):
    """A link, over a connection made for it.

    Args:
        decoder: Decodes messages of the other side.
        take: Takes each message. Its `ProtocolViolation` ends the link.
        on_lost: Called once, with the reason as one clause.
        beat: Returns the next heartbeat.
        is_patient: Whether to wait for a side that is only busy.

    Attributes:
        streams: Number → our end of the stream.
        why_lost: Reason why the link is lost; None while it is not.
    """

    def __init__(
        self,
        decoder: "msgspec.msgpack.Decoder[Any]",
        take: Callable[[Any], None],
        on_lost: Callable[[str], None],
        beat: Callable[[], Beat] = Beat,
        *,
        is_patient: bool = False,
    ) -> None:
        self.streams: dict[int, StreamEnd] = {}
        self.why_lost: str | None = None
        self._decoder = decoder
        self._take = take
        self._on_lost = on_lost
        self._beat = beat
        self._is_patient = is_patient
        self._loop = asyncio.get_running_loop()
        self._transport: asyncio.Transport | None = None
        self._frames = FrameDecoder(MAX_FRAME_BYTES)
        self._payloads: deque[Payload] = deque()
        self._writable = asyncio.Event()
        self._writable.set()
        self._heard = self._loop.time()
        self._timer: asyncio.TimerHandle | None = None

    # -- sending -----------------------------------------------------------------------------------------------------

    def post(self, message: msgspec.Struct) -> None:
        """Send a message, or drop it if the link is lost."""
        self.send(0, encoded(message))

    def send(self, stream: int, data: bytes | memoryview) -> None:
        """Send bytes of a stream, or drop them if the link is lost. No bytes at all end the stream."""
        if self._transport is not None and self.why_lost is None:
            self._transport.write(HEAD.pack(len(data) + PREFIX.size, stream) + data)

    @property
    def is_writable(self) -> bool:
        """Whether streams may send."""
        return self._writable.is_set()

    async def writable(self) -> None:
        """Wait until streams may send, or the link is lost."""
        await self._writable.wait()

    # -- called by asyncio -------------------------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.Transport", transport)  # not isinstance: uvloop's is not an asyncio.Transport
        if self.why_lost is not None:
            self._transport.abort()
            return
        self._transport.set_write_buffer_limits(high=HIGH_BYTES)
        self._heard = self._loop.time()
        self._tick(self._heard)

    def data_received(self, data: bytes) -> None:
        self._heard = self._loop.time()
        try:
            self._payloads.extend(self._frames.feed(data))
        except WireError as error:
            self.close(f"it broke the protocol of the link: {error}")
            return
        self._take_some()

    def pause_writing(self) -> None:
        self._writable.clear()

    def resume_writing(self) -> None:
        self._writable.set()
        for stream in list(self.streams.values()):
            stream.resume()

    def connection_lost(self, exc: Exception | None) -> None:
        self.close(f"its connection was lost{f': {exc}' if exc else ''}")

    # -- internal ----------------------------------------------------------------------------------------------------

    def _take_some(self) -> None:
        """Take some frames. While others wait, no more are read."""
        try:
            for _ in range(FRAMES_IN_A_ROW):
                if not self._payloads or self.why_lost is not None:
                    break
                self._take_frame(self._payloads.popleft())
        except (ProtocolViolation, msgspec.MsgspecError, RecursionError, UnicodeError) as error:
            self.close(f"it broke the protocol of the link: {error}")
            return
        if self._transport is None or self.why_lost is not None:
            return
        if self._payloads:
            self._transport.pause_reading()
            self._loop.call_soon(self._take_some)
        elif not self._transport.is_reading():
            self._transport.resume_reading()

    def _take_frame(self, payload: Payload) -> None:
        if len(payload) < PREFIX.size:
            raise ProtocolViolation("a frame without a stream")
        (number,) = PREFIX.unpack_from(payload)
        if number == 0:
            message = self._decoder.decode(memoryview(payload)[PREFIX.size :])
            if isinstance(message, Credit):
                if (stream := self.streams.get(message.stream)) is not None:
                    stream.credit(message.size_bytes)
            else:
                self._take(message)
            return
        if (stream := self.streams.get(number)) is not None:  # else it was closed here, and what comes is late
            if len(payload) > PREFIX.size:
                stream.take(payload[PREFIX.size :])
            else:
                stream.take_end()

    def _tick(self, due: float) -> None:
        """Send a heartbeat, and look for the other side's."""
        now = self._loop.time()
        self._heard = min(now, self._heard + now - due)  # this process stood still since then: no silence of theirs
        silent_s = now - self._heard
        if silent_s > SILENCE_S:
            limit = PATIENCE_S if self._is_patient and self._is_acknowledged() else SILENCE_S
            if silent_s > limit:
                self.close(f"it was silent for {limit:g} s")
                return
        self.post(self._beat())
        pause_s = min(BEAT_S, SILENCE_S / 4)
        self._timer = self._loop.call_later(pause_s, self._tick, now + pause_s)

    def _is_acknowledged(self) -> bool:
        """Whether the kernel of the other side has acknowledged something lately."""
        assert self._transport is not None
        connected = self._transport.get_extra_info("socket")
        info = connected.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, LAST_ACK.size)
        return len(info) == LAST_ACK.size and LAST_ACK.unpack(info)[0] <= SILENCE_S * 1_000

    def close(self, why: str) -> None:
        """End the link, with all of its streams. Has no effect when repeated."""
        if self.why_lost is not None:
            return
        self.why_lost = why
        if self._timer is not None:
            self._timer.cancel()
        self._payloads.clear()
        self._writable.set()
        if self._transport is not None:
            self._transport.abort()
        self._on_lost(why)
        for stream in list(self.streams.values()):
            with contextlib.suppress(OSError):
                stream.close()
        self.streams.clear()
