"""Hostile bodies and names for each route and each tool of MCP that the server has: what one costs all others.

The routes are listed from the application and the tools from its answer, so that a new one is attacked, too. No test
here reads a clock of the machine: a step of the event loop is measured in the CPU time of its thread, and compared with
a piece of work on the same thread. Memory is the peak of this process.
"""

import contextlib
import http.client
import json
import socket
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Mount, Route

from rlm_broker import RLM
from rlm_broker.serve import http_server as http_server_module
from rlm_broker.serve.settings import RIGHTS, ServeSettings
from tests.support.asgi_server import HttpServer, http_server
from tests.support.felt import Felt
from tests.support.service import Served, serving
from tests.support.waiting import WAIT_S

BODY_BYTES = 2 << 20
"""`body_bytes` of the server: enough to show a bound that is missing."""
SIZE = BODY_BYTES - 10_000
"""Bytes of a hostile part of a body. A valid request is around it."""
MOST_UNITS = 5.0
"""Longest step of the loop, as multiples of a piece of work that takes 23 ms on the machine of SECURITY.md."""
MOST_GROWTH_MB = 40
"""Growth of the peak of memory by one request."""
ACCEPT = "application/json, text/event-stream"
FORM = "multipart/form-data; boundary=b"
METHODS = ("GET", "POST", "PUT", "PATCH", "DELETE")

BODIES: dict[str, tuple[str, bytes]] = {
    name: ("application/json", body)
    for name, body in {
        "empty": b"",
        "empty lists": b'{"x":[' + b"[]," * (SIZE // 3) + b"[]]}",
        "as many values as may be": b'{"x":[' + b"[]," * 65_000 + b"[]]}",
        "deep lists": b'{"x":' + b"[" * 100_000 + b"]" * 100_000 + b"}",
        "deep objects": b'{"x":' * 60_000 + b"1" + b"}" * 60_000,
        "a long name": b'{"' + b"x" * SIZE + b'":1}',
        "lone surrogates": b'{"x":"' + b"\\ud800" * (SIZE // 6) + b'"}',
        "a huge number": b'{"x":' + b"1" * SIZE + b"}",
        "huge numbers": b'{"x":[' + b",".join([b"7" * 4_200] * (SIZE // 4_300)) + b"]}",
        "infinite": b'{"x":1e999}',
        "doubled names": b"{" + b'"x":1,' * 60_000 + b'"x":2}',
        "many names": b"{" + b",".join(b'"x%d":1' % number for number in range(60_000)) + b"}",
        "zeros": b"\0" * SIZE,
        "no text": b'{"x":"' + b"\xff" * SIZE + b'"}',
        "a list": b"[]",
    }.items()
} | {
    "too many bytes": ("application/json", b" " * (2 * BODY_BYTES)),
    "a form of nothing": (FORM, b"\r\n" * (SIZE // 2)),
    "a form of fields": (FORM, b"--b\r\ncontent-disposition: form-data; name=x\r\n\r\n\r\n" * (SIZE // 60)),
    "a form with a long name": (FORM, b'--b\r\ncontent-disposition: form-data; name="' + b"x" * SIZE),
    "a form with a file without end": (
        FORM,
        b'--b\r\ncontent-disposition: form-data; name="file"; filename="x"\r\n\r\n',
    ),
    "another type": ("text/html", b"<" * SIZE),
}
FOR_ALL = ("empty lists", "too many bytes", "a form of fields")  # tried with methods that take no body, too
HOSTILE = {
    "@text@": b'"' + b"x" * SIZE + b'"',
    "@numbers@": b"[" + b",".join([b"7" * 4_200] * (SIZE // 4_300)) + b"]",
    "@lists@": b"[" + b"[]," * 30_000 + b"[]]",
}
"""Name of a value in place of a text of a valid body → its JSON."""
REQUESTS: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {
        "model": "offline",
        "messages": [{"role": "user", "content": "How long?"}],
        "metadata": {"name": "value"},
        "tools": [{"type": "function", "function": {"name": "f", "description": "?"}}],
        "rlm": {"max_iterations": 1, "question": "How long?"},
    },
    "/v1/responses": {
        "model": "offline",
        "input": [{"role": "user", "content": [{"type": "input_text", "text": "How long?"}]}],
        "instructions": "Be short.",
        "previous_response_id": "resp_1",
        "metadata": {"name": "value"},
        "user": "u",
        "rlm": {"max_iterations": 1},
    },
    "/v1/responses/{id}/cancel": {},
    "/v1/files": {},
    "/v1/containers": {"name": "n", "limits": {"block_timeout_s": "1s"}, "env": {"A": "b"}, "file_ids": ["file-1"]},
    "/v1/containers/{id}/execute": {"code": "1"},
    "/v1/containers/{id}/interrupt": {},
    "/v1/containers/{id}/files": {"file_id": "file-1"},
    "/v1/execute": {
        "code": "1",
        "limits": {"cpu_s": "1s"},
        "env": {"A": "b"},
        "context": {"k": "v"},
        "files": ["file-1"],
    },
    "/run_code": {"code": "1", "language": "python", "files": {"a": "YQ=="}, "fetch_files": ["b"]},
    "/viewer/api/stop": {"run": "r"},
    "/mcp": {"jsonrpc": "2.0", "id": "1", "method": "tools/list"},
}
"""A valid body for each route that takes one. Each text and each name in it becomes a hostile one."""


class Attacker:
    """Sends requests to a server, and notes those that cost more than they may.

    Attributes:
        found: What was beyond its bound.
    """

    def __init__(self, server: Served | HttpServer, headers: dict[str, str]) -> None:
        self._felt = Felt(server.loop)
        self._host = server.url.removeprefix("http://")
        self._headers = headers
        self.found: list[str] = []

    def send(self, what: str, method: str, path: str, kind: str, body: bytes, **more: str) -> tuple[int, bytes]:
        """Send one request, and return the status and the body of its answer; 0 if the server hung up before it."""
        self._felt.begin()
        headers = {**self._headers, "content-type": kind, "accept": ACCEPT, **more}
        connection = http.client.HTTPConnection(self._host, timeout=WAIT_S)
        status, answer = 0, b""
        with contextlib.closing(connection), contextlib.suppress(OSError, http.client.HTTPException):
            with contextlib.suppress(OSError):  # the answer may come before the body is sent
                connection.request(method, path, body, headers)
            answered = connection.getresponse()
            status, answer = answered.status, answered.read()
        if beyond := self._felt.beyond(MOST_UNITS, MOST_GROWTH_MB):
            self.found.append(f"{method} {path[:80]}, {what}: {beyond}")
        if status >= 500 and status != 503:
            self.found.append(f"{method} {path[:80]}, {what}: {status} {answer[:200]!r}")
        return status, answer

    def stall(self, method: str, path: str) -> socket.socket:
        """Begin a request whose body never comes."""
        host, port = self._host.split(":")
        connected = socket.create_connection((host, int(port)), timeout=WAIT_S)
        lines = [f"{method} {path} HTTP/1.1", f"host: {self._host}", "content-length: 100"]
        lines += [f"{name}: {value}" for name, value in self._headers.items()]
        lines += [f"accept: {ACCEPT}", "content-type: application/json"]
        connected.sendall("\r\n".join([*lines, "", '{"']).encode())
        return connected


def routes_of(app: Any, prefix: str = "") -> Iterator[tuple[str, str]]:
    """Yield the method and the path of each route of an application, also of those that are mounted in it."""
    while not hasattr(app, "routes"):
        app = app._app
    for route in app.routes:
        if isinstance(route, Mount):
            yield from routes_of(route.app, prefix + route.path)
        else:
            assert isinstance(route, Route)
            yield from ((method, prefix + route.path) for method in route.methods or METHODS if method != "HEAD")


def as_json(value: Any) -> bytes:
    """Return a value as JSON, with the hostile values in it. To write these each time would take long."""
    body = json.dumps(value).encode()
    for name, hostile in HOSTILE.items():
        body = body.replace(json.dumps(name).encode(), hostile)
    return body


def variants(value: Any, place: str = "") -> Iterator[tuple[str, Any]]:
    """Yield a value with each text in it made hostile, and with a long name more in each object, one at a time."""
    if isinstance(value, str):
        yield from ((f"{place}={name}", name) for name in HOSTILE)
    elif isinstance(value, dict):
        for name, each in value.items():
            yield from ((at, {**value, name: made}) for at, made in variants(each, f"{place}.{name}"))
        yield f"{place}.@text@", {**value, "@text@": 1}
    elif isinstance(value, list):
        for number, each in enumerate(value):
            for at, made in variants(each, f"{place}.{number}"):
                yield at, [*value[:number], made, *value[number + 1 :]]


@pytest.fixture(scope="module")
def served() -> Iterator[Served]:
    settings = ServeSettings(body_bytes=BODY_BYTES, stall_s=0.2, file_bytes=BODY_BYTES)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(http_server_module, "LINGER_S", 0.02)  # a client that does not read sends on so long
        with serving(RLM("offline"), settings, keys={"ann": {"rights": tuple(RIGHTS)}}) as running:
            yield running


@pytest.fixture(scope="module")
def attacker(served: Served) -> Attacker:
    return Attacker(served, served.headers)


@pytest.fixture(scope="module")
def ids(attacker: Attacker) -> dict[str, str]:
    """Things that exist, so that requests get as far as they can: the beginning of a path, and the id in it."""
    attacker._felt.unit_s *= 100  # all that is imported at the first request is imported now
    file = b'--b\r\ncontent-disposition: form-data; name="file"; filename="x"\r\n\r\nabc\r\n--b--\r\n'
    response = json.dumps({"model": "offline", "input": "How long?"}).encode()
    json_kind = "application/json"
    made = {
        "/v1/files/": attacker.send("", "POST", "/v1/files", FORM, file),
        "/v1/containers/": attacker.send("", "POST", "/v1/containers", json_kind, b'{"name":"n"}'),
        "/v1/responses/": attacker.send("", "POST", "/v1/responses", json_kind, response),
    }
    for path, body in REQUESTS.items():
        attacker.send("", "POST", path.replace("{id}", "x"), json_kind, json.dumps(body).encode())
    attacker._felt.unit_s /= 100
    assert [status for status, _ in made.values()] == [200, 200, 200], made
    return {path: json.loads(answer)["id"] for path, (_, answer) in made.items()}


def paths(served: Served, ids: dict[str, str]) -> list[tuple[str, str, str]]:
    """Method, path with an id, and path as the application has it, of each route."""
    listed = []
    for method, path in sorted(set(routes_of(served.service._app))):
        id = next((id for start, id in ids.items() if path.startswith(start)), "x") if method != "DELETE" else "x"
        listed.append((method, path.replace("{id}", id).replace("{file}", "x"), path))
    return listed


def test_each_route_bounds_each_body(served: Served, attacker: Attacker, ids: dict[str, str]) -> None:
    attacker.found.clear()
    for method, path, _ in paths(served, ids):
        for what in FOR_ALL if method in ("GET", "DELETE") else BODIES:
            attacker.send(what, method, path, *BODIES[what])
    assert attacker.found == []


def test_each_route_bounds_each_field(served: Served, attacker: Attacker, ids: dict[str, str]) -> None:
    """A valid body, with a hostile value or a long name in each place of it, gets further than others."""
    attacker.found.clear()
    taking = {path: asked for method, asked, path in paths(served, ids) if method == "POST"}
    assert set(taking) == set(REQUESTS), "give a valid body for each route that takes one"
    for path, asked in taking.items():
        for place, value in variants(REQUESTS[path]):
            attacker.send(place, "POST", asked, "application/json", as_json(value))
    assert attacker.found == []


def test_each_route_bounds_names_in_its_address(served: Served, attacker: Attacker, ids: dict[str, str]) -> None:
    attacker.found.clear()
    for method, asked, path in paths(served, ids):
        for name in ("x" * 8_000, "%00" * 2_500, "%ff" * 2_500, "..%2f" * 1_500):
            attacker.send("name", method, path.replace("{id}", name).replace("{file}", name), "", b"")
            attacker.send("query", method, f"{asked}?{name}={name}&after={name[:6_000]}", "", b"")
    assert attacker.found == []


def test_each_route_gives_up_a_body_that_stalls(served: Served, attacker: Attacker, ids: dict[str, str]) -> None:
    with contextlib.ExitStack() as open_ones:
        stalled = [(path, attacker.stall(method, asked)) for method, asked, path in paths(served, ids)]
        for _, connected in stalled:
            open_ones.enter_context(connected)
        for path, connected in stalled:
            assert connected.recv(100).startswith(b"HTTP/1.1 "), path


MODERN = {"mcp-protocol-version": "2026-07-28", "mcp-method": "tools/call"}


def called(name: str, arguments: Any, version: dict[str, str]) -> bytes:
    meta: dict[str, Any] = {
        f"io.modelcontextprotocol/{key}": value
        for key, value in (("protocolVersion", "2026-07-28"), ("clientCapabilities", {}))
    }
    params = {"name": name, "arguments": arguments, **({"_meta": meta} if version else {})}
    return as_json({"jsonrpc": "2.0", "id": 1, "method": "tools/call", "params": params})


@pytest.mark.usefixtures("ids")  # they are made first
@pytest.mark.parametrize("is_modern", [False, True])
def test_each_tool_bounds_each_argument(served: Served, attacker: Attacker, is_modern: bool) -> None:
    """Each argument of each tool, and the name of the tool itself."""
    attacker.found.clear()

    def call(what: str, name: str, arguments: Any) -> bytes:
        more = {"mcp-name": name} if is_modern else {}
        return attacker.send(
            what, "POST", "/mcp", "application/json", called(name, arguments, session), **session, **more
        )[1]

    session: dict[str, str] = dict(MODERN)
    if not is_modern:
        session = {"mcp-session-id": began(served), "mcp-protocol-version": "2025-11-25"}
    tools = listed(served)
    assert tools
    for name, fields in tools.items():
        valid = {each: field.get("enum", "x")[0] for each, field in fields.items() if field.get("type") != "number"}
        assert b"jsonrpc" in call("valid", name, valid)
        for place, arguments in variants(valid):
            call(f"{name}{place}", name, arguments)
    call("name", "x" * 30_000 if is_modern else "@text@", {})
    assert attacker.found == []


def listed(served: Served) -> dict[str, Any]:
    """Each tool of the server and its arguments, as the server tells them."""
    headers = {**served.headers, "accept": ACCEPT, "mcp-session-id": began(served)}
    asked = {"jsonrpc": "2.0", "id": 1, "method": "tools/list"}
    told = httpx.post(f"{served.url}/mcp", json=asked, headers=headers).text
    tools = json.loads(told.rpartition("data: ")[2])["result"]["tools"]
    return {tool["name"]: tool["inputSchema"]["properties"] for tool in tools}


def began(served: Served) -> str:
    """A session of a client of protocol 2025-11-25."""
    client = {"clientInfo": {"name": "x", "version": "1"}, "protocolVersion": "2025-11-25", "capabilities": {}}
    asked = {"jsonrpc": "2.0", "id": 1, "method": "initialize", "params": client}
    headers = {**served.headers, "accept": ACCEPT}
    return httpx.post(f"{served.url}/mcp", json=asked, headers=headers).headers["mcp-session-id"]


def test_route_without_a_bound_is_found() -> None:
    """The attacks would find a route that decodes what it is sent."""

    async def decode(request: Request) -> Response:
        return JSONResponse(len(json.loads(await request.body())))

    app = Starlette(routes=[Mount("/v2", Starlette(routes=[Route("/decode", decode, methods=["POST"])]))])
    assert list(routes_of(app)) == [("POST", "/v2/decode")]
    with http_server(app) as server:
        attacker = Attacker(server, {})
        attacker.send("empty lists", "POST", "/v2/decode", *BODIES["empty lists"])
    assert len(attacker.found) == 1
