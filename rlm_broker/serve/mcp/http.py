"""The server of the protocol as an ASGI app, for a server that knows who asks.

Theory of operation
-------------------
A client of protocol 2025-11-25 or earlier has a session, which lives on between its requests. The SDK alone knows which
request begins one and when one ends, and bounds the sessions of one manager. So each owner has a manager of its own:
what the SDK counts is what the owner has, and no owner can take the sessions of another.
"""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable, MutableMapping
from typing import Any, Final

from mcp.server.context import ServerRequestContext
from mcp.server.streamable_http_manager import StreamableHTTPSessionManager

from rlm_broker.rlm import RLM
from rlm_broker.serve.hosting.owner import Owner
from rlm_broker.serve.hosting.repls import HeldRepls
from rlm_broker.serve.hosting.runs import HostedRuns
from rlm_broker.serve.mcp.forms import Right
from rlm_broker.serve.mcp.server import SdkCall, server_of
from rlm_broker.serve.mcp.work import Work

Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]

MAX_BODY_BYTES: Final = 64 << 20
"""Bytes of one request for the SDK. The server in front has bounds of its own, which are smaller."""
MOST_SESSIONS: Final = 100
"""Sessions of one owner at the same time; a further one is answered with 503. The SDK ends each that was idle for 30
minutes. Clients of protocol 2026-07-28 have none."""


class McpApp:
    """An ASGI app that serves the tools by streamable HTTP, in both eras of the protocol, at any path.

    The server in front of it has checked the key, Host and Origin already, and bounds the body: the SDK decodes it on
    the loop. Enter `running` before the first request.

    Args:
        work: The work of the tools.
        owner_of: Returns the owner of a request, from its ASGI scope.
        require: Raises a `RlmBrokerError` if the one who asks lacks a right.
        block_timeout_s: Compute time of a block in seconds, which the tool tells.
    """

    def __init__(
        self,
        work: Work,
        owner_of: Callable[[Scope], Owner],
        require: Callable[[Scope, Right], object] | None,
        *,
        block_timeout_s: float,
    ) -> None:
        self._owner_of = owner_of
        self._require = require
        self._managers: dict[str, asyncio.Future[StreamableHTTPSessionManager]] = {}
        self._holding: set[asyncio.Task[None]] = set()
        self._ended = asyncio.Event()

        async def at_once(_call: SdkCall) -> Work:
            return work

        self._server = server_of(
            at_once,
            self._owner_of_call,
            with_paths=False,
            block_timeout_s=block_timeout_s,
            require=self._require_of_call,
        )

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
        manager = await self._manager_of(self._owner_of(scope))
        await manager.handle_request(scope, receive, send)

    async def _manager_of(self, owner: Owner) -> StreamableHTTPSessionManager:
        opened = self._managers.get(owner.name)
        if opened is None:
            opened = self._managers[owner.name] = asyncio.get_running_loop().create_future()
            holding = asyncio.get_running_loop().create_task(self._hold(opened))
            self._holding.add(holding)
        return await asyncio.shield(opened)

    async def _hold(self, opened: "asyncio.Future[StreamableHTTPSessionManager]") -> None:
        """Hold a manager open. Its cancel scope must end in the task in which it began, which no request is."""
        manager = StreamableHTTPSessionManager(
            self._server, max_request_body_size=MAX_BODY_BYTES, max_sessions=MOST_SESSIONS
        )
        async with manager.run():
            opened.set_result(manager)
            await self._ended.wait()

    def _owner_of_call(self, context: ServerRequestContext[Any, Any]) -> Owner:
        return self._owner_of(_scope(context))

    def _require_of_call(self, context: ServerRequestContext[Any, Any], right: Right) -> None:
        if self._require is not None:
            self._require(_scope(context), right)


def _scope(context: ServerRequestContext[Any, Any]) -> Scope:
    """Return the scope of the HTTP request that brought a call."""
    assert context.request is not None
    scope: Scope = context.request.scope
    return scope


def mcp_app(
    rlm: RLM,
    runs: HostedRuns,
    repls: HeldRepls,
    owner_of: Callable[[Scope], Owner],
    *,
    require: Callable[[Scope, Right], object] | None = None,
) -> McpApp:
    """Return an app of the tools, to be mounted at a path such as /mcp.

    Args:
        rlm: The open `RLM` that answers.
        runs: Runs of all owners.
        repls: REPLs of all owners.
        owner_of: Returns the owner of a request, from its ASGI scope.
        require: Raises a `RlmBrokerError`, such as `NotAllowed`, if the one who asks lacks the right of a tool.
    """
    work = Work(rlm, runs, repls)
    return McpApp(work, owner_of, require, block_timeout_s=rlm.limits.block_timeout_s)
