"""Frames: a 4-byte big-endian unsigned length, then that many bytes. No I/O."""

import struct

from sandbox_worker.wire.errors import FrameTooLarge, FrameTruncated

PREFIX = struct.Struct(">I")


def encode_frame(payload: bytes, max_frame_bytes: int) -> bytes:
    """Put the length in front.

    Raises:
        FrameTooLarge: `payload` is more than the other side accepts. Nothing was sent.
    """
    if len(payload) > max_frame_bytes:
        raise FrameTooLarge(len(payload), max_frame_bytes)
    return PREFIX.pack(len(payload)) + payload


class FrameDecoder:
    """Splits a byte stream into frames: feed it what arrived, get what is complete.

    Args:
        max_frame_bytes: Largest payload accepted. A larger prefix raises before any of that payload is buffered.
    """

    def __init__(self, max_frame_bytes: int) -> None:
        self._max_frame_bytes = max_frame_bytes
        self._buffer = bytearray()

    @property
    def pending(self) -> bytes:
        """What arrived and is no whole frame yet: what another decoder of the same stream has to start with."""
        return bytes(self._buffer)

    def feed(self, data: bytes | memoryview) -> list[bytes]:
        """Add `data`; return the payloads it completes, in order.

        A list and not an iterator: an iterator abandoned half-way would leave the buffer in between.

        Raises:
            FrameTooLarge: A prefix announces more than `max_frame_bytes`.
        """
        has_begun = bool(self._buffer)
        if has_begun:
            self._buffer += data
        with memoryview(self._buffer if has_begun else data) as stream:
            payloads, end = self._split(stream)
            if not has_begun and end < len(stream):
                self._buffer += stream[end:]
        if has_begun:
            del self._buffer[:end]  # once for all frames of one read: deleting each would move the rest each time
        return payloads

    def _split(self, stream: memoryview) -> tuple[list[bytes], int]:
        """The payloads that are whole, and where the rest begins."""
        payloads: list[bytes] = []
        start, length = 0, len(stream)
        while start + PREFIX.size <= length:
            (payload_bytes,) = PREFIX.unpack_from(stream, start)
            if payload_bytes > self._max_frame_bytes:
                raise FrameTooLarge(payload_bytes, self._max_frame_bytes)
            end = start + PREFIX.size + payload_bytes
            if end > length:
                break
            payloads.append(bytes(stream[start + PREFIX.size : end]))
            start = end
        return payloads, start

    def finish(self) -> None:
        """Say that the stream has ended.

        Raises:
            FrameTruncated: It ended inside a frame.
        """
        if self._buffer:
            raise FrameTruncated(f"the stream ended with {len(self._buffer):,} bytes of an incomplete frame")
