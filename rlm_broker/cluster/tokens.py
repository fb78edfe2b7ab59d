"""Join tokens of a cluster, and the secrets with which a node joins again. Only hashes are kept."""

import hashlib
import hmac
import secrets
import time
from collections.abc import Callable
from dataclasses import dataclass

from rlm_broker.errors import ConfigurationError

TOKEN_BYTES = 32
LEAST_CHARS = 32
"""Minimum characters of a token that the caller chose."""
MOST_PASSES = 8_192
"""Maximum valid tokens and secrets. Of more, the secret is forgotten that was shown longest ago."""


@dataclass
class Pass:
    """Permission that a valid token gives.

    Attributes:
        digest: SHA-256 of the token.
        uses: How often it may still be used; None: any number of times.
        until: Time of the clock at which it expires; None: never.
        node: The node whose secret it is; None: it is a join token.
    """

    digest: bytes
    uses: int | None = None
    until: float | None = None
    node: str | None = None


class Tokens:
    """The join tokens and the secrets of one cluster.

    Args:
        now: Clock for the time at which tokens expire.
    """

    def __init__(self, now: Callable[[], float] = time.monotonic) -> None:
        self._now = now
        self._passes: list[Pass] = []

    def make(self, *, uses: int | None = None, valid_s: float | None = None) -> str:
        """Return a new random join token.

        Args:
            uses: How many nodes may join with it; None: any number, for example all tasks of a Slurm array.
            valid_s: Seconds after which it expires; None: when the cluster ends.
        """
        token = secrets.token_urlsafe(TOKEN_BYTES)
        self.add(token, uses=uses, valid_s=valid_s)
        return token

    def add(self, token: str, *, uses: int | None = None, valid_s: float | None = None) -> None:
        """Accept a join token that the caller chose, such as one that a secret of Kubernetes has.

        Raises:
            ConfigurationError: The token is too short, is no plain text, or could never be used.
        """
        if len(token) < LEAST_CHARS or not token.isascii() or not token.isprintable():
            raise ConfigurationError(f"a join token must have at least {LEAST_CHARS} printable ASCII characters")
        if uses is not None and uses < 1:
            raise ConfigurationError(f"uses must be at least 1, not {uses}")
        if valid_s is not None and not valid_s > 0:
            raise ConfigurationError(f"valid_s must be above 0, not {valid_s:g}")
        self._keep(Pass(_digest(token), uses, None if valid_s is None else self._now() + valid_s))

    def secret_of(self, node: str) -> str:
        """Return a new secret with which one node may join again. An earlier secret of the node is forgotten."""
        self.forget(node)
        secret = secrets.token_urlsafe(TOKEN_BYTES)
        self._keep(Pass(_digest(secret), node=node))
        return secret

    def forget(self, node: str) -> None:
        """Accept the secret of a node no more."""
        self._passes = [each for each in self._passes if each.node != node]

    def find(self, token: str) -> Pass | None:
        """Return what a token permits, or None if it is wrong, used up or expired.

        The time does not depend on how much of the token is right: its hash is compared with all.
        """
        digest, found = _digest(token), None
        for each in self._passes:
            if hmac.compare_digest(each.digest, digest):
                found = each
        if found is None or found.uses == 0 or (found.until is not None and self._now() >= found.until):
            return None
        return found

    def use(self, found: Pass) -> None:
        """Count one use of a token."""
        if found.uses is not None:
            found.uses -= 1
        if found.node is not None:  # the last shown comes last
            self._passes.remove(found)
            self._passes.append(found)

    def _keep(self, made: Pass) -> None:
        self._passes.append(made)
        if len(self._passes) > MOST_PASSES:
            oldest = next((each for each in self._passes if each.node is not None), self._passes[0])
            self._passes.remove(oldest)


def _digest(token: str) -> bytes:
    return hashlib.sha256(token.encode(errors="surrogatepass")).digest()
