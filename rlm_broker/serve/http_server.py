"""uvicorn's server, with bounds on what a client without a key can take.

Theory of operation
-------------------
The server accepts a few connections at a time, and has room for a new one.

A client without a key can open connections, and send half a header on each. A bound on their number alone would let it
lock all others out. So a connection is in one of three states, and a full server gives up the first two, oldest first:

1. Its client owes a header: since the connection was opened, or since the last answer. This lasts `header_s` at most.
2. Its client does not read. It is given up when no byte has left for `unread_s`, which the kernel's queue tells.
3. A request is served. Only these can fill the server, and a further request is then answered with 503.

There is no bound for one address: behind a proxy all clients have one, and so have all programs of this machine.

httptools gathers a header without bound before it tells of it, and uvicorn sets a time limit only between requests.
Bytes are therefore given to the parser in slices, and counted until it tells of progress: a whole header, a piece of a
body, the end of a message. That bounds headers, the lines between the chunks of a body, and the trailers after it.
"""

import asyncio
import contextlib
import fcntl
import functools
import json
import logging
import resource
import socket
import struct
import termios
from collections import OrderedDict
from collections.abc import Generator
from http import HTTPStatus
from typing import Any, Final, Protocol

import httptools
import uvicorn
from starlette.types import Receive, Scope, Send
from uvicorn.config import Config
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol
from uvicorn.server import ServerState

from rlm_broker.broker.transport.acceptor import Acceptor
from rlm_broker.serve.errors import ApiError

MOST_CONNECTIONS: Final = 10_000
"""Connections at the same time, where the process may have twice as many descriptors."""
DESCRIPTOR_SHARE: Final = 2
"""Divisor of the process's limit of descriptors. REPLs and files need the rest."""
MOST_HEADERS_BYTES: Final = 32 << 20
"""Bytes of all headers that are not whole. Beyond, connections are given up as if the server were full."""
HEADER_S: Final = 15.0
"""Seconds for a whole header, and before it for the handshake of TLS."""
UNREAD_S: Final = 60.0
"""Seconds for which a client may read no byte of its answer."""


class Waiting(Protocol):
    """A connection whose client lets the server wait."""

    def hang_up(self) -> None:
        """Close the connection at once, without what is not sent."""
        ...

    def unsent_bytes(self) -> int:
        """Return the bytes of answers that the client has not taken, in this process and in the kernel."""
        ...


class ConnectionRoom:
    """The connections of one server, and which of them is given up for another.

    Args:
        most: Connections at the same time; None takes half of the process's limit of descriptors, up to
            `MOST_CONNECTIONS`.
        header_s: Seconds for a whole header.
        unread_s: Seconds for which a client may read nothing.

    Attributes:
        most, header_s: As above.
    """

    def __init__(self, most: int | None = None, header_s: float = HEADER_S, unread_s: float = UNREAD_S) -> None:
        self.most = most or _most_of_process()
        self.header_s = header_s
        self._unread_s = unread_s
        self._silent: OrderedDict[Waiting, float] = OrderedDict()
        """Each connection that owes a header → the loop's time at which it is given up. The oldest comes first."""
        self._unread: OrderedDict[Waiting, tuple[float, int]] = OrderedDict()
        """Each connection that does not read → when it is looked at again, and its unsent bytes now."""
        self._header_bytes: dict[Waiting, int] = {}
        self._all_header_bytes = 0
        self._timer: asyncio.TimerHandle | None = None

    def awaits(self, connection: Waiting) -> None:
        """Give up `connection` unless it sends a whole header in time."""
        self.forget(connection)
        self._silent[connection] = asyncio.get_running_loop().time() + self.header_s
        self._arm()

    def stalls(self, connection: Waiting) -> None:
        """Give up `connection` unless its client goes on reading."""
        until = asyncio.get_running_loop().time() + self._unread_s
        self._unread[connection] = until, connection.unsent_bytes()
        self._unread.move_to_end(connection)
        self._arm()

    def flows(self, connection: Waiting) -> None:
        """Note that the client of `connection` reads again."""
        self._unread.pop(connection, None)

    def forget(self, connection: Waiting) -> None:
        """Note that `connection` is served, or is gone."""
        self._silent.pop(connection, None)
        self._unread.pop(connection, None)
        self._all_header_bytes -= self._header_bytes.pop(connection, 0)

    def holds(self, connection: Waiting, header_bytes: int) -> None:
        """Note how many bytes of a header that is not whole `connection` holds, and make room for them."""
        self._all_header_bytes += header_bytes - self._header_bytes.pop(connection, 0)
        if header_bytes:
            self._header_bytes[connection] = header_bytes
        while self._all_header_bytes > MOST_HEADERS_BYTES and self.give_up_one():
            pass

    def give_up_one(self) -> bool:
        """Close the connection that owes a header for longest, else the one that has not read for longest.

        Returns:
            Whether there was one.
        """
        for waiting in (self._silent, self._unread):
            if waiting:
                self._give_up(next(iter(waiting)))
                return True
        return False

    def close(self) -> None:
        """Cancel the timer."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _give_up(self, connection: Waiting) -> None:
        self.forget(connection)
        connection.hang_up()

    def _arm(self) -> None:
        """Set the timer, unless it is set to an earlier time already."""
        firsts = [next(iter(self._silent.values()))] if self._silent else []
        firsts += [next(iter(self._unread.values()))[0]] if self._unread else []
        if firsts and (self._timer is None or self._timer.when() > min(firsts)):
            self.close()
            self._timer = asyncio.get_running_loop().call_at(min(firsts), self._look)

    def _look(self) -> None:
        self._timer = None
        now = asyncio.get_running_loop().time()
        while self._silent and next(iter(self._silent.values())) <= now:
            connection = next(iter(self._silent))
            if connection.unsent_bytes():  # a slow client reads the last answer: its time begins later
                del self._silent[connection]
                self.stalls(connection)
            else:
                self._give_up(connection)
        while self._unread and next(iter(self._unread.values()))[0] <= now:
            connection, (_, before) = next(iter(self._unread.items()))
            unsent = connection.unsent_bytes()
            if unsent >= before > 0:
                self._give_up(connection)
            elif unsent:
                self.stalls(connection)
            else:
                self.awaits(connection)
        self._arm()


def _most_of_process() -> int:
    soft = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    return MOST_CONNECTIONS if soft == resource.RLIM_INFINITY else min(MOST_CONNECTIONS, soft // DESCRIPTOR_SHARE)


MOST_HEADER_BYTES: Final = 1 << 16
"""Bytes that a client may send without progress of the parser. A slice more may be read before it is noticed."""
MOST_URL_BYTES: Final = 1 << 14
MOST_FIELDS: Final = 200
"""Fields of a header, with those after a body in chunks."""
MOST_PIPELINED: Final = 16
"""Requests that a client may send before the answer to the first one. uvicorn would queue them without bound."""
SLICE_BYTES: Final = 1 << 14
LINGER_S: Final = 1.0
"""Seconds for which a refused client's bytes are dropped: to close at once would reset the connection, and the client
might not read why."""


class BoundedProtocol(HttpToolsProtocol):
    """One HTTP connection.

    Args:
        room: Room that the connections of the server take together.
        config: Settings of uvicorn.
        server_state: State that uvicorn's connections share.
        app_state: State of the application's lifespan.
    """

    def __init__(
        self, room: ConnectionRoom, config: Config, server_state: ServerState, app_state: dict[str, Any]
    ) -> None:
        super().__init__(config, server_state, app_state)
        self._room = room
        self._untold_bytes = 0
        self._has_told = False
        self._refusal: ApiError | None = None
        self._is_refused = False

    # -- the connection ----------------------------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Begin to wait for a header."""
        super().connection_made(transport)
        self._room.awaits(self)

    def connection_lost(self, exc: Exception | None) -> None:
        """End what waits for the connection."""
        self._room.forget(self)
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        """Give the bytes to the parser, until it or a bound refuses them."""
        if self.timeout_keep_alive_task is not None:
            self.timeout_keep_alive_task.cancel()
            self.timeout_keep_alive_task = None
        view = memoryview(data)
        for start in range(0, len(view), SLICE_BYTES):
            if self._is_refused or self.transport.is_closing():
                return
            self._feed(view[start : start + SLICE_BYTES])

    def pause_writing(self) -> None:
        """Begin to wait for the client to read."""
        super().pause_writing()
        self._room.stalls(self)

    def resume_writing(self) -> None:
        """End to wait for the client to read."""
        super().resume_writing()
        self._room.flows(self)

    def hang_up(self) -> None:
        """Close the connection at once, without what is not sent."""
        self.transport.abort()

    def unsent_bytes(self) -> int:
        """Return the bytes of answers that the client has not taken, in this process and in the kernel."""
        queued = bytearray(struct.calcsize("i"))
        with contextlib.suppress(OSError, ValueError):  # it is closed already
            fcntl.ioctl(self.transport.get_extra_info("socket").fileno(), termios.TIOCOUTQ, queued)
        return self.transport.get_write_buffer_size() + int(struct.unpack("i", queued)[0])

    # -- what the parser tells ---------------------------------------------------------------------------------------

    def on_url(self, url: bytes) -> None:
        """Take a piece of the URL."""
        super().on_url(url)
        if len(self.url) > MOST_URL_BYTES:
            self._refuse(414, f"the URL has more than {MOST_URL_BYTES:,} bytes")

    def on_header(self, name: bytes, value: bytes) -> None:
        """Take a field of the header, or of the trailer after a body."""
        if len(self.headers) >= MOST_FIELDS:
            self._refuse(431, f"the header has more than {MOST_FIELDS} fields")
        super().on_header(name, value)

    def on_headers_complete(self) -> None:
        """Begin the request, unless connections with requests fill the server."""
        self._has_told = True
        if len(self.pipeline) >= MOST_PIPELINED:
            self._refuse(400, f"more than {MOST_PIPELINED} requests came before the answer to the first one")
        self._room.forget(self)
        is_full = len(self.connections) > self._room.most and not self._room.give_up_one()
        if self.flow.write_paused:
            self._room.stalls(self)
        self.app = _full if is_full else self.config.loaded_app
        super().on_headers_complete()

    def on_body(self, body: bytes) -> None:
        """Take a piece of the body."""
        self._has_told = True
        super().on_body(body)

    def on_message_complete(self) -> None:
        """End the request's body."""
        self._has_told = True
        super().on_message_complete()

    def on_response_complete(self) -> None:
        """Begin the next request that has come already, or begin to wait for the next header."""
        super().on_response_complete()
        if self.cycle.response_complete:
            self._room.awaits(self)

    def _feed(self, data: memoryview) -> None:
        self._has_told = False
        try:
            self.parser.feed_data(data)
        except httptools.HttpParserUpgrade:  # the protocol stays HTTP/1.1, but the parser reads no further request
            self.cycle.keep_alive = False
        except httptools.HttpParserError:
            self._answer(self._refusal or ApiError(400, "the request is not HTTP/1.1", code="not_http"))
            return
        self._untold_bytes = 0 if self._has_told else self._untold_bytes + len(data)
        if self._untold_bytes > MOST_HEADER_BYTES:
            self._answer(ApiError(431, f"the header has more than {MOST_HEADER_BYTES:,} bytes", code="too_large"))
        elif self.cycle is None or self.cycle.response_complete:
            self._room.holds(self, self._untold_bytes)

    # -- refusals ----------------------------------------------------------------------------------------------------

    def _refuse(self, status: int, why: str) -> None:
        """Leave the parser with an error.

        Raises:
            ApiError: Always.
        """
        self._refusal = ApiError(status, why, code="too_large")
        raise self._refusal

    def _answer(self, error: ApiError) -> None:
        """Answer with an error, and close the connection. Nothing is logged: anyone could fill the log."""
        self._is_refused = True
        if self.cycle is not None and not self.cycle.response_complete:  # the bytes would be part of another answer
            self.transport.abort()
            return
        body = json.dumps(error.body()).encode()
        self.transport.write(
            f"HTTP/1.1 {error.status} {HTTPStatus(error.status).phrase}\r\ncontent-type: application/json\r\n"
            f"content-length: {len(body)}\r\nconnection: close\r\n\r\n".encode()
            + body
        )
        if self.transport.can_write_eof():
            self.transport.write_eof()
        self.loop.call_later(LINGER_S, self.transport.abort)


async def _full(scope: Scope, receive: Receive, send: Send) -> None:
    """Answer that the server is full."""
    why = "the server has as many connections as it can hold: try again in 1 s"
    headers = {"retry-after": "1", "connection": "close"}
    await ApiError(503, why, code="full", kind="server_error", headers=headers).response()(scope, receive, send)


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

    def __init__(self, config: uvicorn.Config, room: ConnectionRoom | None = None, close_s: float = CLOSE_S) -> None:
        super().__init__(config)
        self._room = room or ConnectionRoom()
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
