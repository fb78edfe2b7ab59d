"""A caller of the handler's port that speaks frames over a real socket."""

import asyncio
import json
from typing import Any, Self

from sandbox_worker.wire.frames import PREFIX, encode_frame

WAIT_S = 120
MAX_FRAME_BYTES = 64 << 20


class Peer:
    """One connection. `async with await Peer.to(port) as peer:`."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader = reader
        self.writer = writer

    @classmethod
    async def to(cls, port: int) -> Self:
        return cls(*await asyncio.open_connection("127.0.0.1", port))

    def send(self, payload: bytes) -> None:
        self.writer.write(encode_frame(payload, MAX_FRAME_BYTES))

    async def receive(self) -> bytes:
        """The next payload; IncompleteReadError where the other side hung up."""
        async with asyncio.timeout(WAIT_S):
            (length,) = PREFIX.unpack(await self.reader.readexactly(PREFIX.size))
            return await self.reader.readexactly(length)

    async def ask(self, request: dict[str, Any]) -> dict[str, Any]:
        """One request of the one-shot protocol, and its reply."""
        self.send(json.dumps(request).encode())
        reply = json.loads(await self.receive())
        assert isinstance(reply, dict)
        return reply

    async def is_hung_up_on(self) -> bool:
        """Wait until the other side hangs up; whether it did so without a word."""
        async with asyncio.timeout(WAIT_S):
            try:
                return await self.reader.read() == b""
            except ConnectionResetError:
                return True

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        self.writer.transport.abort()
