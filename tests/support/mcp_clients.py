"""Clients of the SDK for the Model Context Protocol, and servers for them: over stdio and over HTTP."""

import asyncio
import contextlib
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any, TypeVar

import httpx2
import uvicorn
from mcp import Client, StdioServerParameters
from mcp.client.stdio import stdio_client
from mcp.client.streamable_http import streamable_http_client

from rlm_broker.rlm import RLM
from rlm_broker.serve.guard import KEY, ServerKey
from rlm_broker.serve.hosting.owner import Owner
from rlm_broker.serve.hosting.repls import HeldRepls
from rlm_broker.serve.hosting.runs import HostedRuns
from rlm_broker.serve.mcp.http import mcp_app
from rlm_broker.serve.settings import RIGHTS
from tests.support.command import ENVIRONMENT
from tests.support.fake_openai import Answer, FakeOpenAI, completion
from tests.support.waiting import WAIT_S

T = TypeVar("T")

HELD = "hold"
FAILS = "fail"
PAIRED = "pair"
"""Parts of questions whose run gets no answer of its model, fails, or gets one when a second request comes."""
OWNER = "x-owner"
"""Header with the name of the owner, which stands for a key."""


def answer_to(request: dict[str, Any]) -> Answer:
    """The answer of the model, by the question."""
    asked = next(str(each["content"]) for each in reversed(request["messages"]) if each["role"] == "user")
    if HELD in asked:
        return Answer(never=True)
    if FAILS in asked:
        return Answer(400, {"error": {"message": "no such thing"}})
    said = completion('```repl\nFINAL(f"{len(str(context))} characters")\n```')
    return Answer(body=said.body, together=2) if PAIRED in asked else said


def server_parameters(provider: FakeOpenAI | None, root: Path, *more: str) -> StdioServerParameters:
    """The command that starts `rlm-broker mcp`."""
    named = () if provider is None else ("--model", "test", "--base-url", provider.base_url, "--api-key", "env:KEY")
    arguments = ["-m", "rlm_broker", "mcp", *named, "--root", str(root), *more]
    return StdioServerParameters(command=sys.executable, args=arguments, env={**ENVIRONMENT, "KEY": "k"})


def over_stdio(parameters: StdioServerParameters, mode: str) -> Client:
    """A client that starts its server."""
    return Client(stdio_client(parameters), mode=mode, cache=None)


def over_http(url: str, mode: str, owner: str = "ann") -> Client:
    """A client of a server that runs, with the key of an owner."""
    http = httpx2.AsyncClient(headers={OWNER: owner}, timeout=WAIT_S)
    return Client(streamable_http_client(url, http_client=http), mode=mode, cache=None)


@contextlib.asynccontextmanager
async def held(opened: contextlib.AbstractAsyncContextManager[T]) -> AsyncIterator[T]:
    """Hold a client or a server open in a task of its own: its cancel scopes end in the task in which they began."""
    is_open: asyncio.Future[T] = asyncio.get_running_loop().create_future()
    done = asyncio.Event()

    async def hold() -> None:
        async with opened as one:
            is_open.set_result(one)
            await done.wait()

    task: asyncio.Future[Any] = asyncio.get_running_loop().create_task(hold())
    await asyncio.wait([task, is_open], return_when=asyncio.FIRST_COMPLETED, timeout=WAIT_S)
    if task.done():
        task.result()
    try:
        yield is_open.result()
    finally:
        done.set()
        await task


@contextlib.asynccontextmanager
async def served(rlm: RLM, repls: HeldRepls, key: ServerKey | None = None) -> AsyncIterator[str]:
    """Serve the tools over HTTP on loopback; the address. Without a key, the header `OWNER` stands for one."""
    async with mcp_app(rlm, HostedRuns(rlm), repls) as app:

        async def behind_guard(scope: Any, receive: Any, send: Any) -> None:
            owner = Owner(dict(scope["headers"]).get(OWNER.encode(), b"ann").decode())
            await app({**scope, KEY: key or ServerKey(owner, RIGHTS)}, receive, send)

        server = uvicorn.Server(uvicorn.Config(behind_guard, port=0, log_level="warning", lifespan="off"))
        serving = asyncio.get_running_loop().create_task(server.serve())
        while not server.started:
            await asyncio.sleep(0.005)
        try:
            yield f"http://127.0.0.1:{server.servers[0].sockets[0].getsockname()[1]}/mcp"
        finally:
            server.should_exit = True
            await serving
