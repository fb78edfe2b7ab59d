"""uvicorn's server, with bounds on what a client without a key can take.

Theory of operation
-------------------
The server accepts a few connections at a time, and has room for a new one.

A client without a key can open connections, and send half a header on each. A bound on their number alone would let it
lock all others out. So a connection is in one of three states, and a full server closes the first two, oldest first:

1. Its client owes a header: since the connection was opened, or since the last answer. This lasts `HEADER_S` at most,
   the handshake of TLS included.
2. Its client does not read. The kernel ends it after `UNREAD_S` without progress (TCP_USER_TIMEOUT, tcp(7)).
3. A request is served. Only these can fill the server, and a further request is then answered with 503.

There is no bound for one address: behind a proxy all clients have one, and so have all programs of this machine.

httptools gathers a header without bound before it reports it, and uvicorn sets a time limit only between requests.
Bytes are therefore given to the parser in slices, and counted until it reports progress: a whole header, a piece of a
body, the end of a message. That bounds headers, the lines between the chunks of a body, and the trailers after it.

No other server does this. h11 bounds headers itself, but 256 KB of tiny chunks hold the loop for 218 ms (httptools:
2 ms). hypercorn 0.18 has a time limit for headers, none for clients that never read, and takes 230 µs of CPU a request
(uvicorn with h11: 130). granian 2.8 answers no more once 400 silent connections meet 256 descriptors. None of them
closes the oldest silent connection for a new one.
"""

import asyncio
import contextlib
import json
import logging
import resource
import socket
from collections import OrderedDict
from collections.abc import Generator
from http import HTTPStatus
from typing import Any, Final

import uvicorn
from starlette.types import Receive, Scope, Send
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from rlm_broker.broker.transport.acceptor import Acceptor
from rlm_broker.serve.errors import ApiError

MOST_CONNECTIONS: Final = 10_000
"""Connections at the same time, where the process may have twice as many descriptors. REPLs and files need the rest."""
SPARE: Final = 64
"""Connections beyond the bound, while all others serve requests: they are answered with 503. As many are closed when no
descriptor is left."""
HEADER_S: Final = 15.0
"""Seconds for a whole header, and before it for the handshake of TLS."""
UNREAD_S: Final = 60.0
"""Seconds a client may read no byte of its answer."""
MOST_HEADERS_BYTES: Final = 32 << 20
"""Bytes of all unfinished headers. Beyond, connections are closed as if the server were full."""
MOST_HEADER_BYTES: Final = 1 << 16
"""Bytes from a client without progress of the parser. A slice more may be read before it is noticed."""
MOST_FIELDS: Final = 200
"""Fields of a header, with those after a body in chunks."""
MOST_PIPELINED: Final = 16
"""Requests of a client before the answer to the first one. uvicorn would queue them without bound."""
SLICE_BYTES: Final = 1 << 14
LINGER_S: Final = 1.0
"""Seconds until the connection of a refused client is closed: to close at once would reset it, and the client
might not read why."""
MOST_DROPPED_BYTES: Final = 1 << 18
"""Bytes of a request read and dropped after its answer. Beyond it nothing is read, and the connection ends."""
CLOSE_S: Final = 5.0
"""Seconds for connections to end, once the server ends. Clients that do not read are then cut."""
LATER_S: Final = 10
"""Seconds after that, until uvicorn cancels what is left, and logs each with a traceback."""
_log = logging.getLogger("rlm_broker")


def configured(
    app: object, certificate: str | None = None, private_key: str | None = None, *, behind_proxy: bool = False
) -> uvicorn.Config:
    """Return the settings of uvicorn.

    Args:
        app: ASGI application, which opens and closes itself.
        certificate: PEM file for TLS, or None.
        private_key: PEM file of its key, or None.
        behind_proxy: Whether a proxy on this machine reports the addresses of clients.
    """
    return uvicorn.Config(
        app,  # type: ignore[arg-type]
        http="httptools",
        ws="none",
        lifespan="off",
        log_config=None,
        log_level="error",  # its warnings tell of requests that are no HTTP: anyone could fill the log
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
        most: Connections at the same time; None takes half of the process's limit of descriptors, up to
            `MOST_CONNECTIONS`.
        header_s, unread_s: Seconds for a header, and for which a client may read nothing.
        close_s: Seconds for connections to end, once the server ends.
        says_cut: Whether connections cut at the end are logged.

    Attributes:
        most, header_s: As above.
        late: Connections owing a header, the oldest first.
        unread: Connections whose clients do not read, the oldest first.
        header_bytes: Bytes of all unfinished headers.
    """

    def __init__(
        self,
        config: uvicorn.Config,
        most: int | None = None,
        *,
        header_s: float = HEADER_S,
        unread_s: float = UNREAD_S,
        close_s: float = CLOSE_S,
        says_cut: bool = True,
    ) -> None:
        super().__init__(config)
        soft = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
        self.most = most or min(MOST_CONNECTIONS, MOST_CONNECTIONS if soft < 0 else soft // 2)
        self.header_s = header_s
        self.late: OrderedDict[_Connection, None] = OrderedDict()
        self.unread: OrderedDict[_Connection, None] = OrderedDict()
        self.header_bytes = 0
        self._unread_s = unread_s
        self._close_s = close_s
        self._says_cut = says_cut
        self._acceptor: Acceptor | None = None

    @contextlib.contextmanager
    def capture_signals(self) -> Generator[None, None, None]:
        """Leave the signals to the caller."""
        yield

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Start the application, and accept connections of the sockets."""
        await super().startup([])
        for listening in sockets or []:
            listening.setblocking(False)
            listening.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, round(self._unread_s * 1_000))
        self._acceptor = Acceptor(list(sockets or []), self._take, lambda: self.close_some(SPARE))

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:  # noqa: ARG002 - uvicorn's signature
        """Accept no more, and end all connections."""
        if self._acceptor is not None:
            self._acceptor.close()
        cutting = asyncio.get_running_loop().call_later(self._close_s, self._cut)
        await super().shutdown([])
        cutting.cancel()

    def close_some(self, number: int) -> int:
        """Close connections that owe a header, then those whose clients do not read, oldest first. Return how many."""
        closed = 0
        for waiting in (self.late, self.unread):
            while waiting and closed < number:
                next(iter(waiting)).hang_up()
                closed += 1
        return closed

    def _take(self, connected: socket.socket) -> None:
        """Serve a connection. Where the server is full, another one is closed for it."""
        taken = len(self.server_state.connections)
        if taken >= self.most and not self.close_some(1) and taken >= self.most + SPARE:
            connected.close()
        else:
            _Connection(self, connected)

    def _cut(self) -> None:
        cut = list(self.server_state.connections)
        if cut and self._says_cut:
            _log.warning("%d connections were cut at the end: their clients did not read", len(cut))
        for connection in cut:
            connection.transport.abort()


class _Connection(HttpToolsProtocol):
    """One connection, from its arrival on."""

    def __init__(self, server: BoundedServer, connected: socket.socket) -> None:
        super().__init__(server.config, server.server_state, server.lifespan.state)
        self._server = server
        self._connected = connected
        self._quiet_bytes = 0
        """Bytes since the parser reported progress."""
        self._dropped_bytes = 0
        self._refusal: ApiError | None = None
        self.connections.add(self)
        self._await_header()
        self._opening = self.loop.create_task(self._open())

    async def _open(self) -> None:
        tls: dict[str, Any] = {"ssl": self.config.ssl, "ssl_shutdown_timeout": LINGER_S} if self.config.ssl else {}
        try:
            await self.loop.connect_accepted_socket(lambda: self, self._connected, **tls)
        except OSError:  # the handshake failed
            self._forget()

    def hang_up(self) -> None:
        """Close the connection at once, without what is not sent."""
        self._forget()
        if self.transport is not None:
            self.transport.abort()
        else:
            with contextlib.suppress(OSError):
                self._connected.shutdown(socket.SHUT_RDWR)  # ends the handshake of TLS

    def shutdown(self) -> None:
        """End the connection once its request is answered."""
        if self.transport is None:
            self.hang_up()
        else:
            super().shutdown()

    def connection_lost(self, exc: Exception | None) -> None:
        """End what waits for the connection."""
        self._forget()
        super().connection_lost(exc)

    def pause_writing(self) -> None:
        """Note that the client does not read."""
        super().pause_writing()
        self._server.unread[self] = None

    def resume_writing(self) -> None:
        """Note that the client reads again."""
        super().resume_writing()
        self._server.unread.pop(self, None)

    def data_received(self, data: bytes) -> None:
        """Give the bytes to the parser, until it or a bound refuses them."""
        for start in range(0, len(data), SLICE_BYTES):
            if self.transport.is_closing():
                return
            piece = data[start : start + SLICE_BYTES]
            if self._refusal is not None:
                self._drop(piece)
                continue
            self._quiet_bytes += len(piece)
            self._server.header_bytes += len(piece)
            super().data_received(piece)
            if self._quiet_bytes > MOST_HEADER_BYTES and self._refusal is None:
                why = f"the header has more than {MOST_HEADER_BYTES:,} bytes"
                self._refusal = ApiError(431, why, code="too_large")
                self.send_400_response(why)
        while self._server.header_bytes > MOST_HEADERS_BYTES and self._server.close_some(1):
            pass

    # -- what the parser says ---------------------------------------------------------------------------------------

    def on_header(self, name: bytes, value: bytes) -> None:
        """Take a field of the header, or of the trailer after a body."""
        if len(self.headers) >= MOST_FIELDS:
            self._refuse(431, f"the header has more than {MOST_FIELDS} fields")
        super().on_header(name, value)

    def on_headers_complete(self) -> None:
        """Begin the request, unless connections with requests fill the server."""
        self._progress()
        if len(self.pipeline) >= MOST_PIPELINED:
            self._refuse(400, f"more than {MOST_PIPELINED} requests came before the answer to the first one")
        self._deadline.cancel()
        self._server.late.pop(self, None)
        is_full = len(self.connections) > self._server.most and not self._server.close_some(1)
        self.app = _full if is_full else self.config.loaded_app
        super().on_headers_complete()

    def on_body(self, body: bytes) -> None:
        """Take a piece of the body; drop that of an answered request."""
        self._progress()
        if self.cycle.response_complete:
            self._drop(body)
        super().on_body(body)

    def on_message_complete(self) -> None:
        """End the request's body."""
        self._progress()
        self._dropped_bytes = 0
        super().on_message_complete()

    def on_response_complete(self) -> None:
        """Begin the next waiting request, or begin to wait for the next header."""
        super().on_response_complete()
        if self.cycle.response_complete:
            self._await_header()

    def _unsupported_upgrade_warning(self) -> None:
        """Answer as plain HTTP/1.1. The parser reads no further request."""
        self.cycle.keep_alive = False

    # -- bounds ------------------------------------------------------------------------------------------------------

    def _await_header(self) -> None:
        self._server.late[self] = None
        self._deadline = self.loop.call_later(self._server.header_s, self._end_late)

    def _end_late(self) -> None:
        """Close the connection, after what its client still reads of the last answer."""
        if self.transport is None:
            self.hang_up()
        else:
            self._server.late.pop(self, None)
            self.transport.close()

    def _progress(self) -> None:
        self._server.header_bytes -= self._quiet_bytes
        self._quiet_bytes = 0

    def _forget(self) -> None:
        self._progress()
        self._deadline.cancel()
        self._server.late.pop(self, None)
        self._server.unread.pop(self, None)
        self.connections.discard(self)

    def _refuse(self, status: int, why: str) -> None:
        """Leave the parser with an error, which `send_400_response` answers with.

        Raises:
            ApiError: Always.
        """
        self._refusal = ApiError(status, why, code="too_large")
        raise self._refusal

    def send_400_response(self, msg: str) -> None:  # noqa: ARG002 - uvicorn's signature
        """Answer with an error, and close the connection. Nothing is logged: anyone could fill the log."""
        self._refusal = self._refusal or ApiError(400, "the request is not HTTP/1.1", code="not_http")
        if self.cycle is not None and not self.cycle.response_complete:  # the bytes would be part of another answer
            self.transport.abort()
            return
        status, body = self._refusal.status, json.dumps(self._refusal.body()).encode()
        head = (
            f"HTTP/1.1 {status} {HTTPStatus(status).phrase}\r\ncontent-type: application/json\r\n"
            f"content-length: {len(body)}\r\nconnection: close\r\n\r\n"
        )
        self.transport.write(head.encode() + body)
        self._linger()

    def _drop(self, piece: bytes) -> None:
        """Count bytes that no one reads, and end a connection that sends too many."""
        is_first = self._dropped_bytes <= MOST_DROPPED_BYTES
        self._dropped_bytes += len(piece)
        if is_first and self._dropped_bytes > MOST_DROPPED_BYTES:
            self.flow.pause_reading()
            self._linger()

    def _linger(self) -> None:
        """Send what is to be sent, and close the connection once its client has had time to read it."""
        if self.transport.can_write_eof():
            self.transport.write_eof()
        self.loop.call_later(LINGER_S, self.transport.abort)


async def _full(scope: Scope, receive: Receive, send: Send) -> None:
    """Answer that the server is full."""
    why = "the server has as many connections as it can hold: try again in 1 s"
    headers = {"retry-after": "1", "connection": "close"}
    await ApiError(503, why, code="full", kind="server_error", headers=headers).response()(scope, receive, send)
