"""Sentences on wrong values and unknown names, for models and for users."""

import difflib
from collections.abc import Iterable

import pydantic

MOST = 10
"""Mistakes named in one sentence; further ones are left out, because a long list may be wrong in each of its places."""

MANY = 1_000
"""Mistakes above which only their number is given: pydantic describes all of them at once, at 4 microseconds each."""


def complaints(error: pydantic.ValidationError, whole: str) -> str:
    """Return each place and what is wrong with it, as one line.

    Args:
        error: Error of pydantic.
        whole: Word that stands for the value itself, such as "it".
    """
    if (count := error.error_count()) > MANY:
        return f"{whole}: {count:,} values are not of the type that is wanted"
    found = error.errors(include_url=False)[:MOST]
    return "; ".join(f"{'.'.join(map(str, item['loc'])) or whole}: {item['msg']}" for item in found)


def shown(name: str) -> str:
    """Return a name unchanged, or quoted with escapes if it has characters that could steer a terminal."""
    return name if name.isprintable() else repr(name)


def suggestion(name: str, known: Iterable[str]) -> str:
    """Return the end of a sentence about an unknown name: the known name most like it, or all known names."""
    return did_you_mean(name, known := list(known)) or f"; there are: {', '.join(known)}"


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """Return the end of a sentence about an unknown name: the known name most like it, or an empty text."""
    close = difflib.get_close_matches(name, list(known), 1)
    return f"; did you mean {close[0]}?" if close else ""
