"""The one port: accepts connections and gives each to whom its first frame belongs."""

import asyncio
import contextlib
import os
import secrets
import socket
from collections.abc import Awaitable, Callable
from ipaddress import ip_address
from typing import cast

from rlm_broker.errors import ConfigurationError
from rlm_broker.transport import one_shot
from rlm_broker.transport.connection import Connection
from sandbox_worker.wire.errors import WireError
from sandbox_worker.wire.frames import FrameDecoder, encode_frame
from sandbox_worker.wire.messages import Welcome, decode_hello, encode

BACKLOG = 4096
"""More than a machine full of REPLs that connect at once; the kernel caps it at net.core.somaxconn."""
LAST_PORT = 65_535
MAX_HELLO_BYTES = 4096
TOKEN_BYTES = 32

ONE_AT_A_TIME = "one request at a time: send the next one after the reply"

OneShotServer = Callable[[bytes], Awaitable[bytes]]
"""Answers one request of the field's one-shot protocol: payload in, payload out."""


class Listener:
    """Accepts connections; a one-time token in the first frame says which session each belongs to.

    Args:
        host: Address to bind. Beyond loopback it is refused, see `insecure_bind`.
        port: 0 takes a free one.
        first_frame_timeout_s: How long a connection may stay without having said whose it is.
        one_shot: Answers clients of the field's one-shot protocol, which have no token. None turns them away.
        max_frame_bytes: Largest one-shot request.
        insecure_bind: The caller knows that tokens and contexts would cross a network in the clear.

    Raises:
        ConfigurationError: The port does not exist, or the address is beyond loopback.
    """

    def __init__(
        self,
        host: str = "127.0.0.1",
        port: int = 0,
        *,
        first_frame_timeout_s: float = 10.0,
        one_shot: OneShotServer | None = None,
        max_frame_bytes: int = 64 << 20,
        insecure_bind: bool = False,
    ) -> None:
        if not insecure_bind and not _is_loopback(host):
            raise ConfigurationError(
                f"refusing to listen on {host}: tokens and contexts would cross the network unencrypted; "
                "bind to 127.0.0.1, or pass insecure_bind=True if the network is yours"
            )
        if not 0 <= port <= LAST_PORT:
            raise ConfigurationError(f"there is no port {port}: choose one up to {LAST_PORT}, or 0 for a free one")
        self._bind = (host, port)
        self.first_frame_timeout_s = first_frame_timeout_s
        self.one_shot = one_shot
        self.max_first_frame_bytes = max_frame_bytes if one_shot else MAX_HELLO_BYTES
        self._server: asyncio.Server | None = None
        self._expected: dict[str, tuple[Connection, asyncio.TimerHandle]] = {}
        self._arrivals: set[_Arrival] = set()
        self._silent: dict[_Arrival, float] = {}
        """Until when each may say nothing; who began first comes first."""
        self._sweep: asyncio.TimerHandle | None = None
        self._stopped = False
        self._changing = asyncio.Lock()

    @property
    def address(self) -> tuple[str, int] | None:
        """Host and port in use, or None before `start` and after `stop`."""
        if self._server is None:
            return None
        host, port = self._server.sockets[0].getsockname()[:2]
        return host, port

    async def start(self) -> tuple[str, int]:
        """Listen; called twice it returns the same address.

        Raises:
            ConfigurationError: The address cannot be bound.
        """
        async with self._changing:  # two that start it at once must not bind two ports
            if self._server is None:
                self._server = await self._listen()
                self._stopped = False
        assert self.address
        return self.address

    async def stop(self) -> None:
        """Close the port and every connection that has not said whose it is. Harmless when repeated."""
        async with self._changing:
            server, self._server = self._server, None
            self._stopped = True
        if server is not None:
            server.close()
        for _, expiry in self._expected.values():
            expiry.cancel()
        self._expected.clear()
        if self._sweep is not None:
            self._sweep.cancel()
            self._sweep = None
        await asyncio.gather(*(arrival.end() for arrival in self._arrivals))

    async def _listen(self) -> asyncio.Server:
        host, port = self._bind
        try:
            return await asyncio.get_running_loop().create_server(lambda: _Arrival(self), host, port, backlog=BACKLOG)
        except OSError as error:
            number = error.errno or 0
            why = os.strerror(number) if number > 0 else error.strerror  # below 0: the resolver's own
            raise ConfigurationError(
                f"cannot listen on {host}:{port}: {why}; choose another port, or 0 for a free one"
            ) from None

    def expect(self, connection: Connection, timeout_s: float) -> str:
        """A token that works once, within `timeout_s` seconds: whoever shows it gets `connection`."""
        token = secrets.token_urlsafe(TOKEN_BYTES)
        expiry = asyncio.get_running_loop().call_later(timeout_s, self._expected.pop, token, None)
        self._expected[token] = (connection, expiry)
        return token

    async def attach(self, connected: socket.socket) -> None:
        """Serve a socket that is connected already (a socketpair, an inherited descriptor) like one just accepted."""
        await asyncio.get_running_loop().connect_accepted_socket(lambda: _Arrival(self), connected)

    def claim(self, token: str) -> Connection | None:
        """The connection that `token` was made for, once."""
        connection, expiry = self._expected.pop(token, (None, None))
        if expiry is not None:
            expiry.cancel()
        return connection

    def arrived(self, arrival: "_Arrival") -> bool:
        """Whether it may stay: one that was accepted just before `stop` comes after it."""
        if not self._stopped:
            self._arrivals.add(arrival)
        return not self._stopped

    def left(self, arrival: "_Arrival") -> None:
        self._arrivals.discard(arrival)

    def awaits(self, arrival: "_Arrival") -> None:
        """From now on it may say nothing for `first_frame_timeout_s`. One timer watches all: most speak long before."""
        loop = asyncio.get_running_loop()
        self._silent[arrival] = until = loop.time() + self.first_frame_timeout_s
        if self._sweep is None:
            self._sweep = loop.call_at(until, self._hang_up_on_the_silent)

    def hears(self, arrival: "_Arrival") -> None:
        """It has said something, or is gone."""
        self._silent.pop(arrival, None)

    def _hang_up_on_the_silent(self) -> None:
        self._sweep = None
        loop = asyncio.get_running_loop()
        for arrival, until in list(self._silent.items()):
            if until > loop.time():
                self._sweep = loop.call_at(until, self._hang_up_on_the_silent)
                return
            del self._silent[arrival]
            arrival.hang_up()


class _Arrival(asyncio.Protocol):
    """A connection that has not said whose it is, or one of the one-shot protocol."""

    def __init__(self, listener: Listener) -> None:
        self._listener = listener
        self._frames = FrameDecoder(listener.max_first_frame_bytes)
        self._transport: asyncio.Transport
        self._serving: asyncio.Task[None] | None = None
        self._call_cancelled = False
        self._refused = False

    def hang_up(self) -> None:
        """At once, without a word."""
        self._transport.abort()

    async def end(self) -> None:
        """Hang up, and wait for the end of what is being done for the caller."""
        self.hang_up()
        self._cancel_call()
        if self._serving is not None:
            await asyncio.wait({self._serving})

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.Transport", transport)  # not isinstance: that of uvloop is none
        if self._listener.arrived(self):
            self._listener.awaits(self)
        else:
            self.hang_up()

    def data_received(self, data: bytes) -> None:
        if self._refused:
            return
        try:
            payloads = self._frames.feed(data)
        except WireError as error:
            self._refuse(str(error))
            return
        if payloads:
            self._listener.hears(self)
            self._first(payloads[0], rest=payloads[1:])

    def connection_lost(self, exc: Exception | None) -> None:  # noqa: ARG002 - asyncio's signature
        self._listener.hears(self)
        if self._serving is None:
            self._listener.left(self)
        else:
            self._cancel_call()  # nobody waits for the answer any more
            self._serving.add_done_callback(lambda _: self._listener.left(self))

    def _first(self, payload: bytes, rest: list[bytes]) -> None:
        if self._serving is not None:
            self._refuse(ONE_AT_A_TIME)
            return
        if one_shot.is_one_shot(payload):
            self._one_shot(payload, rest)
            return
        connection = self._listener.claim(decode_hello(payload).token)
        if connection is None:  # a stranger learns nothing, not even that tokens exist
            self._transport.abort()
            return
        self._listener.left(self)
        self._transport.set_protocol(connection)
        self._transport.write(encode_frame(encode(Welcome()), MAX_HELLO_BYTES))
        connection.connection_made(self._transport)
        early = b"".join(encode_frame(payload, len(payload)) for payload in rest) + self._frames.pending
        if early:
            connection.receive(early)

    def _one_shot(self, payload: bytes, rest: list[bytes]) -> None:
        server = self._listener.one_shot
        if server is None:
            self._refuse("this port serves the one-shot protocol only when it was started with one_shot=True")
        elif rest:
            self._refuse(ONE_AT_A_TIME)
        else:
            self._serving = asyncio.get_running_loop().create_task(self._serve(server, payload))

    async def _serve(self, server: OneShotServer, payload: bytes) -> None:
        try:
            reply = await server(payload)
        except Exception as error:  # noqa: BLE001 - a bug of whoever serves must not leave the caller without a reply
            reply = one_shot.error_reply(f"{type(error).__name__}: {error}")
        self._serving = None
        self._write(reply)
        self._listener.awaits(self)  # the next request, or the end of the connection

    def _cancel_call(self) -> None:
        """Once: a second time would hit the client while it is tidying up."""
        if self._serving is not None and not self._call_cancelled:
            self._call_cancelled = True
            self._serving.cancel()

    def _refuse(self, why: str) -> None:
        self._refused = True
        self._listener.hears(self)
        self._cancel_call()
        self._write(one_shot.error_reply(why))
        # Not closed: what still comes to a closed socket is answered with a reset, which overtakes the reason.
        with contextlib.suppress(OSError):  # reset by the other side, who wants no reason
            self._transport.write_eof()
        self._listener.awaits(self)  # for a frame, which none will be

    def _write(self, payload: bytes) -> None:
        if not self._transport.is_closing():
            self._transport.write(encode_frame(payload, 0xFFFF_FFFF))


def _is_loopback(host: str) -> bool:
    if host == "localhost":
        return True
    try:
        return ip_address(host).is_loopback
    except ValueError:
        return False
