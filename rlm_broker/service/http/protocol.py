"""One HTTP connection, as uvicorn and httptools serve it, with bounds on its header and on its silence.

Theory of operation
-------------------
httptools gathers a header without bound before it tells of it, and uvicorn sets a time limit only between requests.
Bytes are therefore given to the parser in slices, and counted until it tells of progress: a whole header, a piece of a
body, the end of a message. That bounds headers, the lines between the chunks of a body, and the trailers after it.
"""

import asyncio
import contextlib
import fcntl
import json
import struct
import termios
from http import HTTPStatus
from typing import Any, Final

import httptools
from starlette.types import Receive, Scope, Send
from uvicorn.config import Config
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol
from uvicorn.server import ServerState

from rlm_broker.service.errors import ApiError
from rlm_broker.service.http.room import Room

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

    def __init__(self, room: Room, config: Config, server_state: ServerState, app_state: dict[str, Any]) -> None:
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
