"""Decoding of one value from the wire: each tag is replaced by the object it stands for.

Values from workers are decoded here as well, so the input is hostile. Each tag is looked up in a fixed table. If its
content has another type than the table's function expects, then the value is invalid. Every step takes linear
time at most.
"""

import binascii
import datetime
import decimal
import re
from collections import Counter
from collections.abc import Callable
from pathlib import Path, PurePosixPath
from typing import Any, Final, TypeVar

from sandbox_worker.wire import tables
from sandbox_worker.wire.encoding import MAX_DECIMAL_DIGITS, MAX_LONG_BITS, MAX_NESTING, is_too_long
from sandbox_worker.wire.errors import ValueProblem

MAX_COLLISIONS: Final = 32
"""Maximum keys with the same hash in a dict or set; more are refused. CPython hashes an integer to its value modulo
2**61 - 1, so a sender can choose integers that all collide. Adding them to a dict then takes quadratic time."""
_FLOATS: Final = {"nan": float("nan"), "inf": float("inf"), "-inf": float("-inf")}
_HEXADECIMAL: Final = re.compile("-?[0-9a-f]+")
_CONTAINERS: Final = (list, dict)

T = TypeVar("T")
M = TypeVar("M", datetime.datetime, datetime.time)


class Decoding:
    """Replacement of tags by the objects they stand for."""

    def value(self, node: Any, depth: int = 0) -> Any:
        """Return the object for a node of decoded JSON. Lists and dicts are changed in place.

        Args:
            node: Tree of JSON values.
            depth: Number of containers around the node.

        Raises:
            ValueProblem, ValueError, TypeError, ArithmeticError, LookupError: The node does not encode a value.
        """
        if type(node) is list:
            return self._items(node, depth)
        if type(node) is not dict:
            return node
        if len(node) == 1:
            ((key, content),) = node.items()
            if key.startswith("$"):
                decode_tag = _DECODE.get(key)
                if decode_tag is None:
                    raise ValueProblem(f"it has the unknown tag {key!r:.60}")
                return decode_tag(self, content, depth)
        _require_shallow(depth)
        for key, item in node.items():
            if type(item) in _CONTAINERS:
                node[key] = self.value(item, depth + 1)
        return node

    def _items(self, content: Any, depth: int) -> list[Any]:
        items = _typed(content, list)
        _require_shallow(depth)
        for index, item in enumerate(items):
            if type(item) in _CONTAINERS:
                items[index] = self.value(item, depth + 1)
        return items

    def _keys(self, content: Any, depth: int) -> list[Any]:
        return _require_few_collisions(self._items(content, depth))

    def _dict(self, content: Any, depth: int) -> dict[Any, Any]:
        items = self._items(content, depth)
        if len(items) % 2:
            raise ValueProblem("a dict has a key without a value")
        return dict(zip(_require_few_collisions(items[::2]), items[1::2], strict=True))

    def _complex(self, content: Any, depth: int) -> complex:
        real, imaginary = self._items(content, depth)
        return complex(_typed(real, float), _typed(imaginary, float))

    def _path(self, kind: Callable[[str], T], content: Any, depth: int) -> T:
        return kind(_typed(self.value(content, depth), str))


def _typed(content: Any, kind: type[T]) -> T:
    if type(content) is not kind:
        raise ValueProblem(f"it has a tag with content of type {type(content).__name__}, expected {kind.__name__}")
    return content


def _require_shallow(depth: int) -> None:
    if depth >= MAX_NESTING:
        raise ValueProblem(f"it is nested deeper than {MAX_NESTING} levels")


def _require_few_collisions(keys: list[Any]) -> list[Any]:
    if len(keys) > MAX_COLLISIONS and max(Counter(map(hash, keys)).values()) > MAX_COLLISIONS:
        raise ValueProblem(f"it has more than {MAX_COLLISIONS} keys of the same hash")
    return keys


def _bytes(content: Any) -> bytes:
    return binascii.a2b_base64(_typed(content, str), strict_mode=True)


def _int(content: Any) -> int:
    if not _HEXADECIMAL.fullmatch(_typed(content, str)):
        raise ValueProblem("an integer has characters that are not hexadecimal digits")
    if 4 * len(content) > MAX_LONG_BITS + 8:
        raise ValueProblem("an integer is too long")
    return int(content, 16)


def _decimal(content: Any) -> decimal.Decimal:
    if len(_typed(content, str)) > 2 * MAX_DECIMAL_DIGITS:
        raise ValueProblem("a Decimal is too long")
    made = decimal.Decimal(content)
    if is_too_long(made):
        raise ValueProblem("a Decimal is too long")
    return made


def _moment(kind: type[M], content: Any) -> M:
    text, fold, zone = content
    made = kind.fromisoformat(_typed(text, str))
    if made.tzinfo is not None:
        raise ValueProblem(f"a {kind.__name__} has two time zones")
    return made.replace(fold=_typed(fold, int), tzinfo=tables.decoded_zone(zone))


def _timedelta(content: Any) -> datetime.timedelta:
    days, seconds, microseconds = content
    return datetime.timedelta(_typed(days, int), _typed(seconds, int), _typed(microseconds, int))


_DECODE: Final[dict[str, Callable[[Decoding, Any, int], Any]]] = {
    "$tuple": lambda decoding, content, depth: tuple(decoding._items(content, depth)),
    "$set": lambda decoding, content, depth: set(decoding._keys(content, depth)),
    "$frozenset": lambda decoding, content, depth: frozenset(decoding._keys(content, depth)),
    "$dict": Decoding._dict,
    "$float": lambda _, content, __: _FLOATS[_typed(content, str)],
    "$int": lambda _, content, __: _int(content),
    "$str": lambda _, content, __: _bytes(content).decode("utf-8", "surrogatepass"),
    "$bytes": lambda _, content, __: _bytes(content),
    "$bytearray": lambda _, content, __: bytearray(_bytes(content)),
    "$complex": Decoding._complex,
    "$datetime": lambda _, content, __: _moment(datetime.datetime, content),
    "$date": lambda _, content, __: datetime.date.fromisoformat(_typed(content, str)),
    "$time": lambda _, content, __: _moment(datetime.time, content),
    "$timedelta": lambda _, content, __: _timedelta(content),
    "$decimal": lambda _, content, __: _decimal(content),
    "$path": lambda decoding, content, depth: decoding._path(Path, content, depth),
    "$purepath": lambda decoding, content, depth: decoding._path(PurePosixPath, content, depth),
    "$array": lambda _, content, __: tables.array(content, _bytes),
    "$scalar": lambda _, content, __: tables.scalar(content, _bytes),
    "$image": lambda _, content, __: tables.image(_bytes(content)),
    "$series": lambda decoding, content, depth: tables.decoded_table("$series", content, decoding, depth),
    "$frame": lambda decoding, content, depth: tables.decoded_table("$frame", content, decoding, depth),
    "$polars": lambda decoding, content, depth: tables.decoded_table("$polars", content, decoding, depth),
    "$arrow": lambda decoding, content, depth: tables.decoded_table("$arrow", content, decoding, depth),
}
