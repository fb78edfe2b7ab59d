"""The server as a whole: no number of connections locks a client out, and its end is quiet."""

import shutil
import ssl
import subprocess
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import httpx
import pytest

from rlm_broker.serve import http_server as rooms
from rlm_broker.serve.http_server import ConnectionRoom
from tests.support.asgi_server import HttpServer, http_server
from tests.support.http_peer import REQUEST, application, peer, read_to_end
from tests.support.waiting import until_now

ENDLESS = b"GET /endless HTTP/1.1\r\nhost: localhost\r\n\r\n"
WAIT = b"GET /wait HTTP/1.1\r\nhost: localhost\r\n\r\n"
FEW = 4


@pytest.fixture
def small() -> Iterator[HttpServer]:
    with http_server(application, ConnectionRoom(FEW), close_s=0.1) as server:
        yield server


@pytest.mark.parametrize("data", [b"", b"G", REQUEST])
def test_half_open_connections_lock_no_client_out(small: HttpServer, data: bytes) -> None:
    """The oldest of them is closed for each new one."""
    with ExitStack() as many:
        clients = [many.enter_context(peer(small, data)) for _ in range(5 * FEW)]
        assert httpx.get(small.url).text == "ok"
        read_to_end(clients[0])
        until_now(lambda: small.connections() <= FEW)


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
    monkeypatch.setattr(rooms, "MOST_HEADERS_BYTES", 100_000)
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
    with http_server(application, ConnectionRoom(FEW), config=files) as server, ExitStack() as many:
        clients = [many.enter_context(peer(server, data)) for data in (b"", b"\x16\x03\x01", REQUEST) * FEW]
        assert httpx.get(server.url.replace("http:", "https:"), verify=trusted).text == "ok"
        assert read_to_end(clients[0]) == b""
    with (
        http_server(application, ConnectionRoom(header_s=0.05), config=files) as server,
        peer(server, b"\x16\x03\x01") as client,
    ):
        assert read_to_end(client) == b""
    assert not caplog.records
