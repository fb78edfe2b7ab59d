"""Detection of the variables that a block has made or changed, without holding large objects or running their code."""

import dis
import sys
from collections.abc import Iterable, Iterator, Sequence
from types import CodeType
from typing import Any, Final, NamedTuple

from sandbox_worker.repl.helpers import Chunks, Matches
from sandbox_worker.repl.objects import class_name, is_a
from sandbox_worker.wire.messages import MAX_DIMENSIONS, MAX_VARIABLE_CHARS, MAX_VARIABLES, Size, VariableFact

KEPT_BYTES = 1 << 10
"""Maximum bytes of an object that is held while a block runs. Of a larger object only the address is kept."""
_PLAIN: Final = (int, float, complex, bool, str, bytes, type(None))
_SIZED: Final[tuple[type[Any], ...]] = (str, bytes, bytearray, list, tuple, dict, set, frozenset)
_SHAPED: Final = (("numpy", "ndarray"), ("pandas", "DataFrame"), ("pandas", "Series"), ("polars", "DataFrame"))
_LARGEST: Final = (1 << 63) - 1


class _Seen(NamedTuple):
    address: int
    size: Size | None
    kept: Any


class Changes:
    """State of the variables before a block.

    Args:
        variables: Name and value of each variable.
    """

    def __init__(self, variables: Iterable[tuple[str, Any]]) -> None:
        self._seen = {name: _Seen(id(value), _size_of(value), _kept(value)) for name, value in variables}

    def made(self, variables: Iterable[tuple[str, Any]], compiled: Sequence[CodeType]) -> list[VariableFact]:
        """Return the new variables, bound to another object, or containers of another length.

        A new object may have the address of one that was freed. So a variable that the block's own code binds counts as
        changed, unless its old value was held and is the same object.

        Args:
            variables: Name and value of each variable after the block.
            compiled: Code objects of the block.
        """
        bound: set[str] | None = None
        found: list[VariableFact] = []
        for name, value in variables:
            seen, size = self._seen.get(name), _size_of(value)
            if seen is not None and seen.address == id(value) and seen.size == size:
                if seen.kept is value:
                    continue
                bound = {*_bound_by(compiled)} if bound is None else bound
                if name not in bound:
                    continue
            if len(name) <= MAX_VARIABLE_CHARS and name.isidentifier():
                found.append(VariableFact(name, class_name(value)[:MAX_VARIABLE_CHARS], size))
                if len(found) == MAX_VARIABLES:
                    break
        return found


def _kept(value: Any) -> Any:
    is_plain = any(type(value) is kind for kind in _PLAIN)  # `in` would call `__eq__` of a metaclass
    return value if is_plain and sys.getsizeof(value) <= KEPT_BYTES else None


def _size_of(value: Any) -> Size | None:
    for kind in _SIZED:
        if is_a(value, kind):
            length: int = kind.__len__(value)  # `len` would call `__len__` of a subclass
            return length
    if type(value) is Matches or type(value) is Chunks:
        return len(value)
    for module, name in _SHAPED:
        package = sys.modules.get(module)
        if package is not None and type(value) is vars(package).get(name):
            return _shape_of(value)
    return None


def _shape_of(value: Any) -> Size | None:
    """Return the shape of an array or a table; None if it is not a shape, since model code may have replaced it."""
    try:
        shape = value.shape
        if type(shape) is not tuple or len(shape) > MAX_DIMENSIONS:
            return None
        return shape if all(type(each) is int and 0 <= each <= _LARGEST for each in shape) else None
    except Exception:  # noqa: BLE001 - a replaced `shape` may raise any class
        return None


def _bound_by(compiled: Sequence[CodeType]) -> Iterator[str]:
    """Yield the names of variables that code binds: at its top level, or as `global` within its functions."""
    inner = list[CodeType]()
    for code in compiled:
        for instruction in dis.get_instructions(code):
            if instruction.opname in ("STORE_NAME", "STORE_GLOBAL"):
                yield str(instruction.argval)
        inner += (each for each in code.co_consts if isinstance(each, CodeType))
    for code in inner:  # the list grows during the loop
        inner += (each for each in code.co_consts if isinstance(each, CodeType))
        for instruction in dis.get_instructions(code):
            if instruction.opname == "STORE_GLOBAL":
                yield str(instruction.argval)
