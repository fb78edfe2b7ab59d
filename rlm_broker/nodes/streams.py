"""Ends of streams: descriptors whose bytes cross a link, and memory filled from one.

A descriptor that travels beside a control message on one machine is a stream between two machines. Its two ends are
alike: bytes from the descriptor here are written to the descriptor there, in both directions.
"""

import asyncio
import contextlib
import os
from collections.abc import Callable
from fcntl import F_GETFL, fcntl

from rlm_broker.concurrency.forks import left_to_parent
from rlm_broker.errors import ProtocolViolation
from rlm_broker.nodes.link import Link, StreamEnd
from rlm_broker.nodes.messages import PIECE_BYTES, Credit
from sandbox_worker.wire.frames import Payload

WINDOW_BYTES = 1 << 18
"""Maximum bytes of a stream under way in one direction: sent, and not yet written to the descriptor there."""
READ_BYTES = 1 << 16
"""Bytes of one reading."""


class DescriptorEnd(StreamEnd):
    """A socket or a pipe at our end of a stream.

    The stream ends with its descriptor, and closes it when the other side ends it. Bytes for a full descriptor wait
    here, at most `WINDOW_BYTES` of them, and the other side reads no more meanwhile.

    Args:
        link: Link of the stream.
        number: Number of the stream.
        fd: Socket or end of a pipe; this object owns it.
        on_closed: Called once, when it is closed.
    """

    def __init__(self, link: Link, number: int, fd: int, on_closed: Callable[[], None] | None = None) -> None:
        self._link = link
        self._number = number
        self._fd = fd
        self._on_closed = on_closed
        self._reads = fcntl(fd, F_GETFL) & os.O_ACCMODE != os.O_WRONLY
        self._loop = asyncio.get_running_loop()
        self._may_send = WINDOW_BYTES
        self._may_come = WINDOW_BYTES
        self._written = 0
        self._unwritten = bytearray()
        self._is_reading = False
        self._is_ending = False
        os.set_blocking(fd, False)
        left_to_parent(self, DescriptorEnd._leave)
        link.streams[number] = self
        if link.why_lost is None:
            self.resume()
        else:
            self.close()

    def take(self, data: Payload) -> None:
        """Write bytes to the descriptor."""
        self._may_come -= len(data)
        if self._may_come < 0 or self._is_ending:
            raise ProtocolViolation("bytes of a stream that were not permitted")
        self._unwritten += data
        if len(self._unwritten) == len(data):
            self._write()

    def take_end(self) -> None:
        """Close the descriptor once all bytes are written to it."""
        self._is_ending = True
        if not self._unwritten:
            self.close()

    def credit(self, size_bytes: int) -> None:
        """Read more, up to as many bytes."""
        self._may_send = min(WINDOW_BYTES, self._may_send + size_bytes)
        self.resume()

    def resume(self) -> None:
        """Read from the descriptor, while the link and the other side take more."""
        wants = self._reads and self._fd >= 0 and self._may_send > 0 and self._link.is_writable
        if wants != self._is_reading:
            self._is_reading = wants
            if wants:
                self._loop.add_reader(self._fd, self._read)
            else:
                self._loop.remove_reader(self._fd)

    def close(self, *, tells: bool = False) -> None:
        """Close the descriptor, and forget the stream.

        Args:
            tells: Whether the other side has to close its end, too.
        """
        if self._fd < 0:
            return
        self._loop.remove_reader(self._fd)
        self._loop.remove_writer(self._fd)
        self._leave()
        self._link.streams.pop(self._number, None)
        if tells:
            self._link.send(self._number, b"")
        if self._on_closed is not None:
            self._on_closed()

    def _leave(self) -> None:
        """Close the descriptor, also in a forked process."""
        fd, self._fd = self._fd, -1
        if fd >= 0:
            os.close(fd)

    def _read(self) -> None:
        try:
            data = os.read(self._fd, min(READ_BYTES, self._may_send))
        except BlockingIOError:
            return
        except OSError:  # the other side has reset a connection
            data = b""
        if not data:
            self.close(tells=True)
            return
        self._may_send -= len(data)
        self._link.send(self._number, data)
        if not self._may_send or not self._link.is_writable:
            self.resume()

    def _write(self) -> None:
        try:
            count = os.write(self._fd, self._unwritten)
        except BlockingIOError:
            count = 0
        except OSError:  # nothing reads there any more
            self.close(tells=True)
            return
        del self._unwritten[:count]
        self._written += count
        if self._written >= WINDOW_BYTES // 2:
            self._may_come += self._written
            self._link.post(Credit(self._number, self._written))
            self._written = 0
        if self._unwritten:
            self._loop.add_writer(self._fd, self._write)
        else:
            self._loop.remove_writer(self._fd)
            if self._is_ending:
                self.close()


class FileEnd(StreamEnd):
    """A file or memory filled from a stream.

    Args:
        link: Link of the stream.
        number: Number of the stream.
        fd: Descriptor; this object owns it.
        size_bytes: Maximum bytes to come.

    Attributes:
        size_bytes: As given.
        filled: Resolved when all bytes are written: with None, or with the error of a write. It is an error as well if
            the link is lost first.
    """

    def __init__(self, link: Link, number: int, fd: int, size_bytes: int) -> None:
        self.filled: asyncio.Future[OSError | None] = asyncio.get_running_loop().create_future()
        self._link = link
        self._number = number
        self._fd = fd
        self.size_bytes = self._left = size_bytes
        self._error: OSError | None = None
        left_to_parent(self, FileEnd._leave)
        link.streams[number] = self

    def take(self, data: Payload) -> None:
        """Write bytes. After an error, further ones are dropped."""
        self._left -= len(data)
        if self._left < 0:
            raise ProtocolViolation("a file is longer than was announced")
        try:
            with memoryview(data) as rest:
                done = 0
                while done < len(rest) and self._error is None:
                    done += os.write(self._fd, rest[done:])
        except OSError as error:
            self._error = error

    def take_end(self) -> None:
        """Resolve `filled`."""
        self._end(self._error)

    def close(self) -> None:
        """Resolve `filled` with an error, unless the end has come."""
        self._end(ConnectionResetError("the link was lost"))

    def _end(self, error: OSError | None) -> None:
        self._leave()
        self._link.streams.pop(self._number, None)
        if not self.filled.done():
            self.filled.set_result(error)

    def _leave(self) -> None:
        fd, self._fd = self._fd, -1
        if fd >= 0:
            os.close(fd)


async def send_file(link: Link, number: int, fd: int, size_bytes: int) -> None:
    """Send a file as a stream, with its end. Other streams and all messages pass it.

    Args:
        fd: Descriptor of a file or memfd; this function closes it.
        size_bytes: Bytes to send; fewer are sent if there are fewer.
    """
    try:
        at = 0
        with contextlib.suppress(OSError):
            while at < size_bytes and link.why_lost is None:
                data = os.pread(fd, min(PIECE_BYTES, size_bytes - at), at)  # of memory: a thread would cost more
                if not data:
                    break
                await link.writable()
                link.send(number, data)
                at += len(data)
                await asyncio.sleep(0)  # no other task runs while the link takes all
    finally:
        os.close(fd)
        link.send(number, b"")
