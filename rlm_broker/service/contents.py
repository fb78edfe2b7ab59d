"""The content of a file as an answer, read in pieces while it is sent."""

import asyncio
import os
from typing import Final

from starlette.types import Receive, Scope, Send

from rlm_broker.concurrency.deadline import to_its_end
from rlm_broker.service.replying import while_connected

PIECE_BYTES: Final = 1 << 18
"""Bytes that are read and sent at a time."""


class Content:
    """An answer that is the content of a file.

    Args:
        fd: Descriptor of a regular file, which is closed when the answer has ended.
        size_bytes: Bytes from its start that are sent.
    """

    def __init__(self, fd: int, size_bytes: int) -> None:
        self._fd = fd
        self._size_bytes = size_bytes

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:  # noqa: ARG002 - ASGI's signature
        """Send the content, until it or the client ends."""
        try:
            await while_connected(receive, lambda: self._sent(send))
        finally:
            os.close(self._fd)

    async def _sent(self, send: Send) -> None:
        headers = [
            (b"content-type", b"application/octet-stream"),
            (b"content-length", str(self._size_bytes).encode()),
            (b"content-disposition", b"attachment"),  # a browser shows no page that code or another client has made
            (b"x-content-type-options", b"nosniff"),
        ]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        done = 0
        while piece := await self._read(done):
            done += len(piece)
            await send({"type": "http.response.body", "body": piece, "more_body": True})
        await send({"type": "http.response.body", "body": b"", "more_body": False})

    async def _read(self, done: int) -> bytes:
        """Return the next piece.

        A thread reads it, so that each piece takes a turn of the event loop, which may show that the client has left:
        from then on `send` returns at once. The read ends before the descriptor is closed.
        """
        size = min(PIECE_BYTES, self._size_bytes - done)
        return await to_its_end(lambda: asyncio.to_thread(os.pread, self._fd, size, done))
