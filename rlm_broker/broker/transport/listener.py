"""The one port: it accepts connections, and gives each to the session of the token in its first frame.

The orchestrator connects for a REPL itself (`dial`), and sends the connected socket to the worker: at `strict` a worker
has no network.
"""

import asyncio
import os
import secrets
import socket
import weakref
from ipaddress import ip_address
from typing import cast

from rlm_broker.broker.transport.acceptor import Acceptor, bind
from rlm_broker.broker.transport.connection import Connection, QueryLoad
from rlm_broker.broker.transport.strangers import Arrival, OneShotServer, Strangers
from rlm_broker.concurrency.forks import FORKING, socket_of_parent
from rlm_broker.errors import ConfigurationError, SandboxFailed, is_shortage, require_kind
from sandbox_worker.wire.errors import WireError
from sandbox_worker.wire.frames import FrameDecoder, encode_frame
from sandbox_worker.wire.messages import Hello, Welcome, decode_welcome, encode

LAST_PORT = 65_535
TOKEN_BYTES = 32
"""Random bytes of a token: 256 bits cannot be guessed."""
MAX_WELCOME_BYTES = 4096
"""Bytes of the handler's first frame; a longer one is refused."""


class Listener:
    """Accepts connections. A one-time token in the first frame names the session of each.

    Args:
        host: Address to bind. An address beyond loopback is refused without `insecure_bind`.
        port: 0 takes a free one.
        first_frame_timeout_s: Seconds until a connection without a complete first frame is dropped.
        one_shot: Answers clients of the field's one-shot protocol, without a token. None turns them away.
        insecure_bind: Whether tokens and contexts may cross the network unencrypted.

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
        insecure_bind: bool = False,
    ) -> None:
        require_kind("host", host, str)
        require_kind("port", port, int)
        if not insecure_bind and not _is_loopback(host):
            raise ConfigurationError(
                f"refusing to listen on {host}: tokens and contexts would cross the network unencrypted; "
                "bind to 127.0.0.1, or pass insecure_bind=True if the network is yours"
            )
        if not 0 <= port <= LAST_PORT:
            raise ConfigurationError(f"port {port} does not exist: choose 1 to {LAST_PORT}, or 0 for a free one")
        self._bind = (host, port)
        self._one_shot = one_shot
        self._acceptor: Acceptor | None = None
        self._expected: dict[str, tuple[Connection, asyncio.TimerHandle]] = {}
        self._claimed = weakref.WeakSet[Connection]()
        self._strangers = Strangers(first_frame_timeout_s)
        self._arriving: set[asyncio.Task[None]] = set()
        self._load = QueryLoad()
        self._stopped = False
        self._changing = asyncio.Lock()

    @property
    def address(self) -> tuple[str, int] | None:
        """Host and port in use, or None before `start` and after `stop`."""
        return None if self._acceptor is None else self._acceptor.address

    async def start(self) -> tuple[str, int]:
        """Begin to listen, and return host and port. If it listens already, they are the same.

        Raises:
            ConfigurationError: The address cannot be bound.
            SandboxFailed: This process may make no socket of the address's family.
        """
        async with self._changing:  # two callers at once must not bind two ports
            if self._acceptor is None:
                sockets = await bind(*self._bind)
                self._acceptor = Acceptor(sockets, self._accepted, self._strangers.drop_longest_silent)
                self._stopped = False
            return self._acceptor.address

    async def stop(self) -> None:
        """Close the port and every connection without a session. Has no effect when repeated."""
        async with self._changing:
            acceptor, self._acceptor = self._acceptor, None
            self._stopped = True
        if acceptor is not None:
            acceptor.close()
        for _, expiry in self._expected.values():
            expiry.cancel()
        self._expected.clear()
        await asyncio.gather(*self._arriving, return_exceptions=True)
        self._strangers.close()
        await asyncio.gather(*(arrival.end() for arrival in list(self._strangers.present)))

    @property
    def connections(self) -> int:
        """Number of REPLs that are connected."""
        return sum(connection.is_open for connection in self._claimed)

    def expect(self, connection: Connection, timeout_s: float) -> str:
        """Return a token, valid for `timeout_s` seconds. `connection` gets the socket on which it is first shown."""
        token = secrets.token_urlsafe(TOKEN_BYTES)
        expiry = asyncio.get_running_loop().call_later(timeout_s, self._expected.pop, token, None)
        self._expected[token] = (connection, expiry)
        connection.share(self._load)
        return token

    async def attach(self, connected: socket.socket) -> None:
        """Serve a connected socket (a socketpair, an inherited descriptor) like an accepted one.

        Raises:
            OSError: The socket cannot be served.
        """
        connected.setblocking(False)
        self._accepted(connected)

    def _accepted(self, connected: socket.socket) -> None:
        if self._stopped:
            connected.close()
        else:
            Arrival(connected, self._strangers, self.claim, self._hand_over, self._one_shot)

    def _hand_over(self, connected: socket.socket, connection: Connection, early: bytes) -> None:
        """Give a connection its socket. `stop` waits until it has it."""
        arriving = asyncio.get_running_loop().create_task(_connected(connected, connection, early))
        self._arriving.add(arriving)
        arriving.add_done_callback(self._arriving.discard)

    def claim(self, token: str) -> Connection | None:
        """Return the connection of `token`, and forget the token; None if it is not valid."""
        connection, expiry = self._expected.pop(token, (None, None))
        if connection is not None:
            self._claimed.add(connection)
        if expiry is not None:
            expiry.cancel()
        return connection


class _Welcoming(asyncio.Protocol):
    """Greets the side that has shown its token, and leaves the socket to its connection."""

    def __init__(self, connection: Connection, early: bytes) -> None:
        self._connection = connection
        self._early = early

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        transport = cast("asyncio.Transport", transport)  # not isinstance: uvloop's is not an asyncio.Transport
        transport.set_protocol(self._connection)
        transport.write(encode_frame(encode(Welcome()), MAX_WELCOME_BYTES))
        self._connection.connection_made(transport)
        if self._early:
            self._connection.receive(self._early)


async def _connected(connected: socket.socket, connection: Connection, early: bytes) -> None:
    try:
        await asyncio.get_running_loop().connect_accepted_socket(lambda: _Welcoming(connection, early), connected)
    except OSError as error:  # the peer is gone already
        connected.close()
        connection.connection_lost(error)


def _is_loopback(host: str) -> bool:
    if host == "localhost":
        return True
    try:
        return ip_address(host).is_loopback
    except ValueError:
        return False


async def dial(address: tuple[str, int], token: str, timeout_s: float) -> socket.socket:
    """Return a blocking socket, connected to the handler at `address` for the session of `token`.

    The handler's only message before the REPL's first is the welcome, so that no byte of the REPL's is read here.

    Raises:
        SandboxFailed: The port is closed, the token is not known, or it took longer than `timeout_s`.
        OSError: This process has no descriptor left, see `is_shortage`.
    """
    loop = asyncio.get_running_loop()
    family = socket.AF_INET6 if ":" in address[0] else socket.AF_INET
    with FORKING:
        connected = socket_of_parent(socket.socket(family, socket.SOCK_STREAM))
    try:
        connected.setblocking(False)
        # The handler in this process takes a second descriptor. Without one it would wait for a descriptor until the
        # time is over: here the error says so at once.
        spare = os.dup(connected.fileno())
        try:
            async with asyncio.timeout(timeout_s):
                await loop.sock_connect(connected, address)
        finally:
            os.close(spare)
        async with asyncio.timeout(timeout_s):
            connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)  # each frame is answered on its own
            await loop.sock_sendall(connected, encode_frame(encode(Hello(token=token)), MAX_WELCOME_BYTES))
            await _welcome(connected)
        connected.setblocking(True)
    except BaseException as error:
        connected.close()
        if isinstance(error, OSError | WireError) and not is_shortage(error):
            why = _reason(error, timeout_s)
            raise SandboxFailed(
                f"the handler at {address[0]}:{address[1]} did not take the connection: {why}"
            ) from None
        raise
    return connected


def _reason(error: OSError | WireError, timeout_s: float) -> str:
    if isinstance(error, TimeoutError):  # an OSError without a text
        return f"no answer within {timeout_s:g} s"
    number = error.errno if isinstance(error, OSError) else None
    return os.strerror(number) if number is not None and number > 0 else str(error)  # below 0: resolver, not errno


async def _welcome(connected: socket.socket) -> None:
    frames = FrameDecoder(MAX_WELCOME_BYTES)
    loop = asyncio.get_running_loop()
    while True:
        data = await loop.sock_recv(connected, MAX_WELCOME_BYTES)
        if not data:
            raise ConnectionResetError("it closed the connection after the token was shown")
        if payloads := frames.feed(data):
            decode_welcome(payloads[0])
            return
