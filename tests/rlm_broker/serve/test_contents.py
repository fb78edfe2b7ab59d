"""The content of a file as an answer: a client that leaves in the middle ends it."""

import os
import socket
import struct
import threading
from urllib.parse import urlsplit

import httpx
import pytest
from starlette.types import Message, Receive, Scope, Send

from rlm_broker.serve.uploads import PIECE_BYTES, Content
from tests.support.asgi_server import http_server
from tests.support.fds import memfds
from tests.support.waiting import WAIT_S

SIZE_BYTES = 1 << 30
NAME = "content-of-a-test"
RESET = struct.pack("ii", 1, 0)


class Application:
    """Answers each request with a file of zeros that takes no memory, and counts what is sent."""

    def __init__(self, size_bytes: int) -> None:
        self.size_bytes = size_bytes
        self.sent_bytes = 0
        self.ended = threading.Event()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def counted(message: Message) -> None:
            self.sent_bytes += len(message.get("body", b""))
            await send(message)

        if scope["type"] == "http":
            fd = os.memfd_create(NAME)
            os.truncate(fd, self.size_bytes)
            try:
                await Content(fd, self.size_bytes)(scope, receive, counted)
            finally:
                self.ended.set()


def test_content_arrives_whole() -> None:
    size_bytes = 2 * PIECE_BYTES + 1
    with http_server(Application(size_bytes)) as server:
        assert httpx.get(server.url).content == bytes(size_bytes)


def test_client_that_leaves_ends_reading(caplog: pytest.LogCaptureFixture) -> None:
    """The rest of the file is neither read nor sent: it would keep the loop, and log a line for each piece."""
    before = memfds(NAME)
    with http_server(application := Application(SIZE_BYTES)) as server:
        with socket.create_connection(("127.0.0.1", urlsplit(server.url).port or 0)) as client:
            client.sendall(b"GET / HTTP/1.1\r\nhost: localhost\r\n\r\n")
            assert client.recv(100).startswith(b"HTTP/1.1 200")
            client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, RESET)
        assert application.ended.wait(WAIT_S)
        assert application.sent_bytes < SIZE_BYTES // 8
    assert memfds(NAME) == before
    assert "socket.send()" not in caplog.text
