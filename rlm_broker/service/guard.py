"""The first look at each request: its host, its origin and its key."""

import ipaddress
import re
import time
from collections.abc import Callable, Iterable
from typing import Final

from starlette.requests import Request
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from rlm_broker.service.errors import ApiError
from rlm_broker.service.keys import Key, Keys
from rlm_broker.watch.conventions import checked_traceparent, traceparent

OPEN_PATHS: Final = frozenset({"/health", "/ready", "/viewer", "/viewer/"})
"""Paths that need no key: whether the server lives, and the page of the viewer, whose data needs one."""
KEY: Final = "rlm_broker.key"
"""Name in the scope under which the key of a request stands."""
LEFT: Final = 499
"""Status under which a request is counted that got no answer because its client had left, as nginx has it."""
_HOST: Final = re.compile(r"(?:\[(?P<bracketed>[0-9a-f:.]+)\]|(?P<name>[a-z0-9._-]+))(?::[0-9]{0,5})?")
"""A `Host` header, as a whole. A part that is not read would let the name of another page in."""
LOCAL_NAMES: Final = frozenset({"localhost", "127.0.0.1", "::1"})


class Guard:
    """Refuses requests that come from a web page of another origin, or without a key, before their bodies are read.

    A page that a browser shows must start no run. It could send requests to a port of this machine in two ways, and
    both are refused: directly, with its own `Origin`, and by a name of its own that leads to this machine (DNS
    rebinding), with that name as `Host`. No header of CORS is ever sent.

    Args:
        app: Application behind it.
        keys: Keys of the server.
        hosts: Names under which clients may reach it, besides loopback and addresses in numbers.
        on_response: Called with the route, the status and the seconds of each request that has ended.
    """

    def __init__(
        self,
        app: ASGIApp,
        keys: Keys,
        hosts: Iterable[str] = (),
        *,
        on_response: Callable[[str, int, float], None] | None = None,
    ) -> None:
        self._app = app
        self._keys = keys
        self._hosts = LOCAL_NAMES | {host.lower() for host in hosts}
        self._on_response = on_response

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass a request on, or answer it with an error."""
        if scope["type"] == "websocket":
            await send({"type": "websocket.close", "code": 1008})
            return
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        traceparent.set(checked_traceparent(Request(scope).headers.get("traceparent")))
        started, status = time.monotonic(), LEFT

        async def watched(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
            await send(message)

        try:
            try:
                self._check(scope)
            except ApiError as error:
                await error.response()(scope, receive, watched)
                return
            await self._app(scope, receive, watched)
        except Exception:
            status = 500 if status == LEFT else status
            raise
        finally:
            if self._on_response is not None:
                route = scope.get("route")
                self._on_response(getattr(route, "path", "other"), status, time.monotonic() - started)

    def _check(self, scope: Scope) -> None:
        request = Request(scope)
        told = request.headers.getlist("host")
        name = _name_of(told[0]) if len(told) == 1 else None
        if name is None or (name not in self._hosts and not _is_address(name)):
            shown = ", ".join(told)[:100]
            raise ApiError(403, f"the server has no name {shown!r}: add it to serve.hosts", code="host")
        origin = request.headers.get("origin")
        is_other = origin is not None and origin.partition("://")[2].lower() != request.headers.get("host", "").lower()
        if is_other or request.headers.get("sec-fetch-site") in ("cross-site", "same-site"):
            raise ApiError(403, "requests of web pages of other origins are refused", code="origin")
        path = scope["path"].removeprefix(scope.get("root_path", ""))
        if path not in OPEN_PATHS:
            scope[KEY] = self._keys.authenticated(request.headers.get("authorization"))


def key_of(request: Request) -> Key:
    """Return the key that a request was sent with."""
    key: Key = request.scope[KEY]
    return key


def _name_of(host: str) -> str | None:
    """Return the name in a `Host` header, without its port and brackets; None if the header is none."""
    matched = _HOST.fullmatch(host.strip().lower())
    return matched and (matched["bracketed"] or matched["name"])


def _is_address(host: str) -> bool:
    """Whether a host is an address in numbers: no page can make the browser believe that one is its own."""
    try:
        ipaddress.ip_address(host)
    except ValueError:
        return False
    return True
