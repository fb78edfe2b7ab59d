"""The server over HTTP, as raw requests: sessions of others, bodies, and what is checked by the server in front."""

import asyncio
import contextlib
import gc
import tracemalloc
from collections.abc import AsyncIterator
from typing import Any

import aiohttp
import httpx2
import pytest
import pytest_asyncio
from mcp.client import Client
from mcp.client.streamable_http import streamable_http_client
from mcp.server import streamable_http_manager
from mcp.server.streamable_http import StreamableHTTPServerTransport

from rlm_broker import RLM
from rlm_broker.serve.guard import ServerKey
from rlm_broker.serve.hosting.owner import Owner
from rlm_broker.serve.hosting.repls import HeldRepls
from rlm_broker.serve.mcp import http
from rlm_broker.serve.settings import RIGHTS
from tests.support.mcp_clients import OWNER, held, over_http, served
from tests.support.service import serving
from tests.support.tables import table

pytestmark = pytest.mark.asyncio(loop_scope="module")
ACCEPT = {"accept": "application/json, text/event-stream"}
HELLO = {
    "jsonrpc": "2.0",
    "id": 1,
    "method": "initialize",
    "params": {"protocolVersion": "2025-11-25", "capabilities": {}, "clientInfo": {"name": "test", "version": "1"}},
}
LIST = {"jsonrpc": "2.0", "id": 2, "method": "tools/list"}


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def url() -> AsyncIterator[str]:
    rlm = RLM("offline")
    async with rlm, HeldRepls() as repls, held(served(rlm, repls)) as address:
        yield address


async def post(url: str, message: Any, **headers: str) -> tuple[int, dict[str, str], str]:
    """The status, the headers and the body of an answer."""
    named = {name.replace("_", "-"): value for name, value in headers.items()}
    async with (
        aiohttp.ClientSession() as session,
        session.post(url, json=message, headers={**ACCEPT, **named}) as answer,
    ):
        return answer.status, {name.lower(): value for name, value in answer.headers.items()}, await answer.text()


async def test_session_of_another_is_unknown(url: str) -> None:
    """A session of protocol 2025-11-25 belongs to the owner that began it."""
    status, headers, _ = await post(url, HELLO, **{OWNER: "ann"})
    assert status == 200
    session = {"mcp_session_id": headers["mcp-session-id"], "mcp_protocol_version": "2025-11-25"}
    assert (await post(url, LIST, **{OWNER: "ann"}, **session))[0] == 200
    status, _, body = await post(url, LIST, **{OWNER: "bob"}, **session)
    assert (status, "Session not found" in body) == (404, True)


async def test_host_is_left_to_the_server(url: str) -> None:
    """The SDK does not check Host and Origin once more: the server in front knows which are its own."""
    assert (await post(url, HELLO, host="rlm.example", origin="https://rlm.example"))[0] == 200


@table("version", ["2025-11-25", "2026-07-28"])
async def test_body_that_is_no_request_is_refused(url: str, version: str) -> None:
    status, _, body = await post(url, [1], mcp_protocol_version=version)
    assert status == 400
    assert '"error"' in body


@table("version", [None, "2025-06-18", "2025-11-25"])
async def test_owner_cannot_take_the_sessions_of_another(
    url: str, version: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Sessions are counted as the SDK opens them, whichever version the header names, also if many begin at once."""
    monkeypatch.setattr(http, "MOST_SESSIONS", 3)
    eve = {OWNER: f"eve {version}", **({} if version is None else {"mcp_protocol_version": version})}
    began = await asyncio.gather(*(post(url, HELLO, **eve) for _ in range(8)))
    assert sorted(status for status, _, _ in began) == [200] * 3 + [503] * 5
    assert (await post(url, HELLO, **{OWNER: "ann"}))[0] == 200
    session = next(headers["mcp-session-id"] for status, headers, _ in began if status == 200)
    named = {"mcp_session_id": session, "mcp_protocol_version": "2025-11-25"}
    async with aiohttp.ClientSession() as client:
        headers = {OWNER: eve[OWNER], **{name.replace("_", "-"): value for name, value in named.items()}}
        async with client.delete(url, headers=headers) as ended:
            assert ended.status == 200
    assert (await post(url, HELLO, **eve))[0] == 200


async def test_failed_sessions_of_one_owner_leave_the_others(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The SDK ends all sessions of a manager if one fails in its end. The owner begins new ones."""
    _, headers, _ = await post(url, HELLO, **{OWNER: "ann"})
    anns = {"mcp_session_id": headers["mcp-session-id"], "mcp_protocol_version": "2025-11-25"}

    async def failing(*_: object, **__: object) -> None:
        raise RuntimeError("the end of a session fails")

    with monkeypatch.context() as patched:
        patched.setattr(streamable_http_manager, "serve_loop", failing)
        patched.setattr(StreamableHTTPServerTransport, "terminate", failing)
        with contextlib.suppress(aiohttp.ClientError):
            await post(url, HELLO, **{OWNER: "hal"})
    assert (await post(url, LIST, **{OWNER: "ann"}, **anns))[0] == 200
    assert (await post(url, HELLO, **{OWNER: "hal"}))[0] == 200


async def test_refused_sessions_do_not_fill_the_log(
    url: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(http, "MOST_SESSIONS", 1)
    monkeypatch.setattr(http._seldom, "_next", 0)
    statuses = [(await post(url, HELLO, **{OWNER: "gil"}))[0] for _ in range(5)]
    assert statuses == [200] + 4 * [503]
    assert caplog.text.count("Refusing to open a new session") == 1


async def test_made_up_sessions_are_not_kept(url: str) -> None:
    """A client of the newer protocol names a session that does not exist, another one each time, and 30 kB long."""
    modern = {OWNER: "fay", "mcp_protocol_version": "2026-07-28", "mcp_method": "tools/list"}
    meta = {"io.modelcontextprotocol/protocolVersion": "2026-07-28", "io.modelcontextprotocol/clientCapabilities": {}}
    listing = {**LIST, "params": {"_meta": meta}}

    async def ask(number: int) -> None:
        status, _, body = await post(url, listing, mcp_session_id=f"{number}{'x' * 6_000}", **modern)
        assert status == 200, body

    await ask(0)
    tracemalloc.start()
    try:
        for number in range(50):
            await ask(number)
        gc.collect()
        assert tracemalloc.get_traced_memory()[0] < 25 * 6_000
    finally:
        tracemalloc.stop()


async def test_model_of_the_key_is_asked_for() -> None:
    key = ServerKey(Owner("ann", models=frozenset({"other"})), RIGHTS)
    async with (
        RLM("offline") as rlm,
        HeldRepls() as repls,
        held(served(rlm, repls, key)) as address,
        held(over_http(address, "legacy")) as client,
    ):
        asked = await client.call_tool("ask_large_context", {"question": "?", "context": "a"})
        assert asked.is_error
        assert "may not use the model 'offline'" in str(asked.content)


async def test_keys_of_the_server_have_their_own_repls_and_rights() -> None:
    keys: dict[str, dict[str, Any]] = {"ann": {}, "bob": {}, "eve": {"rights": ("run",)}}
    with serving(keys=keys) as server:

        async def told(key: str, **arguments: Any) -> Any:
            http = httpx2.AsyncClient(headers=server.headers_of(key))
            async with Client(streamable_http_client(f"{server.url}/mcp", http_client=http)) as client:
                return await client.call_tool("execute_python", arguments)

        repl = (await told("ann", code="x = 6")).structured_content["repl"]
        assert "42" in str((await told("ann", code="print(x * 7)", repl=repl)).content)
        assert "there is no REPL" in str((await told("bob", code="print(x)", repl=repl)).content)
        assert "this key lacks the right 'execute'" in str((await told("eve", code="print(1)")).content)
        assert (await post(f"{server.url}/mcp", {}))[0] == 401
