"""The HTTP server: what a client without a key may send, for how long, and that none locks another one out."""

import logging
import resource
import shutil
import socket
import ssl
import subprocess
import threading
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import httpx
import pytest

from rlm_broker.serve import http_server as bounds
from rlm_broker.serve.http_server import MOST_CONNECTIONS, MOST_FIELDS, MOST_HEADER_BYTES, MOST_PIPELINED
from tests.support.asgi_server import HttpServer, http_server
from tests.support.http_peer import REQUEST, application, peer, read_to_end
from tests.support.tables import table
from tests.support.waiting import until_now

LINE = b"GET / HTTP/1.1\r\nhost: localhost\r\n"
CHUNKED = b"POST / HTTP/1.1\r\nhost: localhost\r\ntransfer-encoding: chunked\r\n\r\n"
ENDLESS = b"GET /endless HTTP/1.1\r\nhost: localhost\r\n\r\n"
WAIT = b"GET /wait HTTP/1.1\r\nhost: localhost\r\n\r\n"
MUCH = b"x" * (MOST_HEADER_BYTES + 40_000)
FEW = 4


@pytest.fixture(scope="module")
def served() -> Iterator[HttpServer]:
    with http_server(application) as server:
        yield server


@pytest.fixture(scope="module")
def impatient() -> Iterator[HttpServer]:
    with http_server(application, header_s=0.05, unread_s=0.2) as server:
        yield server


@pytest.fixture
def small() -> Iterator[HttpServer]:
    with http_server(application, FEW, close_s=0.1) as server:
        yield server


@table(
    "data, status",
    [
        (LINE + b"a: " + MUCH, 431),
        (LINE + b"a" + MUCH, 431),
        (LINE + b"a:b\r\n" * 50_000, 431),
        (LINE + b"a:b\r\n" * MOST_FIELDS + b"\r\n", 431),
        (b"\r\n" * 60_000, 431),
        (b"GET /" + MUCH, 431),
        (b"HELO localhost\r\n\r\n", 400),
        (b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03", 400),
    ],
)
def test_refused_header_is_answered_and_closed(
    served: HttpServer, data: bytes, status: int, caplog: pytest.LogCaptureFixture
) -> None:
    with peer(served, data) as client:
        head, _, body = read_to_end(client).partition(b"\r\n\r\n")
    assert head.startswith(f"HTTP/1.1 {status} ".encode())
    assert b"connection: close" in head
    assert body.startswith(b'{"error": {"message": "')
    assert not [record for record in caplog.records if record.levelno >= logging.WARNING]


@table("extra", [b"0\r\na: " + MUCH, b"0\r\n" + b"a:b\r\n" * 300, b"1;" + MUCH])
def test_chunks_are_bounded_as_headers_are(served: HttpServer, extra: bytes) -> None:
    """The request is being served, so that its connection is closed without a second answer."""
    with peer(served, CHUNKED + b"3\r\nabc\r\n" + extra) as client:
        assert b"200 OK" not in read_to_end(client)


@pytest.mark.parametrize("data", [b"POST /unread" + CHUNKED[6:] + b"ffffffffff\r\n", LINE + b"a: " + MUCH])
def test_endless_request_is_not_read_after_its_answer(served: HttpServer, data: bytes) -> None:
    with peer(served, data) as client:
        assert client.recv(5) == b"HTTP/"
        with pytest.raises(OSError, match=r"reset|Broken pipe"):
            client.sendall(bytes(1 << 26))
    with peer(served, b"POST /unread HTTP/1.1\r\nhost: localhost\r\ncontent-length: 200000\r\n\r\n") as client:
        client.sendall(b"x" * 200_000 + REQUEST + LINE + b"connection: close\r\n\r\n")  # a little is dropped
        assert read_to_end(client).count(b"200 OK") == 3


def test_requests_below_the_bounds_are_served(served: HttpServer) -> None:
    headers = {f"x-{n}": "y" * 400 for n in range(100)}
    with httpx.Client(headers=headers) as client:
        for _ in range(3):
            assert client.post(f"{served.url}/{'z' * 16_000}", content=b"b" * 1_000_000).text == "ok"
    with peer(served, CHUNKED + b"1\r\nx\r\n" * 50_000 + b"0\r\n\r\n") as chunks:  # tiny chunks are no header
        assert chunks.recv(100).startswith(b"HTTP/1.1 200")


def test_few_requests_are_pipelined(served: HttpServer) -> None:
    with peer(served, REQUEST * MOST_PIPELINED) as client:
        answers = b""
        while answers.count(b"200 OK") < MOST_PIPELINED:
            piece = client.recv(4_096)
            assert piece
            answers += piece
    with peer(served, REQUEST * 10_000) as client:
        assert read_to_end(client).count(b"200 OK") < 10_000


def test_upgrade_is_answered_as_plain_http(served: HttpServer, caplog: pytest.LogCaptureFixture) -> None:
    with peer(served, LINE + b"connection: upgrade\r\nupgrade: h2c\r\n\r\n") as client:
        assert b"connection: close" in read_to_end(client)
    assert not [record for record in caplog.records if record.levelno >= logging.WARNING]


@table("data", [b"", b"G", LINE, REQUEST + LINE])
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
    with peer(impatient, ENDLESS) as client, peer(impatient) as other:
        assert read_to_end(other) == b""
        until_now(lambda: impatient.connections() == 0)
        assert read_to_end(client).startswith(b"HTTP/1.1 200")


def test_late_reader_gets_its_whole_answer(impatient: HttpServer) -> None:
    """The time for the next header ends, and the answer that the client has not read yet is still sent."""
    with peer(impatient, REQUEST) as client:
        until_now(lambda: impatient.connections() == 0)
        assert read_to_end(client).endswith(b"ok")


@pytest.mark.parametrize("data", [b"", b"G", REQUEST])
def test_half_open_connections_lock_no_client_out(small: HttpServer, data: bytes) -> None:
    """The oldest of them is closed for each new one."""
    with ExitStack() as many:
        clients = [many.enter_context(peer(small, data)) for _ in range(5 * FEW)]
        assert httpx.get(small.url).text == "ok"
        read_to_end(clients[0])
        until_now(lambda: small.connections() <= FEW)


def test_silent_clients_go_before_those_that_do_not_read(small: HttpServer) -> None:
    with ExitStack() as many:
        unread, *silent = [many.enter_context(peer(small, data)) for data in (ENDLESS, *[b""] * (FEW - 1))]
        until_now(lambda: small.unread() == 1)
        for each in silent:
            assert small.unread() == 1
            many.enter_context(peer(small, WAIT))
            read_to_end(each)
        until_now(lambda: many.enter_context(peer(small, WAIT)) and small.unread() == 0)
        assert read_to_end(unread).startswith(b"HTTP/1.1 200")


def test_unread_answers_lock_no_client_out(small: HttpServer) -> None:
    with ExitStack() as many:
        for _ in range(FEW):
            many.enter_context(peer(small, ENDLESS))
        until_now(lambda: httpx.get(small.url).status_code == 200)


def test_requests_that_are_served_fill_the_server(small: HttpServer) -> None:
    with ExitStack() as many:
        clients = [many.enter_context(peer(small, WAIT)) for _ in range(FEW)]
        until_now(lambda: httpx.get(small.url).status_code == 503)
        refused = httpx.get(small.url)
        assert (refused.json()["error"]["code"], refused.headers["retry-after"]) == ("full", "1")
        clients[0].close()
        until_now(lambda: httpx.get(small.url).status_code == 200)


def test_headers_together_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """Connections are closed, oldest first, until the others' unfinished headers fit."""
    monkeypatch.setattr(bounds, "MOST_HEADERS_BYTES", 100_000)
    with http_server(application) as server, ExitStack() as many:
        clients = [many.enter_context(peer(server, b"GET / HTTP/1.1\r\na: " + b"x" * 40_000)) for _ in range(6)]
        assert read_to_end(clients[0]) == b""
        until_now(lambda: server.connections() == 2)


def test_end_cuts_unread_streams_without_tracebacks(caplog: pytest.LogCaptureFixture) -> None:
    with ExitStack() as many:
        with http_server(application, close_s=0.1) as server:
            for _ in range(3):
                assert many.enter_context(peer(server, ENDLESS)).recv(1)
        lines = [record.getMessage() for record in caplog.records if record.name != "asyncio"]
        assert [line for line in lines if "cut" in line] == [
            "3 connections were cut at the end: their clients did not read"
        ]
        assert "Traceback" not in caplog.text


@pytest.mark.skipif(shutil.which("openssl") is None, reason="openssl, which makes the certificate, is not installed")
def test_handshake_has_a_deadline_and_gives_way(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    certificate, key = tmp_path / "certificate.pem", tmp_path / "key.pem"
    made = ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-nodes"]
    named = ["-subj", "/CN=localhost", "-days", "2", "-keyout", str(key), "-out", str(certificate)]
    subprocess.run([*made, *named], check=True, capture_output=True)
    files = {"ssl_certfile": str(certificate), "ssl_keyfile": str(key)}
    trusted = ssl.create_default_context(cafile=certificate)
    trusted.check_hostname = False
    with http_server(application, FEW, config=files) as server, ExitStack() as many:
        clients = [many.enter_context(peer(server, data)) for data in (b"", b"\x16\x03\x01", REQUEST) * FEW]
        assert httpx.get(server.url.replace("http:", "https:"), verify=trusted).text == "ok"
        assert read_to_end(clients[0]) == b""
    with http_server(application, config=files, header_s=0.05) as server, peer(server, b"\x16\x03\x01") as client:
        assert read_to_end(client) == b""
    assert not caplog.records


def test_connections_follow_the_limit_of_descriptors(monkeypatch: pytest.MonkeyPatch) -> None:
    for soft, most in ((1_024, 512), (1 << 20, MOST_CONNECTIONS), (resource.RLIM_INFINITY, MOST_CONNECTIONS)):
        monkeypatch.setattr(resource, "getrlimit", lambda _, soft=soft: (soft, soft))
        assert bounds.BoundedServer(bounds.configured(application)).most == most


def _dribble(client: socket.socket, ended: threading.Event) -> None:
    while not ended.wait(0.01):
        try:
            client.send(b"x")
        except OSError:
            return
