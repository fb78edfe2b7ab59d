"""Values that cross to or from a REPL unchanged: what JSON can hold.

JSON has no NaN, no bytes, no sets, no dates and no keys but text. Encoders turn these into null, text and lists without
a word, so they are refused before one is used.
"""

import builtins
import keyword
import math
import os
import re
from collections.abc import Iterable, Mapping
from typing import Final

from rlm_broker.errors import ConfigurationError
from sandbox_worker.wire.names import CONTEXT, HISTORY, RESERVED

MAX_NESTING: Final = 200
"""Containers inside containers. Recursive code reads that much anywhere; Python's own limit is near 1,000."""

_NUMBERED: Final = re.compile(rf"({CONTEXT}|{HISTORY})_\d+")
_MAX_INT_BITS: Final = 14_000  # below the 4,300 digits beyond which Python refuses to read a number
_PLAIN: Final = "str, dict, list, int, float, bool and None"

_Place = tuple["_Place", object] | None
"""The keys that lead to a value, from the last to the first."""


def problem_with(value: object, whole: str) -> str | None:
    """Say what in `value` JSON would lose, change or never end with, and where it is. None if there is nothing.

    Args:
        whole: Name of the value, for the sentence; "context" is the one that may also be a path.
    """
    try:
        _look(value, whole, None, ())
    except _Problem as problem:
        return str(problem)
    return None


def require_plain(values: object) -> None:
    """Refuse values that would not arrive in a REPL as they are.

    Raises:
        ConfigurationError: One would not, or has a name that it cannot have.
    """
    if not isinstance(values, Mapping):
        raise ConfigurationError(f"values are a dict from name to value, and not {type(values).__name__}")
    for name, value in values.items():
        require_name(name, "a value")
        if problem := problem_with(value, f"the value {name}"):
            raise ConfigurationError(problem)


def require_names(tools: Iterable[object]) -> None:
    """Refuse what is no list of names, such as the functions themselves.

    Raises:
        ConfigurationError: It is something else, or has a name that no tool can have.
    """
    names = list(tools) if isinstance(tools, Iterable) else []
    if isinstance(tools, str) or not isinstance(tools, Iterable) or not all(isinstance(name, str) for name in names):
        raise ConfigurationError("tools are names of functions, as a list: the handler answers their calls")
    for name in names:
        require_name(name, "a tool")


def require_name(name: object, what: str) -> None:
    """Refuse a name under which a REPL cannot give its code something.

    Args:
        what: That is to have the name: "a tool" or "a value".

    Raises:
        ConfigurationError: It is no name in Python, or a REPL has something else under it.
    """
    if not isinstance(name, str) or not name.isidentifier() or keyword.iskeyword(name):
        raise ConfigurationError(f"{what} cannot be called {name!r}: that is no name in Python")
    if name in RESERVED or _NUMBERED.fullmatch(name) or name.startswith("__") or hasattr(builtins, name):
        raise ConfigurationError(f"{what} cannot be called {name!r}: that name is taken in a REPL")


class _Problem(Exception):
    """The sentence."""


def _look(value: object, whole: str, place: _Place, around: tuple[int, ...]) -> None:
    if isinstance(value, dict):
        inside: Iterable[tuple[object, object]] = value.items()
    elif isinstance(value, list | tuple):
        inside = enumerate(value)
    elif problem := _problem_of_leaf(value, whole):
        raise _Problem(f"{_shown(whole, place)} is {problem}")
    else:
        return
    if id(value) in around:
        raise _Problem(f"{_shown(whole, place)} contains itself")
    if len(around) >= MAX_NESTING:
        raise _Problem(f"{_shown(whole, place)[:60]}... is nested deeper than {MAX_NESTING} levels")
    around = (*around, id(value))
    is_context = whole == CONTEXT
    for key, child in inside:
        if type(key) is not str and isinstance(value, dict) and not isinstance(key, str):
            keys = "the keys of a context are str" if is_context else "keys are str"
            raise _Problem(f"{_shown(whole, place)} has the key {key!r:.60}, {_a(key)}: {keys}")
        if not is_context and isinstance(key, str) and (problem := _problem_of_text(key)):
            raise _Problem(f"{_shown(whole, place)} has the key {key!r:.60}, {problem}")
        if type(child) is not str or not is_context:  # what most of a large context is
            _look(child, whole, (place, key), around)


def _problem_of_leaf(value: object, whole: str) -> str | None:
    is_context = whole == CONTEXT
    match value:
        case None | bool():
            return None
        case str():
            return None if is_context else _problem_of_text(value)
        case int():
            too_long = value.bit_length() > _MAX_INT_BITS
            return "a number of more than 4,200 digits: hand it in as str" if too_long else None
        case float():
            return None if math.isfinite(value) else f"{value}, which JSON does not have: use None, or a str"
        case bytes() | bytearray() | memoryview():
            otherwise = ", or hand in a Path" if is_context else ""
            return f"of type {type(value).__name__}: decode them to str first{otherwise}"
        case os.PathLike() if is_context:
            return f"{_a(value)}: a Path is a context only by itself; several are Paths([...])"
        case _:
            made_of = f"a context is made of {_PLAIN}, or is a Path" if is_context else f"plain values are {_PLAIN}"
            return f"{_a(value)}; {made_of}"


def _problem_of_text(text: str) -> str | None:
    """A context is stored in another way, which keeps lone surrogates."""
    try:
        text.isascii() or str.encode(text)
    except UnicodeEncodeError as error:
        half = f"{text[error.start]!r} at {error.start:,}"
        return f"text with a lone surrogate, {half}: text.encode('utf-8', 'replace').decode() has none"
    return None


def _shown(whole: str, place: _Place) -> str:
    keys: list[str] = []
    while place is not None:
        place, key = place
        keys.append(f"[{key!r:.60}]")
    return whole + "".join(reversed(keys))


def _a(value: object) -> str:
    name = type(value).__name__
    return f"an {name}" if name[0] in "aeiouAEIOU" else f"a {name}"
