"""Frames: a 4-byte big-endian unsigned length, then that many bytes. No I/O."""

import struct

from sandbox_worker.wire.errors import FrameTooLarge, FrameTruncated

Payload = bytes | bytearray

PREFIX = struct.Struct(">I")
LARGE_BYTES = 1 << 16
"""Bytes of a frame beyond which its payload is not copied out of the buffer that collected it."""


def encode_frame(payload: Payload, max_frame_bytes: int) -> bytes:
    """Put the length in front.

    Raises:
        FrameTooLarge: `payload` is more than the other side accepts. Nothing was sent.
    """
    if len(payload) > max_frame_bytes:
        raise FrameTooLarge(len(payload), max_frame_bytes)
    return PREFIX.pack(len(payload)) + payload


class FrameDecoder:
    """Splits a byte stream into frames: feed it what arrived, get what is complete.

    A payload of more than `LARGE_BYTES` that arrives in pieces is handed over in the buffer that it was collected in,
    without a second copy.

    Args:
        max_frame_bytes: Largest payload accepted. A larger prefix raises before any of that payload is buffered.

    Attributes:
        error: Why nothing more can be split, once a prefix announced too much.
    """

    def __init__(self, max_frame_bytes: int) -> None:
        self._max_frame_bytes = max_frame_bytes
        self._buffer = bytearray()
        self._needed = 0
        self.error: FrameTooLarge | None = None

    @property
    def pending(self) -> bytes:
        """Bytes of the incomplete frame: what another decoder of the same stream has to start with."""
        return bytes(self._buffer)

    @property
    def announced_bytes(self) -> int:
        """Size of the frame that is incomplete, its prefix included; 0 between two frames."""
        return self._needed if self._buffer else 0

    @property
    def buffered_bytes(self) -> int:
        """Bytes that have arrived of the incomplete frame."""
        return len(self._buffer)

    def feed(self, data: bytes | memoryview) -> list[Payload]:
        """Add `data`; return the payloads it completes, in order.

        Raises:
            FrameTooLarge: A prefix announces more than `max_frame_bytes`. The complete frames before it are returned
                first; then the next call raises.
        """
        if not self._buffer:
            # Nearly always one read is one frame: to be told so early saves 0.8 us of 1.5.
            length = len(data)
            if PREFIX.size <= length <= self._max_frame_bytes and self.error is None:
                (payload_bytes,) = PREFIX.unpack_from(data)
                if payload_bytes + PREFIX.size == length:
                    return [bytes(data[PREFIX.size :])]
            payloads = self._split(data)
        else:
            self._buffer += data
            if len(self._buffer) < self._needed:
                return []
            payloads = self._completed()
        if self.error is not None and not payloads:
            raise self.error
        return payloads

    def _completed(self) -> list[Payload]:
        """The payloads in the buffer, whose first frame is whole."""
        whole, self._buffer = self._buffer, bytearray()
        if self._needed <= LARGE_BYTES:
            return self._split(whole)
        rest = bytes(whole[self._needed :])
        del whole[self._needed :]
        del whole[: PREFIX.size]  # moves no byte: a bytearray remembers where it begins
        return [whole, *self._split(rest)]

    def _split(self, data: bytes | bytearray | memoryview) -> list[Payload]:
        """The payloads that are whole; the rest goes into the buffer."""
        payloads: list[Payload] = []
        with memoryview(data) as stream:
            start, length = 0, len(stream)
            self._needed = PREFIX.size
            while start + PREFIX.size <= length and self.error is None:
                (payload_bytes,) = PREFIX.unpack_from(stream, start)
                end = start + PREFIX.size + payload_bytes
                if payload_bytes > self._max_frame_bytes:
                    self.error = FrameTooLarge(payload_bytes, self._max_frame_bytes)
                elif end > length:
                    self._needed = PREFIX.size + payload_bytes
                    break
                else:
                    payloads.append(bytes(stream[start + PREFIX.size : end]))
                    start = end
            if start < length and self.error is None:
                self._buffer = bytearray(stream[start:])
        return payloads

    def finish(self) -> None:
        """Say that the stream has ended.

        Raises:
            FrameTruncated: It ended inside a frame.
        """
        if self._buffer:
            raise FrameTruncated(f"the stream ended with {len(self._buffer):,} bytes of an incomplete frame")
