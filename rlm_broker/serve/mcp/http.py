"""The server of the protocol over HTTP: as an ASGI app, for a server that knows who asks, and as the route `/mcp`.

Theory of operation
-------------------
A client of protocol 2025-11-25 or earlier has a session, which lives on between its requests. The SDK alone knows which
request begins one and when one ends, and bounds the sessions of one manager. So each owner has a manager of its own:
what the SDK counts is what the owner has, and no owner can take the sessions of another.
"""

import asyncio
import contextlib
import logging
import time
from collections.abc import AsyncIterator, Callable
from typing import Any, Final

from mcp.server import streamable_http_manager
from mcp.server.context import ServerRequestContext
from mcp.server.streamable_http_manager import StreamableHTTPSessionManager
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from rlm_broker.rlm import RLM
from rlm_broker.serve.bodies import WholeBodies
from rlm_broker.serve.errors import ApiError
from rlm_broker.serve.guard import KEY, ServerKey
from rlm_broker.serve.hosting.owner import NotAllowed, Owner
from rlm_broker.serve.hosting.repls import HeldRepls
from rlm_broker.serve.hosting.runs import HostedRuns
from rlm_broker.serve.mcp.forms import Right
from rlm_broker.serve.mcp.server import SdkCall, server_of
from rlm_broker.serve.mcp.work import Work
from rlm_broker.serve.parts import Parts

MOST_BODY_BYTES: Final = 8 << 20
"""Bytes of one message. Files are not sent here, and the SDK decodes each message on the loop, more than once."""
MOST_VALUES: Final = 1 << 12
"""JSON values of one message. A call of a tool has a dozen."""
MOST_SESSIONS: Final = 100
"""Sessions of one owner at the same time; a further one is answered with 503. The SDK ends each that was idle for 30
minutes. Clients of protocol 2026-07-28 have none."""
SAID_S: Final = 60.0
"""Seconds after a warning of a refused session without another one: a key could fill the log."""


class McpApp:
    """An ASGI app that serves the tools by streamable HTTP, in both eras of the protocol, at any path.

    The server in front of it has checked the key, Host and Origin already, and bounds the body: the SDK decodes it on
    the loop. Enter `running` before the first request.

    Args:
        rlm: The open `RLM` that answers.
        runs: Runs of all owners.
        repls: REPLs of all owners.
        owner_of: Returns the owner of a request, from its ASGI scope.
        require: Raises a `RlmBrokerError`, for example `NotAllowed`, if the one who asks lacks the right of a tool.
    """

    def __init__(
        self,
        rlm: RLM,
        runs: HostedRuns,
        repls: HeldRepls,
        owner_of: Callable[[Scope], Owner],
        *,
        require: Callable[[Scope, Right], object] = lambda _scope, _right: None,
    ) -> None:
        self._owner_of = owner_of
        self._managers: dict[str, asyncio.Future[StreamableHTTPSessionManager]] = {}
        self._holding: set[asyncio.Task[None]] = set()
        self._ended = asyncio.Event()
        work = Work(rlm, runs, repls)

        async def at_once(_call: SdkCall) -> Work:
            return work

        self._server = server_of(
            at_once,
            lambda context: owner_of(_scope(context)),
            with_paths=False,
            block_timeout_s=rlm.limits.block_timeout_s,
            require=lambda context, right: require(_scope(context), right),
        )
        logging.getLogger(streamable_http_manager.__name__).addFilter(_seldom)

    @contextlib.asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """Serve requests within the block. It can be entered once."""
        try:
            yield
        finally:
            self._ended.set()
            await asyncio.gather(*self._holding)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request. A session of another owner is unknown."""
        owner = self._owner_of(scope).name
        if owner not in self._managers:
            opened = self._managers[owner] = asyncio.get_running_loop().create_future()
            self._holding.add(asyncio.get_running_loop().create_task(self._hold(opened)))
        manager = await asyncio.shield(self._managers[owner])
        await manager.handle_request(scope, receive, send)

    async def _hold(self, opened: "asyncio.Future[StreamableHTTPSessionManager]") -> None:
        """Hold a manager open. Its cancel scope must end in the task in which it began, which no request is."""
        manager = StreamableHTTPSessionManager(
            self._server, max_request_body_size=MOST_BODY_BYTES, max_sessions=MOST_SESSIONS
        )
        async with manager.run():
            opened.set_result(manager)
            await self._ended.wait()


def _scope(context: ServerRequestContext[Any, Any]) -> Scope:
    """Return the scope of the HTTP request that brought a call."""
    assert context.request is not None
    scope: Scope = context.request.scope
    return scope


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
    app = McpApp(parts.rlm, parts.runs, parts.repls, lambda scope: _key(scope).owner, require=_require)
    bounded = WholeBodies(app, min(settings.body_bytes, MOST_BODY_BYTES), settings.stall_s, MOST_VALUES)
    async with app.running():
        yield [Route("/mcp", bounded)]  # a `Mount` would redirect `/mcp` to `/mcp/`, which clients do not follow


def _key(scope: Scope) -> ServerKey:
    key: ServerKey = scope[KEY]
    return key


def _require(scope: Scope, right: Right) -> None:
    """Refuse a call of a tool.

    Raises:
        NotAllowed: The key lacks the right that the tool needs.
    """
    try:
        _key(scope).require(right)
    except ApiError as error:
        raise NotAllowed(error.message) from None
