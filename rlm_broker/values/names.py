"""Names of tools, values and variables in a REPL."""

import builtins
import keyword
import re
from collections.abc import Iterable, Mapping
from typing import Final, TypeGuard

from rlm_broker.errors import ConfigurationError
from sandbox_worker.wire.names import CONTEXT, HISTORY, RESERVED

_NUMBERED: Final = re.compile(rf"({CONTEXT}|{HISTORY})_\d+")
_PYTHONS: Final = ("__name__", "__builtins__")
"""Names that Python itself needs in each namespace. No REPL gives them to a tool or a value."""


def require_given(tools: Iterable[object], values: object, scaffold: bool = True) -> None:
    """Raise ConfigurationError for tools and values that a REPL cannot be given, or a name of both."""
    require_names(tools, scaffold)
    if not isinstance(values, Mapping):
        raise ConfigurationError(f"values must be a dict from name to value, not {type(values).__name__}")
    for name in values:
        require_name(name, "a value", scaffold)
    require_apart(tools, values)


def require_apart(tools: Iterable[object], values: Iterable[object]) -> None:
    """Raise ConfigurationError for a name that is both a tool's and a value's."""
    if both := sorted(map(str, set(tools) & set(values))):
        raise ConfigurationError(f"{', '.join(both)}: a name is that of a tool or of a value, not of both")


def is_identifier(name: object) -> TypeGuard[str]:
    """Return whether code can have a variable of this name.

    Example:
        ```python
        is_identifier("class")  # False
        ```
    """
    return isinstance(name, str) and name.isidentifier() and not keyword.iskeyword(name)


def require_names(tools: Iterable[object], scaffold: bool = True) -> None:
    """Raise ConfigurationError for tools that are not a list of names, for example the functions themselves."""
    names = list(tools) if isinstance(tools, Iterable) else []
    is_list = isinstance(tools, Iterable) and not isinstance(tools, str | Mapping)
    if not is_list or not all(isinstance(name, str) for name in names):
        raise ConfigurationError(
            "tools must be a dict from name to function, or a list of names whose calls `answer` answers"
        )
    for name in names:
        require_name(name, "a tool", scaffold)
    if len(set(names)) < len(names):
        raise ConfigurationError("tools has a name twice: give each once")


def require_name(name: object, what: str, scaffold: bool = True) -> None:
    """Raise ConfigurationError for a name that "a tool" or "a value" cannot have: it is no identifier, or a REPL has it
    already. A REPL without a scaffold has none but Python's own."""
    _require_identifiers([name], f"{what} cannot")
    assert isinstance(name, str)
    is_ours = name in RESERVED or _NUMBERED.fullmatch(name) or name.startswith("__") or hasattr(builtins, name)
    if is_ours if scaffold else name in _PYTHONS:
        raise ConfigurationError(f"{what} cannot be called {name!r}: that name is taken in a REPL")


def require_variables(names: tuple[object, ...]) -> None:
    """Raise ConfigurationError unless there are names, and all of them can be variables'."""
    if not names:
        raise ConfigurationError("get() takes names of variables: repl.get('rows')")
    _require_identifiers(names, "no variable can")


def require_field_names(names: Iterable[object]) -> None:
    """Raise ConfigurationError for names that no argument of `SUBMIT` can have."""
    _require_identifiers(names, "a field cannot")


def _require_identifiers(names: Iterable[object], who_can: str) -> None:
    for name in names:
        if not is_identifier(name):
            raise ConfigurationError(f"{who_can} be called {name!r:.60}: that is not a Python identifier")
