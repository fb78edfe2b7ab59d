"""Secrets, taken out of text that is shown or written down: those that are known, and what looks like one."""

import os
import re
from collections.abc import Iterable, Mapping
from dataclasses import fields, is_dataclass, replace
from typing import Any

REDACTED = "[redacted]"
PATTERN = re.compile(
    r"sk-[A-Za-z0-9_-]{16,}|Bearer [A-Za-z0-9._-]{16,}|(?i:api[_-]?key|password)\s*[=:]\s*[A-Za-z0-9+/._-]{8,}"
)
"""Text that looks like a key or a password, wherever it comes from."""
_WORDS = ("password", "apikey", "api_key", "api-key")
"""Words that `PATTERN` finds in any case."""
_CREDENTIALS = re.compile(r"(?<=://)[^\s/@]{1,1024}@")
_NAME = re.compile(r"(_|\A|-)(KEY|TOKEN|SECRET|AUTHORIZATION)\Z|HEADER", re.IGNORECASE)
_MIN_SECRET_CHARS = 6
"""Characters of the shortest known secret. A shorter value is not one, and hiding every "1" would garble the text."""
SLICE_CHARS = 1 << 16
"""Characters searched in one call, which takes 3 ms. The search keeps the interpreter's lock: one call for 16 million
characters would stop all other threads, and so the event loop, for 0.7 s."""
LONGEST_CHARS = 1 << 19
"""Characters of the longest text in an event. Model code can print texts of which each megabyte takes 70 ms to search,
on the event loop: beyond, the middle is left out."""
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


def without_credentials(text: str) -> str:
    """Replace user names and passwords in addresses, such as that of a private index."""
    return _CREDENTIALS.sub(f"{REDACTED}@", text)


def redacted(value: Any) -> Any:
    """Return a value of an event without what looks like a secret: the same object where there is nothing to replace.

    The middle of a text of more than `LONGEST_CHARS` is left out.
    """
    if isinstance(value, str):
        return redact(value if len(value) <= LONGEST_CHARS else _without_middle(value))
    if isinstance(value, Mapping):
        return _changed(value, {key: redacted(each) for key, each in value.items()})
    if isinstance(value, list | tuple):
        shown = [redacted(each) for each in value]
        same = all(new is old for new, old in zip(shown, value, strict=True))
        return value if same else type(value)(shown)
    if is_dataclass(value) and not isinstance(value, type):
        known = {field.name: getattr(value, field.name) for field in fields(value)}
        changes = {name: new for name, old in known.items() if (new := redacted(old)) is not old}
        return replace(value, **changes) if changes else value
    return value


def _without_middle(text: str) -> str:
    half = LONGEST_CHARS // 2
    return f"{text[:half]}... [{len(text) - 2 * half:,} characters left out] ...{text[-half:]}"


def _changed(value: Mapping[Any, Any], shown: dict[Any, Any]) -> Mapping[Any, Any]:
    return value if all(shown[key] is each for key, each in value.items()) else shown


def _without_patterns(text: str) -> str:
    if _may_have_one(text):
        return _replaced(text)
    return text


def _may_have_one(text: str) -> bool:
    """Look for the words that a pattern begins with: 20 times as fast as the patterns, for text that has none."""
    if "sk-" in text or "Bearer " in text:
        return True
    lower = text.lower()
    return any(word in lower for word in _WORDS) or len(lower) != len(text)  # such as of a dotted capital I


def _replaced(text: str) -> str:
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
