"""Compressed pieces of a page: rows and texts as base64 in inert elements, which the page unpacks by itself."""

import base64
import os
import tempfile
import zlib
from collections import deque
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import IO

PIECE_BYTES = 1 << 19
"""Bytes of a piece before compression. The page unpacks a piece in some milliseconds, within a frame."""
LEVEL = 1
"""Level of zlib: higher ones take several times as long, and save a tenth."""
MOST_WAITING = 8
"""Pieces that wait for a thread; beyond it, adding one waits."""
IN_MEMORY_BYTES = 1 << 28
"""Bytes of finished pieces in memory; more go to a temporary file."""


class Pieces:
    """Compresses pieces on threads, keeps them in order, and gives them back as text of base64 without markup.

    Args:
        name: Class of the elements: `rows-piece` or `texts-piece`.
    """

    def __init__(self, name: str, threads: ThreadPoolExecutor) -> None:
        self.count = 0
        self._name = name
        self._threads = threads
        self._waiting: deque[Future[bytes]] = deque()
        self._done: IO[bytes] = tempfile.SpooledTemporaryFile(max_size=IN_MEMORY_BYTES)  # noqa: SIM115 - `close` ends it

    def add(self, data: bytes) -> None:
        """Add a piece. Compression goes on beside the caller, but for `MOST_WAITING`."""
        self.count += 1
        self._waiting.append(self._threads.submit(compressed, data))
        while len(self._waiting) > MOST_WAITING:
            self._keep()

    def elements(self) -> Iterator[bytes]:
        """Yield the pieces as elements, in bounded amounts."""
        while self._waiting:
            self._keep()
        self._done.seek(0)
        while part := self._done.read(1 << 20):
            yield part

    def close(self) -> None:
        """Forget all pieces."""
        for each in self._waiting:
            each.cancel()
        self._done.close()

    def _keep(self) -> None:
        packed = base64.b64encode(self._waiting.popleft().result())
        self._done.write(b'<script type="text/plain" class="%s">%s</script>\n' % (self._name.encode(), packed))


def compressed(data: bytes) -> bytes:
    """Return data as a raw deflate stream."""
    packer = zlib.compressobj(LEVEL, zlib.DEFLATED, -zlib.MAX_WBITS)
    return packer.compress(data) + packer.flush()


def pool() -> ThreadPoolExecutor:
    """Return threads that compress. zlib gives up the interpreter's lock, so they use other cores."""
    return ThreadPoolExecutor(min(4, os.cpu_count() or 1), thread_name_prefix="rlm-broker-pieces")
