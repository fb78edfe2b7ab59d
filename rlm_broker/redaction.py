"""Secrets, taken out of text that is shown or written down: those that are known, and what looks like one."""

import os
import re
from collections.abc import Iterable, Mapping
from typing import Any

REDACTED = "[redacted]"
PATTERN = re.compile(
    r"sk-[A-Za-z0-9_-]{16,}|Bearer [A-Za-z0-9._-]{16,}|(?i:api[_-]?key|password)\s*[=:]\s*[A-Za-z0-9+/._-]{8,}"
)
"""Text that looks like a key or a password, wherever it comes from."""
_NAME = re.compile(r"(_|\A|-)(KEY|TOKEN|SECRET|AUTHORIZATION)\Z|HEADER", re.IGNORECASE)
_MIN_SECRET_CHARS = 6
"""Characters of the shortest known secret. A shorter value is not one, and hiding every "1" would garble the text."""
SLICE_CHARS = 1 << 16
"""Characters searched in one call, which takes 3 ms. The search keeps the interpreter's lock: one call for 16 million
characters would stop all other threads, and so the event loop, for 0.7 s."""
LONGEST_START_CHARS = 1 << 12
"""Characters beyond a slice in which a secret that began in the slice must be recognisable."""


def is_secret_name(name: str) -> bool:
    """Tell whether a variable, option or header of this name holds a secret; headers as a whole count as one."""
    return _NAME.search(name) is not None


def secrets_in(value: Any, name: str = "") -> list[str]:
    """List the secrets among options: texts that are there under a secret name, at any depth.

    Each word of such a text is one, too: a header may hold its secret after a word such as Bearer.

    Args:
        name: That `value` has.
    """
    if isinstance(value, Mapping):
        within = name if is_secret_name(name) else None
        return [secret for key, inner in value.items() for secret in secrets_in(inner, within or str(key))]
    return [value, *value.split()] if isinstance(value, str) and is_secret_name(name) else []


def secrets_of_environment() -> list[str]:
    """List the values of all environment variables with a secret name."""
    return [value for name, value in os.environ.items() if is_secret_name(name)]


def redact(text: str, secrets: Iterable[str] = ()) -> str:
    """Replace secrets by `[redacted]`: those given, and what looks like one.

    Args:
        secrets: Those of fewer than 6 characters are left as they are.
    """
    for secret in sorted(set(secrets), key=len, reverse=True):  # one may be part of another
        if len(secret) >= _MIN_SECRET_CHARS:
            text = text.replace(secret, REDACTED)
    return _without_patterns(text)


def _without_patterns(text: str) -> str:
    pieces: list[str] = []
    done = 0
    for start in range(0, len(text), SLICE_CHARS):
        end = start + SLICE_CHARS
        for found in PATTERN.finditer(text, max(start, done), min(len(text), end + LONGEST_START_CHARS)):
            if found.start() >= end:
                break
            if found.start() < done:
                continue
            whole = PATTERN.match(text, found.start())  # as long as it is, also beyond the slice
            assert whole is not None
            pieces += (text[done : found.start()], REDACTED)
            done = whole.end()
    return "".join([*pieces, text[done:]]) if pieces else text
