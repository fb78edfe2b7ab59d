"""The server of the protocol as an ASGI app, for a server that knows who asks."""

import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable, MutableMapping
from http import HTTPStatus
from typing import Any, Final

from mcp.server.auth.middleware.bearer_auth import AuthenticatedUser
from mcp.server.auth.provider import AccessToken
from mcp.server.context import ServerRequestContext
from mcp.server.streamable_http_manager import StreamableHTTPSessionManager

from rlm_broker.hosting.owner import Owner
from rlm_broker.hosting.repls import HeldRepls
from rlm_broker.hosting.runs import HostedRuns
from rlm_broker.mcp.forms import Right
from rlm_broker.mcp.server import Call, server_of
from rlm_broker.mcp.sessions import Sessions
from rlm_broker.mcp.work import Work
from rlm_broker.rlm import RLM

Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]

MAX_BODY_BYTES: Final = 64 << 20
"""Bytes of one request, and so of a context in it."""
MOST_SESSIONS: Final = 10_000
"""Sessions of clients of protocol 2025-11-25 of all owners at the same time. Those of 2026-07-28 have none."""
SESSION: Final = b"mcp-session-id"
VERSION: Final = b"mcp-protocol-version"


class McpApp:
    """An ASGI app that serves the tools by streamable HTTP, in both eras of the protocol, at any path.

    The server in front of it has checked the key, Host and Origin already. Enter `running` before the first request.

    Args:
        work: The work of the tools.
        owner_of: Returns the owner of a request, from its ASGI scope.
        require: Raises a `RlmBrokerError` if the one who asks lacks a right.
        block_timeout_s: Compute time of a block in seconds, which the tool tells.
        max_body_bytes: Bytes of one request at most.
    """

    def __init__(
        self,
        work: Work,
        owner_of: Callable[[Scope], Owner],
        require: Callable[[Scope, Right], object] | None,
        *,
        block_timeout_s: float,
        max_body_bytes: int,
    ) -> None:
        self._owner_of = owner_of
        self._require = require
        self._sessions = Sessions()

        async def at_once(_call: Call) -> Work:
            return work

        server = server_of(
            at_once,
            self._owner_of_call,
            with_paths=False,
            block_timeout_s=block_timeout_s,
            require=self._require_of_call,
        )
        self._manager = StreamableHTTPSessionManager(
            server, max_request_body_size=max_body_bytes, max_sessions=MOST_SESSIONS
        )

    @contextlib.asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """Serve requests within the block. It can be entered once."""
        async with self._manager.run():
            yield

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request. The owner is also the user of its session, which is refused to all other owners.

        Raises:
            Busy: The owner has too many sessions.
        """
        owner = self._owner_of(scope)
        user = AuthenticatedUser(AccessToken(token="", client_id=owner.name, scopes=[]))
        headers = dict(scope["headers"])
        if SESSION not in headers and VERSION not in headers:  # only such a request begins a session
            self._sessions.require_room(owner)

        async def noting(message: MutableMapping[str, Any]) -> None:
            if message["type"] == "http.response.start" and message["status"] < HTTPStatus.BAD_REQUEST:
                session = dict(message.get("headers", ())).get(SESSION) or headers.get(SESSION)
                if session is not None:
                    note = self._sessions.end if scope["method"] == "DELETE" else self._sessions.use
                    note(owner, session.decode("latin-1"))
            await send(message)

        await self._manager.handle_request({**scope, "user": user}, receive, noting)

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
    max_body_bytes: int = MAX_BODY_BYTES,
) -> McpApp:
    """Return an app of the tools, to be mounted at a path such as /mcp.

    Args:
        rlm: The open `RLM` that answers.
        runs: Runs of all owners.
        repls: REPLs of all owners.
        owner_of: Returns the owner of a request, from its ASGI scope.
        require: Raises a `RlmBrokerError`, such as `NotAllowed`, if the one who asks lacks the right of a tool.
        max_body_bytes: Bytes of one request at most.
    """
    work = Work(rlm, runs, repls)
    return McpApp(work, owner_of, require, block_timeout_s=rlm.limits.block_timeout_s, max_body_bytes=max_body_bytes)
