"""uvicorn's server, with bounds on its connections: it accepts a few at a time, and has room for a new one."""

import asyncio
import contextlib
import functools
import logging
import socket
from collections.abc import Generator
from typing import Final

import uvicorn

from rlm_broker.service.http.protocol import BoundedProtocol
from rlm_broker.service.http.room import Room
from rlm_broker.transport.acceptor import Acceptor

SPARE: Final = 64
"""Connections beyond the bound, while all others serve requests: they are answered with 503. As many are given up when
no descriptor is left."""
CLOSE_S: Final = 5.0
"""Seconds that connections have to end, once the server ends. Clients that do not read are then cut."""
LATER_S: Final = 10
"""Seconds after that, until uvicorn cancels what is left, and logs each with a traceback."""
_log = logging.getLogger("rlm_broker")


def configured(app: object, certificate: str | None, private_key: str | None, *, behind_proxy: bool) -> uvicorn.Config:
    """Return the settings of uvicorn.

    Args:
        app: ASGI application, which opens and closes itself.
        certificate: PEM file for TLS, or None.
        private_key: PEM file of its key, or None.
        behind_proxy: Whether a proxy on this machine tells the addresses of clients.
    """
    return uvicorn.Config(
        app,  # type: ignore[arg-type]
        http="httptools",
        ws="none",
        lifespan="off",
        log_config=None,
        access_log=False,
        server_header=False,
        proxy_headers=behind_proxy,
        timeout_graceful_shutdown=round(CLOSE_S + LATER_S),
        ssl_certfile=certificate,
        ssl_keyfile=private_key,
    )


class BoundedServer(uvicorn.Server):
    """uvicorn's server without its signal handlers and its listeners.

    Args:
        config: Settings of uvicorn.
        room: Room for the connections; None takes the defaults.
        close_s: Seconds that connections have to end, once the server ends.
    """

    def __init__(self, config: uvicorn.Config, room: Room | None = None, close_s: float = CLOSE_S) -> None:
        super().__init__(config)
        self._room = room or Room()
        self._close_s = close_s
        self._acceptor: Acceptor | None = None
        self._arriving: set[_Arrival] = set()

    @contextlib.contextmanager
    def capture_signals(self) -> Generator[None, None, None]:
        """Leave the signals to the caller."""
        yield

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Start the application, and accept connections of the sockets."""
        await super().startup([])
        for listening in sockets or []:
            listening.setblocking(False)
        self._acceptor = Acceptor(list(sockets or []), self._take, self._make_room)

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:  # noqa: ARG002 - uvicorn's signature
        """Accept no more, and end all connections."""
        if self._acceptor is not None:
            self._acceptor.close()
        for arrival in list(self._arriving):
            arrival.hang_up()
        cutting = asyncio.get_running_loop().call_later(self._close_s, self._cut)
        await super().shutdown([])
        cutting.cancel()
        self._room.close()

    def _take(self, connected: socket.socket) -> None:
        """Serve a connection. Where the server is full, another one is given up for it."""
        taken = len(self.server_state.connections) + len(self._arriving)
        if taken >= self._room.most and not self._room.give_up_one() and taken >= self._room.most + SPARE:
            connected.close()
            return
        arrival = _Arrival(self, connected)
        self._arriving.add(arrival)
        self._room.awaits(arrival)

    def _make_room(self) -> None:
        """Give up many connections: no descriptor is left, and the next attempt to accept comes only after a pause."""
        for _ in range(SPARE):
            self._room.give_up_one()

    def made(self, arrival: "_Arrival") -> BoundedProtocol:
        """Return the protocol of a new connection."""
        if self.config.ssl is None:  # the protocol takes the place of the arrival in the room at once
            self._room.forget(arrival)
        return BoundedProtocol(self._room, self.config, self.server_state, self.lifespan.state)

    def arrived(self, arrival: "_Arrival") -> None:
        """Note that a connection is open, or has failed."""
        self._arriving.discard(arrival)
        self._room.forget(arrival)

    def _cut(self) -> None:
        late = list(self.server_state.connections)
        if late:
            _log.warning("%d connections were cut at the end: their clients did not read", len(late))
        for connection in late:
            connection.transport.abort()


class _Arrival:
    """A connection until it is open, which takes the handshake of TLS."""

    def __init__(self, server: BoundedServer, connected: socket.socket) -> None:
        self._server = server
        self._connected = connected
        self._has_begun = False
        self._task = asyncio.get_running_loop().create_task(self._opened())
        self._task.add_done_callback(self._ended)

    def hang_up(self) -> None:
        """Close the connection."""
        self._task.cancel()

    def unsent_bytes(self) -> int:
        """Return 0: no answer is sent yet."""
        return 0

    async def _opened(self) -> None:
        self._has_begun = True
        loop, server = asyncio.get_running_loop(), self._server
        with contextlib.suppress(OSError):  # the handshake failed
            made = functools.partial(server.made, self)
            await loop.connect_accepted_socket(made, self._connected, ssl=server.config.ssl)

    def _ended(self, task: "asyncio.Task[None]") -> None:
        if not self._has_begun:  # else asyncio closes the socket
            self._connected.close()
        if not task.cancelled() and (error := task.exception()) is not None:
            _log.error("a connection could not be opened", exc_info=error)
        self._server.arrived(self)
