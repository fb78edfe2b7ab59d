"""The first look at each request: pages of other origins and requests without a key do not get in."""

import json
import socket
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import httpx
import pytest
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from rlm_broker.serve.guard import KEY, Guard, Keys
from rlm_broker.serve.settings import ServeSettings
from rlm_broker.watch.conventions import traceparent
from tests.support.clock import Clock
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


# -- as an ASGI application ------------------------------------------------------------------------------------------

KEYS, TEXT = Keys.made()
TRACE = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"


def scope_of(path: str = "/v1/models", **headers: str) -> Scope:
    told = {"host": "localhost", "authorization": f"Bearer {TEXT}", **headers}
    encoded = [(name.encode(), value.encode()) for name, value in told.items()]
    return {"type": "http", "method": "GET", "path": path, "query_string": b"", "headers": encoded}


async def receive() -> Message:
    return {"type": "http.request"}


class Sent(list[Message]):
    """Messages that an application has sent, and the requests that came to their end."""

    def __init__(self) -> None:
        self.counted: list[tuple[str, int, float]] = []

    async def send(self, message: Message) -> None:
        self.append(message)

    def guard(self, app: ASGIApp) -> Guard:
        return Guard(app, KEYS, on_response=lambda *counted: self.counted.append(counted))


async def answer(scope: Scope, _receive: Receive, send: Send) -> None:
    scope["route"] = SimpleNamespace(path="/v1/{name}")
    await send({"type": "http.response.start", "status": 204, "headers": []})
    await send({"type": "http.response.body", "body": b""})


async def test_request_is_passed_on_and_counted_with_its_route(clock: Clock) -> None:
    async def slowly(scope: Scope, receive: Receive, send: Send) -> None:
        clock.forward(2.5)
        await answer(scope, receive, send)

    scope, sent = scope_of(), Sent()
    await sent.guard(slowly)(scope, receive, sent.send)
    assert [message["type"] for message in sent] == ["http.response.start", "http.response.body"]
    assert sent.counted == [("/v1/{name}", 204, 2.5)]
    assert scope[KEY] is KEYS.authenticated(f"Bearer {TEXT}")
    await Guard(answer, KEYS)(scope_of(), receive, sent.send)
    assert len(sent) == 4


async def test_refused_request_is_counted_and_not_passed_on(clock: Clock) -> None:  # noqa: ARG001
    sent = Sent()
    await sent.guard(answer)(scope_of(host="x" * 101 + "y"), receive, sent.send)
    assert sent.counted == [("other", 403, 0)]
    shown = "x" * 100
    said = json.loads(sent[1]["body"])["error"]["message"]
    assert said == f"the server has no name {shown!r}: add it to serve.hosts"


async def test_request_that_fails_is_counted_as_an_error(clock: Clock) -> None:  # noqa: ARG001
    async def fail(scope: Scope, _receive: Receive, _send: Send) -> None:
        raise ZeroDivisionError(scope["path"])

    sent = Sent()
    with pytest.raises(ZeroDivisionError):
        await sent.guard(fail)(scope_of(), receive, sent.send)
    assert sent.counted == [("other", 500, 0)]


async def test_path_below_another_application_needs_no_key_either() -> None:
    sent = Sent()
    scope = {**scope_of("/below/health", authorization=""), "root_path": "/below"}
    await sent.guard(answer)(scope, receive, sent.send)
    await sent.guard(answer)(scope_of("/below/health", authorization=""), receive, sent.send)
    assert [status for _, status, _ in sent.counted] == [204, 401]


async def test_websocket_is_closed_as_a_breach_of_policy() -> None:
    sent = Sent()
    await sent.guard(answer)({**scope_of(), "type": "websocket"}, receive, sent.send)
    assert sent == [{"type": "websocket.close", "code": 1008}]


async def test_other_events_are_passed_on() -> None:
    passed: list[Any] = []

    async def note(*given: Any) -> None:
        passed.append(given)

    scope, sent = {"type": "lifespan"}, Sent()
    await sent.guard(note)(scope, receive, sent.send)
    assert passed == [(scope, receive, sent.send)]
    assert sent.counted == []


async def test_trace_of_the_caller_is_that_of_the_request_alone() -> None:
    seen: list[str | None] = []

    async def note(*_: Any) -> None:
        seen.append(traceparent.get())

    guard = Guard(note, KEYS)
    for headers in ({"traceparent": TRACE}, {"traceparent": "00-0-0-00"}, {"traceparent": TRACE}, {}):
        await guard(scope_of(**headers), receive, Sent().send)
    assert seen == [TRACE, None, TRACE, None]
