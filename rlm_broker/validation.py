"""What is wrong with given values, in words: for a model, and for a user."""

import difflib
from collections.abc import Iterable

import pydantic

MOST = 10
"""Told at a time: a long list may be wrong in each of its places."""

MANY = 1_000
"""Mistakes beyond which none is named: pydantic describes all of them at once, at 4 microseconds each."""


def complaints(error: pydantic.ValidationError, whole: str) -> str:
    """Each place and what is wrong with it; `whole` stands for the value itself."""
    if (count := error.error_count()) > MANY:
        return f"{whole}: {count:,} values are not of the type that is wanted"
    found = error.errors(include_url=False)[:MOST]
    return "; ".join(f"{'.'.join(map(str, item['loc'])) or whole}: {item['msg']}" for item in found)


def shown(name: str) -> str:
    """Return a name as it is, or quoted with escapes if it holds what a terminal obeys."""
    return name if name.isprintable() else repr(name)


def suggestion(name: str, known: Iterable[str]) -> str:
    """End a sentence about an unknown name: with the known one that is most like it, or with all of them."""
    return did_you_mean(name, known := list(known)) or f"; there are: {', '.join(known)}"


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """End a sentence about an unknown name with the known one that is most like it, if there is one."""
    close = difflib.get_close_matches(name, list(known), 1)
    return f"; did you mean {close[0]}?" if close else ""
