"""A client that speaks HTTP wrongly, late or not at all, and applications for it."""

import contextlib
import socket
from collections.abc import AsyncGenerator, Iterator
from urllib.parse import urlsplit

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from rlm_broker.serve.replies import EventStream
from tests.support.asgi_server import HttpServer
from tests.support.waiting import WAIT_S

REQUEST = b"GET / HTTP/1.1\r\nhost: localhost\r\n\r\n"


async def application(scope: Scope, receive: Receive, send: Send) -> None:
    """Answer at once; at "/endless" with a stream as fast as its reader, at "/wait" never, at "/unread" without a look."""
    if scope["type"] == "lifespan":
        await receive()
        await send({"type": "lifespan.startup.complete"})
        await receive()
        await send({"type": "lifespan.shutdown.complete"})
    elif scope["path"] == "/endless":
        await EventStream(_endless(), 60)(scope, receive, send)
    elif scope["path"] == "/wait":
        while (await receive())["type"] != "http.disconnect":
            pass
    elif scope["path"] == "/unread":
        await Response("ok")(scope, receive, send)
    else:
        while (message := await receive()).get("more_body"):
            pass
        assert message
        await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"2")]})
        await send({"type": "http.response.body", "body": b"ok"})


async def _endless() -> AsyncGenerator[bytes, None]:
    while True:
        yield b"x" * 50_000


@contextlib.contextmanager
def peer(server: HttpServer, data: bytes = b"") -> Iterator[socket.socket]:
    """Connect, and send what is given. The receive buffer is small."""
    with socket.socket() as connected:
        connected.settimeout(WAIT_S)
        connected.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4_096)
        connected.connect(("127.0.0.1", urlsplit(server.url).port))
        connected.sendall(data)
        yield connected


def read_to_end(connected: socket.socket) -> bytes:
    """Return all that comes until the server closes the connection. A reset is an end, too."""
    pieces = []
    with contextlib.suppress(ConnectionResetError):
        while piece := connected.recv(65_536):
            pieces.append(piece)
    return b"".join(pieces)
