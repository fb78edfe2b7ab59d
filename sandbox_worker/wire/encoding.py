"""Encoding of one value for the wire: plain values stay as they are, all others become tags. (`values` lists the tags.)

A value is plain if msgspec encodes it as JSON by itself. Methods of built-in classes are called on the class
(`list.__iter__(value)`), so that no method of a subclass of model code runs.
"""

import binascii
import datetime
import decimal
import math
import re
from collections.abc import Callable, Iterable
from pathlib import Path, PurePosixPath
from typing import Any, Final, NoReturn

from sandbox_worker.wire import tables
from sandbox_worker.wire.errors import ValueProblem, ValueRefused

MAX_NESTING: Final = 200
"""Maximum depth of containers inside containers; deeper values are refused. Recursive code can read this depth under
Python's default recursion limit of 1,000."""
MAX_LONG_BITS: Final = 33_220
"""Maximum bits of an integer: 10,000 decimal digits; longer ones are refused. The conversion to digits takes
quadratic time, under the interpreter's lock."""
MAX_INT_BITS: Final = 14_000
"""Maximum bits of an integer in decimal digits; a longer one crosses as hexadecimal digits. Python refuses
to read more than 4,300 decimal digits, since that takes quadratic time (`sys.set_int_max_str_digits`)."""
MAX_DECIMAL_DIGITS: Final = 10_000
"""Maximum digits of a Decimal, written out without an exponent; longer ones are refused. `1E+999999999` is a short
text, and a gigabyte once it is written out."""
SHOWN_CHARS: Final = 200
"""Maximum characters of a place in an error message, for example `context['a'][3]`; of a longer place the beginning is
shown."""

Others = Callable[[Any], Any]
"""Function from an object that cannot cross to its substitute; see `values.encode`."""


class _Step:
    """Step of a place other than an index or a key: to a key of a dict, or to an element of a set."""

    def __init__(self, words: str) -> None:
        self.words = words


_A_KEY: Final = _Step("a key of ")
_AN_ELEMENT: Final = _Step("an element of ")
_LONE: Final = re.compile("[\ud800-\udfff]")
_name_of = type.__dict__["__name__"].__get__
"""Getter of a class's name. A plain `kind.__name__` would run a metaclass's own `__name__`."""
_LEAVES: Final = frozenset({str, int, bool, type(None)})
_WITH_FLOATS: Final = _LEAVES | {float}
_STR: Final = frozenset({str})


class Encoding:
    """Conversion of one value to a tree for msgspec to encode as JSON.

    Plain parts are passed on as they are. A container of plain leaves is recognised by the set of their types, without
    a look at each leaf in Python.

    Args:
        whole: Name of the value for error messages.
        others: See `values.encode`.
        most_values: See `values.encode`.
        most_bytes: See `values.encode`.
        is_plain_checked: Whether each text and integer is examined as well. If not, msgspec raises for a text with lone
            surrogates or for a long integer, and the caller encodes again with True.
    """

    def __init__(
        self, whole: str, others: Others | None, most_values: int, most_bytes: int, *, is_plain_checked: bool = False
    ) -> None:
        self._whole = whole
        self._others = others
        self._most_values = self._values_left = most_values
        self._most_bytes = self._bytes_left = most_bytes
        self._leaves = frozenset[type]() if is_plain_checked else _LEAVES
        self._leaves_and_floats = frozenset[type]() if is_plain_checked else _WITH_FLOATS
        self._around: list[object] = []
        self._keys: list[object] = []

    def wire(self, value: Any) -> Any:
        """Return `value` as a tree for msgspec to encode."""
        kind = type(value)
        if kind in self._leaves:
            return value
        encode_kind = _ENCODE.get(kind)
        return self._foreign(value, kind) if encode_kind is None else encode_kind(self, value)

    def inside(self, key: object, value: Any) -> Any:
        """Return the tree of an element of a container, at `key` there."""
        self._keys.append(key)
        encoded = self.wire(value)
        self._keys.pop()
        return encoded

    def base64(self, data: bytes | bytearray | memoryview) -> str:
        """Return bytes as base64 text, and count them."""
        self.take(len(data))
        return binascii.b2a_base64(data, newline=False).decode()

    def take(self, length: int) -> None:
        """Count `length` bytes, before they are copied.

        Raises:
            ValueRefused: The value has more than `most_bytes`.
        """
        self._bytes_left -= length
        if self._bytes_left < 0:
            self.refuse(f"has more than {self._most_bytes:,} bytes")

    def refuse(self, why: str) -> NoReturn:
        """Refuse the current part of the value.

        Args:
            why: End of a sentence after the place of the part, for example "contains itself".

        Raises:
            ValueRefused: Always.
        """
        place, words = self._whole, ""
        for key in self._keys:
            if isinstance(key, _Step):
                words = key.words
                break
            place += f"[{key!r:.60}]"
        if len(place) > SHOWN_CHARS:
            place = f"{place[:SHOWN_CHARS]}..."
        raise ValueRefused(f"{words}{place} {why}")

    # -- containers --------------------------------------------------------------------------------------------------

    def _take_container(self, container: object, values: int) -> None:
        """Count `values` values of a container, and refuse it if it is nested too deeply."""
        self._values_left -= values
        if self._values_left < 0:
            del self._keys[:]
            self.refuse(f"has more than {self._most_values:,} values")
        if len(self._around) >= MAX_NESTING:
            ids = [*map(id, self._around), id(container)]
            for depth, each in enumerate(ids):
                if each in ids[:depth]:
                    del self._keys[depth:]
                    self.refuse("contains itself")
            self.refuse(f"is nested deeper than {MAX_NESTING} levels")

    def _items(self, items: "list[Any] | tuple[Any, ...]") -> "list[Any] | tuple[Any, ...]":
        self._take_container(items, len(items))
        if self._are_plain(set(map(type, items)), items):
            return items
        self._around.append(items)
        encoded: list[Any] = []
        leaves, keys = self._leaves, self._keys
        for index, item in enumerate(items):
            if type(item) in leaves:
                encoded.append(item)
            else:  # This is `inside`, inlined: its call would add one level of Python's stack for each container.
                keys.append(index)
                encoded.append(self.wire(item))
                keys.pop()
        self._around.pop()
        return encoded

    def _are_plain(self, kinds: set[type], values: Iterable[Any]) -> bool:
        if not kinds <= self._leaves_and_floats:
            return not kinds
        if float not in kinds:
            return True
        if len(kinds) == 1:
            return all(map(math.isfinite, values))
        return all(math.isfinite(value) for value in values if type(value) is float)

    def _tuple(self, value: tuple[Any, ...]) -> Any:
        return {"$tuple": self._items(tuple(tuple.__iter__(value)))}

    def _elements(self, tag: str, value: Any, elements: list[Any]) -> Any:
        self._take_container(value, len(elements))
        self._around.append(value)
        encoded = [self.inside(_AN_ELEMENT, element) for element in elements]
        self._around.pop()
        return {tag: encoded}

    def _dict(self, value: dict[Any, Any]) -> Any:
        if type(value) is not dict:
            value = dict(dict.items(value))
        self._take_container(value, len(value))
        if not (set(map(type, value)) <= _STR and (self._leaves or self._keys_are_whole(value))) or is_like_a_tag(
            value
        ):
            return self._pairs(value)
        if self._are_plain(set(map(type, value.values())), value.values()):
            return value
        self._around.append(value)
        encoded, leaves, keys = {}, self._leaves, self._keys
        for key, item in value.items():
            if type(item) in leaves:
                encoded[key] = item
            else:
                keys.append(key)
                encoded[key] = self.wire(item)
                keys.pop()
        self._around.pop()
        return encoded

    def _keys_are_whole(self, value: dict[str, Any]) -> bool:
        return not any(_LONE.search(key) for key in value)

    def _pairs(self, value: dict[Any, Any]) -> Any:
        self._take_container(value, len(value))
        self._around.append(value)
        encoded: list[Any] = []
        for key, item in value.items():
            encoded += self.inside(_A_KEY, key), self.inside(key, item)
        self._around.pop()
        return {"$dict": encoded}

    # -- leaves ------------------------------------------------------------------------------------------------------

    def _str(self, value: str) -> Any:
        value = str.__str__(value)
        if self._leaves or not _LONE.search(value):
            return value
        return {"$str": self.base64(value.encode("utf-8", "surrogatepass"))}

    def _int(self, value: int) -> Any:
        value = int.__int__(value)
        if value.bit_length() > MAX_LONG_BITS:
            self.refuse("is a number of more than 10,000 digits, which does not cross")
        return value if value.bit_length() <= MAX_INT_BITS else {"$int": f"{value:x}"}

    def _float(self, value: float) -> Any:
        value = float.__float__(value)
        return value if math.isfinite(value) else {"$float": repr(value)}

    def _complex(self, value: complex) -> Any:
        return {"$complex": [self._float(value.real), self._float(value.imag)]}

    def _datetime(self, value: datetime.datetime) -> Any:
        naive = datetime.datetime.isoformat(value.replace(tzinfo=None))
        return {"$datetime": [naive, value.fold, self._zone(value.tzinfo)]}

    def _time(self, value: datetime.time) -> Any:
        return {"$time": [value.replace(tzinfo=None).isoformat(), value.fold, self._zone(value.tzinfo)]}

    def _zone(self, zone: datetime.tzinfo | None) -> Any:
        try:
            return tables.encoded_zone(zone)
        except ValueProblem as problem:
            self.refuse(str(problem))

    def _decimal(self, value: decimal.Decimal) -> Any:
        if is_too_long(value):
            self.refuse(f"is a Decimal of more than {MAX_DECIMAL_DIGITS:,} digits, written out")
        return {"$decimal": str(value)}

    def _foreign(self, value: Any, kind: type) -> Any:
        """Encode an object of numpy, a table, an image, an object of a subclass, or the substitute from `others`."""
        try:
            encoded = (
                tables.encoded_array(value, self)
                or tables.encoded_table(value, self)
                or tables.encoded_image(value, self)
            )
        except ValueProblem as problem:
            self.refuse(str(problem))
        except (ValueRefused, MemoryError, RecursionError):
            raise
        except Exception as error:  # noqa: BLE001 - pandas, polars and pyarrow raise classes of their own
            self.refuse(f"cannot be read: {type(error).__name__}: {error!s:.200}")
        if encoded is not None:
            return encoded
        for base in _BASES:
            if issubclass(kind, base):
                return self._items(list(list.__iter__(value))) if base is list else _ENCODE[base](self, value)
        if self._others is None:
            self.refuse(f"is {with_article(kind)}, which does not cross")
        try:
            instead = self._others(value)
        except ValueProblem as problem:
            self.refuse(str(problem))
        return self.wire(instead)


_ENCODE: Final[dict[type, Callable[[Encoding, Any], Any]]] = {
    type(None): lambda _, value: value,
    bool: lambda _, value: value,
    str: Encoding._str,
    int: Encoding._int,
    float: Encoding._float,
    dict: Encoding._dict,
    list: Encoding._items,
    tuple: Encoding._tuple,
    set: lambda encoding, value: encoding._elements("$set", value, list(set.__iter__(value))),
    frozenset: lambda encoding, value: encoding._elements("$frozenset", value, list(frozenset.__iter__(value))),
    bytes: lambda encoding, value: {"$bytes": encoding.base64(value)},
    bytearray: lambda encoding, value: {"$bytearray": encoding.base64(value)},
    complex: Encoding._complex,
    datetime.datetime: Encoding._datetime,
    datetime.date: lambda _, value: {"$date": value.isoformat()},
    datetime.time: Encoding._time,
    datetime.timedelta: lambda _, value: {"$timedelta": [value.days, value.seconds, value.microseconds]},
    decimal.Decimal: Encoding._decimal,
    type(Path()): lambda encoding, value: {"$path": encoding.wire(str(value))},
    PurePosixPath: lambda encoding, value: {"$purepath": encoding.wire(str(value))},
}

_BASES: Final = tuple(kind for kind in _ENCODE if kind not in (type(None), bool))
"""Classes whose subclasses cross as the class itself. A derived class stands before its base: datetime before date."""


def is_like_a_tag(value: dict[str, Any]) -> bool:
    """Whether a receiver would take a dict for a tag."""
    return len(value) == 1 and next(iter(value)).startswith("$")


def is_too_long(value: decimal.Decimal) -> bool:
    """Whether a Decimal has more than `MAX_DECIMAL_DIGITS` digits, written out without an exponent."""
    return value.is_finite() and (
        len(value.as_tuple().digits) > MAX_DECIMAL_DIGITS or abs(value.adjusted()) > MAX_DECIMAL_DIGITS
    )


def with_article(kind: type) -> str:
    """Return the name of a class with its article, for example "an object"."""
    name = str.__str__(_name_of(kind))
    return f"an {name}" if name[:1] in "aeiouAEIOU" else f"a {name}"
