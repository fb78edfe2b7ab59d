"""Names that values and tools may have in a REPL, and what a context is made of: plain values, which JSON holds.

What is not plain crosses with its types, which is the business of `wire.values`.
"""

import builtins
import keyword
import math
import os
import re
from collections.abc import Iterable, Mapping
from typing import Final

from rlm_broker.errors import ConfigurationError, ContextRefused
from sandbox_worker.wire.encoding import MAX_INT_BITS, MAX_NESTING, with_article
from sandbox_worker.wire.names import CONTEXT, HISTORY, RESERVED

_NUMBERED: Final = re.compile(rf"({CONTEXT}|{HISTORY})_\d+")

_Place = tuple["_Place", object] | None
"""The keys that lead to a value, from the last to the first."""


def is_plain(context: object) -> bool:
    """Whether a context is made of what JSON holds without a change, tuples aside.

    Raises:
        ContextRefused: It never ends, is nested too deeply, or has bytes or paths where their content may be meant.
    """
    return _is_plain(context, None, ())


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


def _is_plain(value: object, place: _Place, around: tuple[int, ...]) -> bool:
    if isinstance(value, dict):
        inside: Iterable[tuple[object, object]] = value.items()
    elif isinstance(value, list | tuple):
        inside = enumerate(value)
    else:
        return _is_plain_leaf(value, place)
    if id(value) in around:
        raise ContextRefused(f"{_shown(place)} contains itself")
    if len(around) >= MAX_NESTING:
        raise ContextRefused(f"{_shown(place)[:60]}... is nested deeper than {MAX_NESTING} levels")
    around = (*around, id(value))
    are_plain = True
    for key, child in inside:
        if type(key) is not str and isinstance(value, dict) and not isinstance(key, str):
            are_plain = False
        if type(child) is not str:  # what most of a large context is
            are_plain &= _is_plain(child, (place, key), around)
    return are_plain


def _is_plain_leaf(value: object, place: _Place) -> bool:
    match value:
        case None | bool() | str():
            return True
        case int():
            return value.bit_length() <= MAX_INT_BITS
        case float():
            return math.isfinite(value)
        case bytes() | bytearray() | memoryview() if place is None:
            instead = "decode them to str first, or hand in a stream of them, io.BytesIO(data)"
            raise ContextRefused(f"{_shown(place)} is of type {type(value).__name__}: {instead}")
        case os.PathLike():
            instead = "a Path is a context only by itself; several are Paths([...])"
            raise ContextRefused(f"{_shown(place)} is {with_article(type(value))}: {instead}")
        case _:
            return False


def _shown(place: _Place) -> str:
    keys: list[str] = []
    while place is not None:
        place, key = place
        keys.append(f"[{key!r:.60}]")
    return CONTEXT + "".join(reversed(keys))
