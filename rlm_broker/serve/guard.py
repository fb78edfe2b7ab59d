"""The first look at each request: its host, its origin and its key, and the rights of that key."""

import base64
import hashlib
import ipaddress
import os
import re
import secrets
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Final

from starlette.requests import Request
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from rlm_broker.errors import ConfigurationError
from rlm_broker.serve.errors import ApiError
from rlm_broker.serve.hosting.owner import Owner
from rlm_broker.serve.settings import RIGHTS, KeySettings, Right
from rlm_broker.watch.conventions import continue_trace

KEY_BYTES = 24
"""Random bytes of a key made by the server."""
ID_BYTES = 8
"""Random bytes of the id of a request."""
LEAST_KEY_CHARS = 16
"""Characters of a key below which it could be guessed."""


@dataclass(frozen=True, slots=True)
class ServerKey:
    """A key, without its text.

    Attributes:
        owner: Owner of what is made with it.
        rights: What it may do.
    """

    owner: Owner
    rights: frozenset[Right]

    def require(self, *rights: Right) -> Owner:
        """Return the owner. Refuse a request that needs one of these rights, if the key has none of them.

        Raises:
            ApiError: 403.
        """
        if not self.rights.intersection(rights):
            said = "rights " if len(rights) > 1 else "right "
            said += " and ".join(map(repr, rights)) + (": one of them is needed" if len(rights) > 1 else "")
            raise ApiError(403, f"this key lacks the {said}", code="not_allowed")
        return self.owner


class Keys:
    """All keys of the server. Their texts are forgotten: a request is found by the digest of what it sends.

    Raises:
        ConfigurationError: A text is too short, or two keys have the same one.
    """

    def __init__(self, keys: Iterable[tuple[ServerKey, str]]) -> None:
        self._keys: dict[bytes, ServerKey] = {}
        for key, text in keys:
            if len(text) < LEAST_KEY_CHARS:
                raise ConfigurationError(
                    f"the key {key.owner.name!r} has {len(text)} characters: give at least {LEAST_KEY_CHARS}"
                )
            if (digest := _digest(text)) in self._keys:
                raise ConfigurationError(f"the key {key.owner.name!r} is that of another one: give each its own")
            self._keys[digest] = key

    @classmethod
    def of(cls, settings: Mapping[str, KeySettings]) -> "Keys":
        """Return the keys named in the settings.

        Raises:
            ConfigurationError: A variable does not exist, or a key cannot be used.
        """
        keys = []
        for name, each in settings.items():
            variable = each.key.removeprefix("env:")
            text = os.environ.get(variable, "").strip()
            if not text:
                raise ConfigurationError(f"serve.keys.{name}: the variable {variable} is not set")
            models = None if each.models is None else frozenset(each.models)
            owner = Owner(name, models, each.limits, each.usd_a_day)
            keys.append((ServerKey(owner, frozenset(each.rights)), text))
        return cls(keys)

    @classmethod
    def made(cls) -> tuple["Keys", str]:
        """Make one key with all rights; return it with its text."""
        text = f"rlm-{secrets.token_urlsafe(KEY_BYTES)}"
        return cls([(ServerKey(Owner("default"), RIGHTS), text)]), text

    def authenticated(self, authorization: str | None) -> ServerKey:
        """Return the key of a request.

        A key is also taken as the password of `Basic`: clients without a place for headers, such as SandboxFusion's,
        send that for an address http://:KEY@HOST or a line of ~/.netrc.

        Raises:
            ApiError: 401: there is no key, or no such key.
        """
        scheme, _, text = (authorization or "").partition(" ")
        text = text.strip()
        if scheme.lower() == "basic":
            text = _password_of(text)
        elif scheme.lower() != "bearer":
            text = ""
        if not text:
            raise _unauthorized("give a key of this server in the header `Authorization: Bearer KEY`")
        key = self._keys.get(_digest(text))
        if key is None:
            raise _unauthorized("this is not a key of this server")
        return key


def _password_of(credentials: str) -> str:
    """Return the password in the credentials of `Basic`; "" if they are not valid."""
    try:
        return base64.b64decode(credentials, validate=True).decode().partition(":")[2]
    except ValueError:
        return ""


def _digest(text: str) -> bytes:
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).digest()


def _unauthorized(message: str) -> ApiError:
    return ApiError(401, message, code="invalid_api_key", headers={"www-authenticate": "Bearer"})


OPEN_PATHS: Final = frozenset({"/", "/health", "/ready", "/viewer", "/viewer/"})
"""Paths that need no key: whether the server lives, and the page of the viewer, whose data needs one."""
KEY: Final = "rlm_broker.key"
"""Name in the scope under which the key of a request stands."""
REQUEST_ID: Final = "rlm_broker.request"
"""Name in the scope of the random id of a request, for its answer and the log."""
LEFT: Final = 499
"""Status of a request without an answer, whose client had left, as nginx has it."""
_HOST: Final = re.compile(r"(?:\[(?P<bracketed>[0-9a-f:.]+)\]|(?P<name>[a-z0-9._-]+))(?::[0-9]{0,5})?")
"""A `Host` header, as a whole. An unread part would let the name of another page in."""
LOCAL_NAMES: Final = frozenset({"localhost", "127.0.0.1", "::1"})


class Guard:
    """Refuses requests from a web page of another origin, or without a key, before their bodies are read.

    A page in a browser must start no run. It could send requests to a port of this machine in two ways, and
    both are refused: directly, with its own `Origin`, and by a name of its own that leads to this machine (DNS
    rebinding), with that name as `Host`. No header of CORS is ever sent.

    Args:
        app: Application behind it.
        keys: Keys of the server.
        hosts: Names under which clients may reach it, besides loopback and addresses in numbers.
        open_paths: Paths that need no key.
        on_response: Called with the route, the status and the seconds of each ended request.
    """

    def __init__(
        self,
        app: ASGIApp,
        keys: Keys,
        hosts: Iterable[str] = (),
        *,
        open_paths: frozenset[str] = OPEN_PATHS,
        on_response: Callable[[str, int, float], None] | None = None,
    ) -> None:
        self._app = app
        self._keys = keys
        self._hosts = LOCAL_NAMES | {host.lower() for host in hosts}
        self._open_paths = open_paths
        self._on_response = on_response

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass a request on, or answer it with an error."""
        if scope["type"] == "websocket":
            await send({"type": "websocket.close", "code": 1008})
            return
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        continue_trace(Request(scope).headers.get("traceparent"))
        scope[REQUEST_ID] = f"req_{secrets.token_hex(ID_BYTES)}"
        started, status = time.monotonic(), LEFT

        async def watched(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                message["headers"] = [*message.get("headers", ()), (b"x-request-id", scope[REQUEST_ID].encode())]
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
        if path not in self._open_paths:
            scope[KEY] = self._keys.authenticated(request.headers.get("authorization"))


def key_of(request: Request) -> ServerKey:
    """Return the key of a request."""
    key: ServerKey = request.scope[KEY]
    return key


def _name_of(host: str) -> str | None:
    """Return the name in a `Host` header, without its port and brackets; None if the header is none."""
    matched = _HOST.fullmatch(host.strip().lower())
    return matched and (matched["bracketed"] or matched["name"])


def _is_address(host: str) -> bool:
    """Whether a host is an address in numbers: no page can pass one off as its own."""
    try:
        ipaddress.ip_address(host)
    except ValueError:
        return False
    return True
