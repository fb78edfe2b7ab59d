"""One connection: what a client without a key may send, and for how long."""

import logging
import socket
import threading
from collections.abc import Iterator

import httpx
import pytest

from rlm_broker.serve.http_server import MOST_FIELDS, MOST_HEADER_BYTES, MOST_PIPELINED, MOST_URL_BYTES, ConnectionRoom
from tests.support.asgi_server import HttpServer, http_server
from tests.support.http_peer import REQUEST, application, peer, read_to_end
from tests.support.waiting import until_now

LINE = b"GET / HTTP/1.1\r\nhost: localhost\r\n"
CHUNKED = b"POST / HTTP/1.1\r\nhost: localhost\r\ntransfer-encoding: chunked\r\n\r\n"
MUCH = b"x" * (MOST_HEADER_BYTES + 40_000)


@pytest.fixture(scope="module")
def served() -> Iterator[HttpServer]:
    with http_server(application) as server:
        yield server


@pytest.fixture(scope="module")
def impatient() -> Iterator[HttpServer]:
    with http_server(application, ConnectionRoom(header_s=0.05, unread_s=0.2)) as server:
        yield server


@pytest.mark.parametrize(
    ("data", "status"),
    [
        (LINE + b"a: " + MUCH, 431),
        (LINE + b"a" + MUCH, 431),
        (LINE + b"a:b\r\n" * 50_000, 431),
        (LINE + b"a:b\r\n" * MOST_FIELDS + b"\r\n", 431),
        (b"\r\n" * 60_000, 431),
        (b"GET /" + MUCH, 414),
        (b"GET /" + b"x" * MOST_URL_BYTES + b" HTTP/1.1\r\n\r\n", 414),
        (b"HELO localhost\r\n\r\n", 400),
        (b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03", 400),
    ],
)
def test_refused_header_is_answered_and_closed(
    served: HttpServer, data: bytes, status: int, caplog: pytest.LogCaptureFixture
) -> None:
    with peer(served, data) as client:
        answer = read_to_end(client)
    head, _, body = answer.partition(b"\r\n\r\n")
    assert head.startswith(f"HTTP/1.1 {status} ".encode())
    assert b"connection: close" in head
    assert body.startswith(b'{"error": {"message": "')
    assert not [record for record in caplog.records if record.levelno >= logging.WARNING]


@pytest.mark.parametrize("extra", [b"0\r\na: " + MUCH, b"0\r\n" + b"a:b\r\n" * 300, b"1;" + MUCH])
def test_chunks_are_bounded_as_headers_are(served: HttpServer, extra: bytes) -> None:
    """The request is being served, so that its connection is closed without a second answer."""
    with peer(served, CHUNKED + b"3\r\nabc\r\n" + extra) as client:
        assert b"200 OK" not in read_to_end(client)


def test_header_below_the_bounds_is_served(served: HttpServer) -> None:
    headers = {f"x-{n}": "y" * 600 for n in range(100)}
    with httpx.Client(headers=headers) as client:
        for _ in range(3):
            assert client.post(f"{served.url}/{'z' * 16_000}", content=b"b" * 1_000_000).text == "ok"


def test_body_in_tiny_chunks_is_no_header(served: HttpServer) -> None:
    with peer(served, CHUNKED + b"1\r\nx\r\n" * 50_000 + b"0\r\n\r\n") as client:
        assert client.recv(100).startswith(b"HTTP/1.1 200")


def test_few_requests_are_pipelined(served: HttpServer) -> None:
    with peer(served, REQUEST * MOST_PIPELINED) as client:
        answers = b""
        while answers.count(b"200 OK") < MOST_PIPELINED:
            piece = client.recv(4_096)
            assert piece
            answers += piece
    with peer(served, REQUEST * 10_000) as client:
        assert read_to_end(client).count(b"200 OK") < 10_000


@pytest.mark.parametrize("data", [b"", b"G", LINE, REQUEST + LINE])
def test_late_header_ends_the_connection(impatient: HttpServer, data: bytes) -> None:
    with peer(impatient, data) as client:
        assert read_to_end(client).count(b"200 OK") == data.count(REQUEST)


def test_dribbled_header_ends_as_well(impatient: HttpServer) -> None:
    """A byte now and then does not lengthen the time."""
    ended = threading.Event()
    with peer(impatient, LINE) as client:
        dribbling = threading.Thread(target=_dribble, args=(client, ended))
        dribbling.start()
        assert read_to_end(client) == b""
        ended.set()
        dribbling.join()


def test_client_that_does_not_read_is_cut(impatient: HttpServer) -> None:
    with peer(impatient, b"GET /endless HTTP/1.1\r\nhost: localhost\r\n\r\n") as client, peer(impatient) as other:
        assert read_to_end(other) == b""
        until_now(lambda: impatient.connections() == 0)
        assert read_to_end(client).startswith(b"HTTP/1.1 200")


def test_upgrade_is_answered_as_plain_http(served: HttpServer, caplog: pytest.LogCaptureFixture) -> None:
    with peer(served, LINE + b"connection: upgrade\r\nupgrade: h2c\r\n\r\n") as client:
        assert b"connection: close" in read_to_end(client)
    assert not [record for record in caplog.records if record.levelno >= logging.WARNING]


def _dribble(client: socket.socket, ended: threading.Event) -> None:
    while not ended.wait(0.01):
        try:
            client.send(b"x")
        except OSError:
            return
