"""The first frame of a connection, on either side: a short one, before the other side is trusted with more."""

import asyncio
from collections.abc import Callable
from typing import cast

from rlm_broker.cluster.messages import JOIN_BYTES
from sandbox_worker.wire.frames import PREFIX


class FirstFrame(asyncio.Protocol):
    """Collects one frame of at most `JOIN_BYTES`. A connection that announces more is closed at once.

    Args:
        came: Called once, with the payload and all bytes behind it.

    Attributes:
        gone: Set when the connection has ended.
        transport: The connection; None before it is made.
    """

    def __init__(self, came: Callable[[bytes, bytes], None]) -> None:
        self.gone = asyncio.Event()
        self.transport: asyncio.Transport | None = None
        self._came = came
        self._collected = b""
        self._is_complete = False

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast("asyncio.Transport", transport)  # not isinstance: uvloop's is not an asyncio.Transport

    def data_received(self, data: bytes) -> None:
        if self._is_complete:  # refused, and the answer is being sent
            return
        self._collected += data
        if len(self._collected) < PREFIX.size:
            return
        (payload_bytes,) = PREFIX.unpack_from(self._collected)
        end = PREFIX.size + payload_bytes
        if payload_bytes > JOIN_BYTES:
            self._is_complete = True
            self.hang_up()
        elif len(self._collected) >= end:
            self._is_complete = True
            collected, self._collected = self._collected, b""
            self._came(collected[PREFIX.size : end], collected[end:])

    def connection_lost(self, exc: Exception | None) -> None:  # noqa: ARG002 - asyncio's signature
        self.gone.set()

    def hang_up(self) -> None:
        """Close the connection at once."""
        if self.transport is not None:
            self.transport.abort()
