"""Amounts written with a unit: sizes such as `64MB`, times such as `1h30m`."""

import re
from collections.abc import Callable
from decimal import Decimal

_NUMBER = r"[0-9]+(?:\.[0-9]+)?"
_SIZE = rf"({_NUMBER})\s*(?:([KMGT])(?:I?B)?|B)"
_POWERS = {None: 0, "K": 1, "M": 2, "G": 3, "T": 4}
_SECONDS = {"d": Decimal(86_400), "h": Decimal(3_600), "m": Decimal(60), "s": Decimal(1), "ms": Decimal("0.001")}
_TIME = r"\s*".join(rf"(?:({_NUMBER})\s*{unit})?" for unit in _SECONDS)
MOST_CHARS = 40
"""Longest amount in characters. No limit needs more, and reading longer text takes longer."""


def in_bytes(text: str) -> int | None:
    """Return a size such as "64MB", "64MiB", "1.5g" or "512B" in bytes, or None for other text. K, M, G and T are
    powers of 1024, as memory is counted. Fractions of a byte are dropped."""
    found = re.fullmatch(_SIZE, text, re.IGNORECASE)
    if found is None:
        return None
    number, prefix = found.groups()
    return int(Decimal(number) * 1024 ** _POWERS[prefix and prefix.upper()])


def in_seconds(text: str) -> float | None:
    """Return a time such as "90s", "1h30m" or "250ms" in seconds, or None for other text. The units are d, h, m
    (minutes), s and ms, each once, larger ones first."""
    found = re.fullmatch(_TIME, text, re.IGNORECASE)
    if found is None or not any(found.groups()):
        return None
    parts = zip(found.groups(), _SECONDS.values(), strict=True)
    return float(sum((Decimal(number) * seconds for number, seconds in parts if number), Decimal(0)))


_UNITS: dict[str, Callable[[str], float | None]] = {"_bytes": in_bytes, "_s": in_seconds}
"""End of an amount's name → the function that reads its text."""


def amount(name: str, value: object) -> object:
    """Convert text with a unit to the unit at the end of the amount's name, `_bytes` or `_s`. Any other value, and
    unreadable text, is returned unchanged."""
    for end, read in _UNITS.items():
        if name.endswith(end) and isinstance(value, str) and len(value) <= MOST_CHARS:
            found = read(value.strip())
            return value if found is None else found
    return value
