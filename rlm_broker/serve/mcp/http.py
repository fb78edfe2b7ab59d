"""The server of the protocol over HTTP: an ASGI app behind a `Guard`, and the route `/mcp`.

Theory of operation
-------------------
A client of protocol 2025-11-25 or earlier has a session for all its requests. The SDK alone knows which
request begins one and when one ends, and bounds the sessions of one manager. So each owner has a manager of its own:
what the SDK counts is what the owner has, and no owner can take the sessions of another.
"""

import asyncio
import contextlib
import logging
import time
from collections.abc import AsyncIterator
from typing import Any, Final

from mcp.server import streamable_http_manager
from mcp.server.context import ServerRequestContext
from mcp.server.streamable_http_manager import StreamableHTTPSessionManager
from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Scope, Send

from rlm_broker import RLM
from rlm_broker.serve.bodies import WholeBodies
from rlm_broker.serve.guard import KEY, ServerKey
from rlm_broker.serve.hosting.repls import HeldRepls
from rlm_broker.serve.hosting.runs import HostedRuns
from rlm_broker.serve.mcp.server import ToolCall, server_of
from rlm_broker.serve.mcp.work import Work
from rlm_broker.serve.parts import Parts

MOST_BODY_BYTES: Final = 8 << 20
"""Bytes of one message. Files are not sent here, and the SDK decodes each message on the loop, more than once."""
MOST_VALUES: Final = 1 << 12
"""JSON values of one message. A call of a tool has a dozen."""
MOST_SESSIONS: Final = 100
"""Sessions of one owner at the same time; a further one is answered with 503. The SDK ends each after 30 idle
minutes. Clients of protocol 2026-07-28 have none."""
SAID_S: Final = 60.0
"""Seconds after a warning of a refused session without another one: a key could fill the log."""


@contextlib.asynccontextmanager
async def mcp_app(rlm: RLM, runs: HostedRuns, repls: HeldRepls) -> AsyncIterator[ASGIApp]:
    """Yield an ASGI app that serves the tools by streamable HTTP, in both eras of the protocol, at any path.

    It serves within the block. The `Guard` in front of it has checked the key, Host and Origin, and `WholeBodies`
    bounds the body: the SDK decodes it on the loop.
    """
    work, ended = Work(rlm, runs, repls), asyncio.Event()
    managers: dict[str, asyncio.Future[StreamableHTTPSessionManager]] = {}

    async def at_once(_call: ToolCall) -> Work:
        return work

    server = server_of(at_once, _key_of, with_paths=False, block_timeout_s=rlm.limits.block_timeout_s)
    logging.getLogger(streamable_http_manager.__name__).addFilter(_seldom)

    async def hold(opened: "asyncio.Future[StreamableHTTPSessionManager]") -> None:
        """Hold a manager open. Its cancel scope must end in the task in which it began, and no request is that."""
        bounds: dict[str, int] = {"max_request_body_size": MOST_BODY_BYTES, "max_sessions": MOST_SESSIONS}
        manager = StreamableHTTPSessionManager(server, **bounds)  # type: ignore[arg-type]
        async with manager.run():
            opened.set_result(manager)
            await ended.wait()

    async def answered(scope: Scope, receive: Receive, send: Send) -> None:
        owner = scope[KEY].owner.name
        if owner not in managers:
            managers[owner] = asyncio.get_running_loop().create_future()
            holding.create_task(hold(managers[owner]))
        await (await asyncio.shield(managers[owner])).handle_request(scope, receive, send)

    async with asyncio.TaskGroup() as holding:
        try:
            yield answered
        finally:
            ended.set()


def _key_of(context: ServerRequestContext[Any, Any]) -> ServerKey:
    """Return the key of the HTTP request that brought a call."""
    assert context.request is not None
    key: ServerKey = context.request.scope[KEY]
    return key


class _Seldom(logging.Filter):
    """Lets one warning of a refused session through in `SAID_S`."""

    _next = float("-inf")

    def filter(self, record: logging.LogRecord) -> bool:
        if not str(record.msg).startswith("Refusing to open"):
            return True
        if is_due := time.monotonic() >= self._next:
            self._next = time.monotonic() + SAID_S
        return is_due


_seldom = _Seldom()


@contextlib.asynccontextmanager
async def mcp_routes(parts: Parts) -> AsyncIterator[list[Route]]:
    """Serve the tools within the block, each for keys with the right that it needs, and yield the routes."""
    settings = parts.settings
    async with mcp_app(parts.rlm, parts.runs, parts.repls) as app:
        bounded = WholeBodies(app, min(settings.body_bytes, MOST_BODY_BYTES), settings.stall_s, MOST_VALUES)
        yield [Route("/mcp", bounded)]  # a `Mount` would redirect `/mcp` to `/mcp/`, and clients do not follow
