"""The first look at each request: pages of other origins and requests without a key do not get in."""

import socket
from collections.abc import Iterator

import httpx
import pytest

from rlm_broker.service.settings import ServeSettings
from tests.support.service import Served, serving


@pytest.fixture(scope="module")
def served() -> Iterator[Served]:
    with serving(settings=ServeSettings(hosts=("rlm.example.org",))) as running:
        yield running


def status(served: Served, **headers: str) -> tuple[int, str]:
    named = {name.replace("_", "-"): value for name, value in headers.items()}
    answer = httpx.get(f"{served.base_url}/models", headers={**served.headers, **named})
    assert not [name for name in answer.headers if name.startswith("access-control")]
    return answer.status_code, "" if answer.is_success else answer.json()["error"]["code"]


@pytest.mark.parametrize("host", ["localhost:8700", "127.0.0.1", "[::1]:8700", "RLM.example.org", "192.0.2.7:80"])
def test_known_hosts_and_addresses_are_let_in(served: Served, host: str) -> None:
    assert status(served, host=host) == (200, "")


@pytest.mark.parametrize(
    "host",
    [
        "evil.example",
        "localhost.evil.example",
        "evil.example:8700",
        "",
        "127.0.0.1.evil.example",
        "[::1].evil.example",
        "[::1]:8700.evil.example",
        "localhost:8700@evil.example",
        "localhost:8700/evil.example",
        "::1",
        "[localhost]",
    ],
)
def test_name_that_a_page_could_have_chosen_is_refused(served: Served, host: str) -> None:
    assert status(served, host=host) == (403, "host")


def test_second_host_is_refused(served: Served) -> None:
    with socket.create_connection(("127.0.0.1", served.port)) as connection:
        connection.sendall(b"GET /health HTTP/1.1\r\nhost: localhost\r\nhost: evil.example\r\n\r\n")
        assert connection.recv(4096).startswith(b"HTTP/1.1 403")


@pytest.mark.parametrize("origin", ["https://evil.example", "null", "http://127.0.0.1:1", "file://"])
def test_page_of_another_origin_is_refused(served: Served, origin: str) -> None:
    assert status(served, origin=origin) == (403, "origin")


@pytest.mark.parametrize("behind", [".evil.example", ".evil.example:80", "@evil.example", "/.evil.example", "0"])
def test_origin_that_begins_with_the_servers_own_is_refused(served: Served, behind: str) -> None:
    assert status(served, origin=served.url + behind) == (403, "origin")
    assert status(served, host="localhost", origin=f"http://localhost{behind}.evil") == (403, "origin")


def test_origin_that_the_servers_own_begins_with_is_refused(served: Served) -> None:
    assert status(served, origin="http://127.0.0.1") == (403, "origin")
    assert status(served, origin="http://") == (403, "origin")


def test_page_of_the_server_itself_is_let_in(served: Served) -> None:
    assert status(served, origin=served.url, sec_fetch_site="same-origin") == (200, "")


@pytest.mark.parametrize("site", ["cross-site", "same-site"])
def test_request_of_a_page_elsewhere_is_refused(served: Served, site: str) -> None:
    assert status(served, sec_fetch_site=site) == (403, "origin")


def test_key_is_wanted_for_all_but_health(served: Served) -> None:
    for path, expected in (("/health", 200), ("/ready", 200), ("/v1/models", 401), ("/health/x", 401), ("/nope", 401)):
        assert httpx.get(served.url + path).status_code == expected


def test_websocket_is_refused(served: Served) -> None:
    request = (
        f"GET /v1/models HTTP/1.1\r\nhost: localhost\r\nauthorization: Bearer {served.key}\r\nconnection: upgrade\r\n"
        "upgrade: websocket\r\nsec-websocket-key: dGhlIHNhbXBsZSBub25jZQ==\r\nsec-websocket-version: 13\r\n\r\n"
    )
    with socket.create_connection(("127.0.0.1", served.port)) as connection:
        connection.sendall(request.encode())
        assert b"101 Switching" not in connection.recv(4096)
