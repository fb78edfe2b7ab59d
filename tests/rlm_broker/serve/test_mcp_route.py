"""The tools of MCP behind the server's keys."""

from collections.abc import Iterator
from typing import Any

import httpx
import httpx2
import pytest
from mcp.client import Client
from mcp.client.streamable_http import streamable_http_client

from tests.support.service import Served, serving


@pytest.fixture(scope="module")
def served() -> Iterator[Served]:
    keys: dict[str, dict[str, Any]] = {"ann": {}, "bob": {}, "eve": {"rights": ("run",)}}
    with serving(keys=keys) as running:
        yield running


async def printed(served: Served, key: str, **arguments: Any) -> Any:
    http = httpx2.AsyncClient(headers=served.headers_of(key))
    async with Client(streamable_http_client(f"{served.url}/mcp", http_client=http)) as client:
        return await client.call_tool("execute_python", arguments)


async def test_tools_run_code_of_the_key_that_asks(served: Served) -> None:
    first = await printed(served, "ann", code="x = 6")
    repl = first.structured_content["repl"]
    assert "42" in str((await printed(served, "ann", code="print(x * 7)", repl=repl)).content)
    refused = await printed(served, "bob", code="print(x)", repl=repl)
    assert refused.is_error
    assert "there is no REPL" in str(refused.content)


async def test_key_without_the_right_is_refused(served: Served) -> None:
    refused = await printed(served, "eve", code="print(1)")
    assert refused.is_error
    assert "this key lacks the right 'execute'" in str(refused.content)
    assert httpx.post(f"{served.url}/mcp", json={}).status_code == 401
