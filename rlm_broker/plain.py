"""Names that values and tools may have in a REPL, and what a context is made of: plain values, which JSON holds.

Other values than contexts are `wire.values`' business: they cross with their types.
"""

import builtins
import keyword
import math
import os
import re
from collections.abc import Iterable, Mapping
from typing import Final

from rlm_broker.errors import ConfigurationError
from sandbox_worker.wire.encoding import MAX_INT_BITS, MAX_NESTING
from sandbox_worker.wire.names import CONTEXT, HISTORY, RESERVED

_NUMBERED: Final = re.compile(rf"({CONTEXT}|{HISTORY})_\d+")
_PLAIN: Final = "str, dict, list, int, float, bool and None"

_Place = tuple["_Place", object] | None
"""The keys that lead to a value, from the last to the first."""


def problem_with(context: object) -> str | None:
    """Say what in a context JSON would lose, change or never end with, and where it is. None if there is nothing."""
    try:
        _look(context, None, ())
    except _Problem as problem:
        return str(problem)
    return None


def require_value_names(values: object) -> None:
    """Refuse what is no dict from name to value.

    Raises:
        ConfigurationError: It is something else, or has a name that no value can have.
    """
    if not isinstance(values, Mapping):
        raise ConfigurationError(f"values are a dict from name to value, and not {type(values).__name__}")
    for name in values:
        require_name(name, "a value")


def require_given(tools: Iterable[object], values: object) -> None:
    """Refuse names of tools, and values by name, that a REPL cannot be given.

    Raises:
        ConfigurationError: One cannot be a name, or is the name of two things.
    """
    require_names(tools)
    require_value_names(values)
    assert isinstance(values, Mapping)
    if both := sorted(map(str, set(tools) & set(values))):
        raise ConfigurationError(f"{', '.join(both)}: a name is that of a tool or of a value, not of both")


def require_names(tools: Iterable[object]) -> None:
    """Refuse what is no list of names, such as the functions themselves.

    Raises:
        ConfigurationError: It is something else, or has a name that no tool can have.
    """
    names = list(tools) if isinstance(tools, Iterable) else []
    is_list = isinstance(tools, Iterable) and not isinstance(tools, str | Mapping)
    if not is_list or not all(isinstance(name, str) for name in names):
        raise ConfigurationError("tools are names of functions, as a list: `answer` answers their calls")
    for name in names:
        require_name(name, "a tool")
    if len(set(names)) < len(names):
        raise ConfigurationError("tools has a name twice: give each once")


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


def require_variables(names: tuple[object, ...]) -> None:
    """Refuse what can be the name of no variable.

    Raises:
        ConfigurationError: One is no name in Python, or there is none.
    """
    if not names:
        raise ConfigurationError("get() takes names of variables: repl.get('rows')")
    for name in names:
        if not isinstance(name, str) or not name.isidentifier() or keyword.iskeyword(name):
            raise ConfigurationError(f"there can be no variable {name!r:.60}: that is no name in Python")


def require_field_names(names: Iterable[object]) -> None:
    """Refuse what can be the name of no argument of `SUBMIT`.

    Raises:
        ConfigurationError: One is no name in Python.
    """
    for name in names:
        if not isinstance(name, str) or not name.isidentifier() or keyword.iskeyword(name):
            raise ConfigurationError(f"a field cannot be called {name!r:.60}: that is no name in Python")


class _Problem(Exception):
    """The sentence."""


def _look(value: object, place: _Place, around: tuple[int, ...]) -> None:
    if isinstance(value, dict):
        inside: Iterable[tuple[object, object]] = value.items()
    elif isinstance(value, list | tuple):
        inside = enumerate(value)
    elif problem := _problem_of_leaf(value):
        raise _Problem(f"{_shown(place)} is {problem}")
    else:
        return
    if id(value) in around:
        raise _Problem(f"{_shown(place)} contains itself")
    if len(around) >= MAX_NESTING:
        raise _Problem(f"{_shown(place)[:60]}... is nested deeper than {MAX_NESTING} levels")
    around = (*around, id(value))
    for key, child in inside:
        if type(key) is not str and isinstance(value, dict) and not isinstance(key, str):
            raise _Problem(f"{_shown(place)} has the key {key!r:.60}, {_a(key)}: the keys of a context are str")
        if type(child) is not str:  # what most of a large context is
            _look(child, (place, key), around)


def _problem_of_leaf(value: object) -> str | None:
    match value:
        case None | bool() | str():
            return None
        case int():
            too_long = value.bit_length() > MAX_INT_BITS
            return "a number of more than 4,200 digits: hand it in as str" if too_long else None
        case float():
            return None if math.isfinite(value) else f"{value}, which JSON does not have: use None, or a str"
        case bytes() | bytearray() | memoryview():
            return f"of type {type(value).__name__}: decode them to str first, or hand in a Path"
        case os.PathLike():
            return f"{_a(value)}: a Path is a context only by itself; several are Paths([...])"
        case _:
            return f"{_a(value)}; a context is made of {_PLAIN}, or is a Path"


def _shown(place: _Place) -> str:
    keys: list[str] = []
    while place is not None:
        place, key = place
        keys.append(f"[{key!r:.60}]")
    return CONTEXT + "".join(reversed(keys))


def _a(value: object) -> str:
    name = type(value).__name__
    return f"an {name}" if name[0] in "aeiouAEIOU" else f"a {name}"
