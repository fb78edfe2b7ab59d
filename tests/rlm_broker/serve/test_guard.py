"""The first look at each request: pages of other origins and requests without a key do not get in."""

import base64
import json
import socket
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import httpx
import pytest
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from rlm_broker import ConfigurationError, RunLimits
from rlm_broker.serve.errors import ApiError
from rlm_broker.serve.guard import KEY, Guard, Keys, ServerKey
from rlm_broker.serve.hosting.owner import Owner
from rlm_broker.serve.settings import RIGHTS, KeySettings, ServeSettings
from rlm_broker.watch.conventions import traceparent
from tests.support.clock import Clock
from tests.support.service import Served, serving

# -- over real HTTP --------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def served() -> Iterator[Served]:
    with serving(settings=ServeSettings(hosts=("rlm.example.org",))) as running:
        yield running


def test_hosts_and_origins_of_other_pages_are_refused(served: Served) -> None:
    url = served.url
    own = [
        *({"host": host} for host in ("localhost:8700", "127.0.0.1", "[::1]:8700", "RLM.example.org", "192.0.2.7:80")),
        {"origin": url, "sec-fetch-site": "same-origin"},
    ]
    other_hosts = ["evil.example", "localhost.evil.example", "evil.example:8700", "", "127.0.0.1.evil.example"]
    other_hosts += ["[::1].evil.example", "[::1]:8700.evil.example", "localhost:8700@evil.example", "[localhost]"]
    other_hosts += ["localhost:8700/evil.example", "::1"]
    origins = ["https://evil.example", "null", "http://127.0.0.1:1", "file://", "http://127.0.0.1", "http://"]
    behind = [".evil.example", ".evil.example:80", "@evil.example", "/.evil.example", "0"]
    other_origins = [
        *({"origin": origin} for origin in [*origins, *(url + each for each in behind)]),
        *({"host": "localhost", "origin": f"http://localhost{each}.evil"} for each in behind),
        *({"sec-fetch-site": site} for site in ("cross-site", "same-site")),
    ]
    cases = [(200, "", headers) for headers in own]
    cases += [(403, "host", {"host": host}) for host in other_hosts]
    cases += [(403, "origin", headers) for headers in other_origins]
    for status, code, headers in cases:
        answer = httpx.get(f"{served.base_url}/models", headers={**served.headers, **headers})
        said = "" if answer.is_success else answer.json()["error"]["code"]
        assert (answer.status_code, said) == (status, code), headers
        assert not [name for name in answer.headers if name.startswith("access-control")]


def test_second_host_and_websockets_are_refused(served: Served) -> None:
    upgrade = (
        f"GET /v1/models HTTP/1.1\r\nhost: localhost\r\nauthorization: Bearer {served.key}\r\nconnection: upgrade\r\n"
        "upgrade: websocket\r\nsec-websocket-key: dGhlIHNhbXBsZSBub25jZQ==\r\nsec-websocket-version: 13\r\n\r\n"
    )
    hosts = "GET /health HTTP/1.1\r\nhost: localhost\r\nhost: evil.example\r\n\r\n"
    for request, status in ((hosts, b"HTTP/1.1 403"), (upgrade, b"HTTP/1.1 200")):
        with socket.create_connection(("127.0.0.1", served.port)) as connection:
            connection.sendall(request.encode())
            assert connection.recv(4096).startswith(status)


def test_key_is_wanted_for_all_but_health(served: Served) -> None:
    for path, expected in (("/health", 200), ("/ready", 200), ("/v1/models", 401), ("/health/x", 401), ("/nope", 401)):
        assert httpx.get(served.url + path).status_code == expected


# -- as an ASGI application ------------------------------------------------------------------------------------------

KEYS, MADE = Keys.made()
TRACE = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"


def scope_of(path: str = "/v1/models", **headers: str) -> Scope:
    told = {"host": "localhost", "authorization": f"Bearer {MADE}", **headers}
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


async def test_requests_are_counted_as_they_end(clock: Clock) -> None:
    async def slowly(scope: Scope, receive: Receive, send: Send) -> None:
        clock.forward(2.5)
        await answer(scope, receive, send)

    async def fail(scope: Scope, _receive: Receive, _send: Send) -> None:
        raise ZeroDivisionError(scope["path"])

    scope, sent = scope_of(), Sent()
    await sent.guard(slowly)(scope, receive, sent.send)
    assert [message["type"] for message in sent] == ["http.response.start", "http.response.body"]
    assert scope[KEY] is KEYS.authenticated(f"Bearer {MADE}")
    await sent.guard(answer)(scope_of(host="x" * 101 + "y"), receive, sent.send)
    shown = "x" * 100
    assert json.loads(sent[3]["body"])["error"]["message"] == (
        f"the server has no name {shown!r}: add it to serve.hosts"
    )
    with pytest.raises(ZeroDivisionError):
        await sent.guard(fail)(scope_of(), receive, sent.send)
    assert sent.counted == [("/v1/{name}", 204, 2.5), ("other", 403, 0), ("other", 500, 0)]
    await Guard(answer, KEYS)(scope_of(), receive, sent.send)  # without a callback
    assert len(sent) == 6


async def test_path_below_another_application_needs_no_key_either() -> None:
    sent = Sent()
    scope = {**scope_of("/below/health", authorization=""), "root_path": "/below"}
    await sent.guard(answer)(scope, receive, sent.send)
    await sent.guard(answer)(scope_of("/below/health", authorization=""), receive, sent.send)
    await Guard(answer, KEYS, open_paths=frozenset({"/x"}), on_response=lambda *counted: sent.counted.append(counted))(
        scope_of("/x", authorization=""), receive, sent.send
    )
    assert [status for _, status, _ in sent.counted] == [204, 401, 204]


async def test_other_scopes_are_closed_or_passed_on() -> None:
    passed: list[Any] = []

    async def note(*given: Any) -> None:
        passed.append(given)

    scope, sent = {"type": "lifespan"}, Sent()
    await sent.guard(note)({**scope_of(), "type": "websocket"}, receive, sent.send)
    assert sent == [{"type": "websocket.close", "code": 1008}]
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


# -- keys ------------------------------------------------------------------------------------------------------------

ANN = ServerKey(Owner("ann"), frozenset({"run"}))
TEXT = "a-key-of-some-length"


def basic(credentials: str, scheme: str = "Basic") -> str:
    return f"{scheme} {base64.b64encode(credentials.encode()).decode()}"


def test_key_is_found_by_its_text_or_as_a_password() -> None:
    keys, other = Keys([(ANN, TEXT)]), Keys([(ANN, f"{TEXT}:1")])
    assert keys.authenticated(f"Bearer {TEXT}") is keys.authenticated(f"bearer  {TEXT} ") is ANN
    assert TEXT not in repr(vars(keys))
    for user in ("", "ann", "ann b@example.org"):
        assert other.authenticated(basic(f"{user}:{TEXT}:1")) is ANN
        assert other.authenticated(basic(f"{user}:{TEXT}:1", "bASIC ")) is ANN
    assert Keys([(ANN, "x" * 16)]).authenticated(f"Bearer {'x' * 16}") is ANN


def test_other_texts_are_refused_and_not_told() -> None:
    wrong = ["Bearer other", f"Bearer {TEXT}x", "Bearer \udcff"]
    wrong += map(basic, (f"{TEXT}:other", f"ann:{TEXT}x", f"ann:x{TEXT}"))
    none = [None, "", TEXT, f"Basic {TEXT}", "Bearer", "Bearer  ", "Token x", "Basic"]
    none += map(basic, ("ann:", "", ":", TEXT, f"{TEXT}:"))
    none += [basic(f"ann:{TEXT}").replace("Basic ", "Basic !")]  # a lenient decoder would find a key in it
    for sent, why in (
        *((each, "this is not a key of this server") for each in wrong),
        *((each, "give a key of this server in the header `Authorization: Bearer KEY`") for each in none),
    ):
        with pytest.raises(ApiError) as refused:
            Keys([(ANN, TEXT)]).authenticated(sent)
        assert (refused.value.status, refused.value.message) == (401, why), sent
        assert refused.value.headers["www-authenticate"] == "Bearer"


def test_settings_name_the_variables_of_keys(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ANNS_KEY", f" {TEXT}\n")
    limits = RunLimits(max_tokens=5)
    settings = KeySettings(key="env:ANNS_KEY", rights=("execute",), models=("m",), limits=limits, usd_a_day=2)
    key = Keys.of({"ann": settings}).authenticated(f"Bearer {TEXT}")
    assert key == ServerKey(Owner("ann", frozenset({"m"}), limits, 2.0), frozenset({"execute"}))
    monkeypatch.setenv("ANNS_KEY", " ")
    with pytest.raises(ConfigurationError, match=r"^serve\.keys\.ann: the variable ANNS_KEY is not set$"):
        Keys.of({"ann": KeySettings(key="env:ANNS_KEY")})


def test_made_key_has_all_rights() -> None:
    assert KEYS.authenticated(f"Bearer {MADE}").rights == RIGHTS
    assert len(MADE) == len("rlm-") + 32  # 24 random bytes
    assert Keys.made()[1] != MADE


def test_keys_that_cannot_be_used_are_refused() -> None:
    for texts, why in (
        (["x" * 15], "has 15 characters: give at least 16"),
        ([TEXT, TEXT], "is that of another one"),
    ):
        with pytest.raises(ConfigurationError, match=why):
            Keys([(ANN, text) for text in texts])


def test_missing_right_is_named_and_one_of_several_is_enough() -> None:
    ANN.require("run")
    ANN.require("stop", "run")
    for rights, why in (
        (("stop",), "this key lacks the right 'stop'"),
        (("stop", "execute"), "this key lacks the rights 'stop' and 'execute': one of them is needed"),
    ):
        with pytest.raises(ApiError) as refused:
            ANN.require(*rights)
        assert (refused.value.status, refused.value.code, refused.value.message) == (403, "not_allowed", why)
