"""Keys of the server: who sends a request, and what it may do."""

import base64
import hashlib
import os
import secrets
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from rlm_broker.errors import ConfigurationError
from rlm_broker.hosting.owner import Owner
from rlm_broker.models.model import FROM_ENVIRONMENT
from rlm_broker.service.errors import ApiError
from rlm_broker.service.settings import RIGHTS, KeySettings, Right

KEY_BYTES = 24
"""Random bytes of a key that the server makes."""
LEAST_KEY_CHARS = 16
"""Characters of a key below which it could be guessed."""


@dataclass(frozen=True, slots=True)
class Key:
    """A key, without its text.

    Attributes:
        owner: Owner of what is made with it.
        rights: What it may do.
    """

    owner: Owner
    rights: frozenset[Right]

    def require(self, right: Right) -> None:
        """Refuse a request that the key may not make.

        Raises:
            ApiError: 403.
        """
        if right not in self.rights:
            raise ApiError(403, f"this key lacks the right {right!r}", code="not_allowed")

    def require_one_of(self, *rights: Right) -> None:
        """Refuse a request that needs one of these rights, if the key has none of them.

        Raises:
            ApiError: 403.
        """
        if not self.rights.intersection(rights):
            said = " and ".join(repr(right) for right in rights)
            raise ApiError(403, f"this key lacks the rights {said}: one of them is needed", code="not_allowed")


class Keys:
    """All keys of the server. Their texts are forgotten: a request is found by the digest of what it sends.

    Args:
        keys: Pairs of a key and its text.

    Raises:
        ConfigurationError: A text is too short, or two keys have the same one.
    """

    def __init__(self, keys: Iterable[tuple[Key, str]]) -> None:
        self._keys: dict[bytes, Key] = {}
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
        """Return the keys that the settings name.

        Raises:
            ConfigurationError: A variable does not exist, or a key cannot be used.
        """
        return cls((_key_of(name, each), _text_of(name, each)) for name, each in settings.items())

    @classmethod
    def made(cls) -> tuple["Keys", str]:
        """Make one key with all rights; return it with its text."""
        text = f"rlm-{secrets.token_urlsafe(KEY_BYTES)}"
        return cls([(Key(Owner("default"), RIGHTS), text)]), text

    def authenticated(self, authorization: str | None) -> Key:
        """Return the key of a request.

        A key is also taken as the password of `Basic`: clients without a place for headers, such as SandboxFusion's,
        send that for an address http://:KEY@HOST or a line of ~/.netrc.

        Args:
            authorization: Value of its header `Authorization`.

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


def _key_of(name: str, settings: KeySettings) -> Key:
    models = None if settings.models is None else frozenset(settings.models)
    return Key(Owner(name, models, settings.limits, settings.usd_a_day), frozenset(settings.rights))


def _text_of(name: str, settings: KeySettings) -> str:
    variable = settings.key.removeprefix(FROM_ENVIRONMENT)
    text = os.environ.get(variable, "").strip()
    if not text:
        raise ConfigurationError(f"serve.keys.{name}: the variable {variable} is not set")
    return text


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
