"""Checks of what a REPL is given: names of tools and values, and contexts made of plain values, which JSON holds.

Other values are transferred with their types, by `wire.values`.
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
"""Keys that lead to a value, as a linked list from the last key to the first. None is the context itself.

So each value costs one tuple, and the text is made only for an error.
"""


def is_plain(context: object) -> bool:
    """Whether JSON holds the context without a change. Tuples count as lists.

    Raises:
        ContextRefused: The context contains itself, is nested too deeply, or is or holds bytes or paths whose content
            is most likely meant.
    """
    return _is_plain(context, None, ())


def require_value_names(values: object) -> None:
    """Refuse values that are not a dict from name to value.

    Raises:
        ConfigurationError: They are of another type, or a name cannot be that of a value.
    """
    if not isinstance(values, Mapping):
        raise ConfigurationError(f"values must be a dict from name to value, not {type(values).__name__}")
    for name in values:
        require_name(name, "a value")


def require_given(tools: Iterable[object], values: object) -> None:
    """Refuse tools and values that a REPL cannot be given.

    Args:
        tools: Names of functions.
        values: Dict from name to value.

    Raises:
        ConfigurationError: A name cannot be used, or is that of a tool and of a value.
    """
    require_names(tools)
    require_value_names(values)
    assert isinstance(values, Mapping)
    require_apart(tools, values)


def require_apart(tools: Iterable[object], values: Iterable[object]) -> None:
    """Refuse a name that is that of a tool and of a value.

    Raises:
        ConfigurationError: There is such a name.
    """
    if both := sorted(map(str, set(tools) & set(values))):
        raise ConfigurationError(f"{', '.join(both)}: a name is that of a tool or of a value, not of both")


def require_names(tools: Iterable[object]) -> None:
    """Refuse tools that are not a list of names, for example the functions themselves.

    Raises:
        ConfigurationError: They are of another type, or a name cannot be that of a tool.
    """
    names = list(tools) if isinstance(tools, Iterable) else []
    is_list = isinstance(tools, Iterable) and not isinstance(tools, str | Mapping)
    if not is_list or not all(isinstance(name, str) for name in names):
        raise ConfigurationError("tools must be a list of names of functions: `answer` answers their calls")
    for name in names:
        require_name(name, "a tool")
    if len(set(names)) < len(names):
        raise ConfigurationError("tools has a name twice: give each once")


def require_name(name: object, what: str) -> None:
    """Refuse a name that a tool or a value cannot have in a REPL.

    Args:
        name: Name to check.
        what: Owner of the name in the error: "a tool" or "a value".

    Raises:
        ConfigurationError: It is not a Python identifier, or a REPL already has something under this name.
    """
    if not isinstance(name, str) or not name.isidentifier() or keyword.iskeyword(name):
        raise ConfigurationError(f"{what} cannot be called {name!r}: that is not a Python identifier")
    if name in RESERVED or _NUMBERED.fullmatch(name) or name.startswith("__") or hasattr(builtins, name):
        raise ConfigurationError(f"{what} cannot be called {name!r}: that name is taken in a REPL")


def require_variables(names: tuple[object, ...]) -> None:
    """Refuse names that no variable can have.

    Raises:
        ConfigurationError: A name is not a Python identifier, or there are no names.
    """
    if not names:
        raise ConfigurationError("get() takes names of variables: repl.get('rows')")
    for name in names:
        if not isinstance(name, str) or not name.isidentifier() or keyword.iskeyword(name):
            raise ConfigurationError(f"no variable can be called {name!r:.60}: that is not a Python identifier")


def require_field_names(names: Iterable[object]) -> None:
    """Refuse names that no argument of `SUBMIT` can have.

    Raises:
        ConfigurationError: A name is not a Python identifier.
    """
    for name in names:
        if not isinstance(name, str) or not name.isidentifier() or keyword.iskeyword(name):
            raise ConfigurationError(f"a field cannot be called {name!r:.60}: that is not a Python identifier")


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
        if type(child) is not str:  # the common case, skipped early: most of a large context is text
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
