"""The port that agents connect to. A one-time token in the first frame says that an agent was started from here."""

import asyncio
import secrets
import socket
import ssl
from collections.abc import Callable
from typing import cast

import msgspec

from rlm_broker.broker.transport.acceptor import Acceptor, bind
from rlm_broker.nodes.messages import MAX_JOIN_BYTES, PROTOCOL, Join, join_decoder
from rlm_broker.nodes.tls import ServerTls
from sandbox_worker import RELEASE
from sandbox_worker.wire.errors import WireError
from sandbox_worker.wire.frames import FrameDecoder, encode_frame

TOKEN_BYTES = 32
"""Random bytes of a token: 256 bits cannot be guessed."""
JOIN_TIMEOUT_S = 10.0
"""Seconds for TLS and the first frame; then a stranger is dropped."""
MOST_STRANGERS = 64
"""Connections without a token. With one more, the oldest is dropped: its agent is started again."""

Joined = Callable[[str], asyncio.Protocol | None]
"""Called with a token; returns what takes the connection, or None if the token is not valid."""


class AgentPort:
    """Accepts the connections of agents.

    Args:
        tls: Certificate; None: plain text, on loopback.
    """

    def __init__(self, tls: ServerTls | None = None) -> None:
        self._tls = tls
        self._acceptor: Acceptor | None = None
        self._expected: dict[str, Callable[[], asyncio.Protocol]] = {}
        self._strangers: dict[Stranger, None] = {}
        self._arriving: set[asyncio.Task[None]] = set()

    @property
    def fingerprint(self) -> str | None:
        """Fingerprint of the certificate that agents pin; None without TLS."""
        return None if self._tls is None else self._tls.fingerprint

    async def open(self, host: str) -> tuple[str, int]:
        """Listen on a free port of an address, and return both.

        Raises:
            ConfigurationError: The address cannot be bound.
        """
        self._acceptor = Acceptor(await bind(host, 0), self._accepted, self._drop_oldest)
        return self._acceptor.address

    async def close(self) -> None:
        """Close the port, and all connections without a token. Has no effect when repeated."""
        acceptor, self._acceptor = self._acceptor, None
        if acceptor is not None:
            acceptor.close()
        self._expected.clear()
        for task in list(self._arriving):
            task.cancel()
        await asyncio.gather(*self._arriving, return_exceptions=True)
        for stranger in list(self._strangers):
            stranger.hang_up()

    def expect(self, make: Callable[[], asyncio.Protocol]) -> str:
        """Return a token, on which `make` is called once, for what takes the connection that shows it."""
        token = secrets.token_urlsafe(TOKEN_BYTES)
        self._expected[token] = make
        return token

    def forget(self, token: str) -> None:
        """Accept the token no more. Has no effect when repeated."""
        self._expected.pop(token, None)

    def _accepted(self, connected: socket.socket) -> None:
        task = asyncio.get_running_loop().create_task(self._arrive(connected))
        self._arriving.add(task)
        task.add_done_callback(self._arriving.discard)

    async def _arrive(self, connected: socket.socket) -> None:
        try:
            if len(self._strangers) + len(self._arriving) > MOST_STRANGERS:
                self._drop_oldest()
            context: ssl.SSLContext | None = self._tls.context if self._tls else None
            timeout_s = JOIN_TIMEOUT_S if context else None
            async with asyncio.timeout(JOIN_TIMEOUT_S):
                await asyncio.get_running_loop().connect_accepted_socket(
                    self._stranger, connected, ssl=context, ssl_handshake_timeout=timeout_s
                )
        except (OSError, ValueError):  # no TLS, or the stranger has left; SSLError and TimeoutError are OSErrors
            connected.close()

    def _stranger(self) -> "Stranger":
        stranger = Stranger(self._claim, lambda: self._strangers.pop(stranger, None))
        self._strangers[stranger] = None
        return stranger

    def _drop_oldest(self) -> None:
        if self._strangers:
            next(iter(self._strangers)).hang_up()

    def _claim(self, join: Join) -> asyncio.Protocol | None:
        if join.protocol != PROTOCOL or join.release != RELEASE:
            return None
        make = self._expected.pop(join.token, None)
        return None if make is None else make()


class Stranger(asyncio.Protocol):
    """A connection that has shown no token."""

    def __init__(self, claim: Callable[[Join], asyncio.Protocol | None], left: Callable[[], object]) -> None:
        self._claim = claim
        self._left = left
        self._frames = FrameDecoder(MAX_JOIN_BYTES)
        self._transport: asyncio.Transport | None = None
        self._timer = asyncio.get_running_loop().call_later(JOIN_TIMEOUT_S, self.hang_up)

    def hang_up(self) -> None:
        """Close the connection without a message."""
        self._leave()
        if self._transport is not None:
            self._transport.abort()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.Transport", transport)

    def connection_lost(self, exc: Exception | None) -> None:  # noqa: ARG002 - asyncio's signature
        self._leave()

    def data_received(self, data: bytes) -> None:
        try:
            payloads = self._frames.feed(data)
            join = join_decoder.decode(payloads[0]) if payloads else None
        except (WireError, msgspec.MsgspecError, RecursionError, UnicodeError):
            self.hang_up()
            return
        if join is None:
            return
        taker = self._claim(join)
        if taker is None:
            self.hang_up()
            return
        assert self._transport is not None
        self._leave()
        self._transport.set_protocol(taker)
        taker.connection_made(self._transport)
        early = b"".join(encode_frame(payload, len(payload)) for payload in payloads[1:]) + self._frames.pending
        if early:
            taker.data_received(early)

    def _leave(self) -> None:
        self._timer.cancel()
        self._left()
