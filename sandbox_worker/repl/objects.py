"""Values of model code: their class without running code of theirs, and their encoding when they leave the REPL."""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, TypeGuard, TypeVar

import msgspec

from sandbox_worker.wire.errors import ValueRefused
from sandbox_worker.wire.messages import MAX_RESULT_BYTES, EncodedValue
from sandbox_worker.wire.values import MAX_DECODED_VALUES, encode

T = TypeVar("T")
_name_of = type.__dict__["__name__"].__get__
"""Getter of a class's name. A plain `kind.__name__` would run code of a metaclass that defines `__name__`."""


def class_name(value: object) -> str:
    """Return the name of the class of a value."""
    return str.__str__(_name_of(type(value)))  # the name itself may be an instance of a `str` subclass of model code


def is_a(value: object, *kinds: type[T]) -> TypeGuard[T]:
    """Whether a value is an instance of one of these built-in classes.

    `isinstance` would also accept a value whose attribute `__class__` names such a class, and so run its code.
    """
    return issubclass(type(value), kinds)


PROBLEM_CHARS = 1000
"""Maximum characters of the reason why a value cannot cross; the rest is cut."""


class Crossing(NamedTuple):
    """Result of an attempt to encode a value.

    Attributes:
        encoded: Encoded value, or UNSET.
        problem: Reason why there is no encoded value; or None.
    """

    encoded: EncodedValue = msgspec.UNSET
    problem: str | None = None


def crossing(value: object, whole: str) -> Crossing:
    """Encode a value of model code. Only KeyboardInterrupt leaves this function.

    Args:
        value: Value to encode.
        whole: Name of the value for the reason.
    """
    try:
        data = encode(value, whole, most_values=MAX_DECODED_VALUES, most_bytes=MAX_RESULT_BYTES)
        return Crossing(msgspec.Raw(data))
    except KeyboardInterrupt:
        raise
    except ValueRefused as refused:
        problem = str(refused)[:PROBLEM_CHARS]
    except MemoryError:
        problem = f"there is no memory left for sending {whole}"
    except BaseException as error:  # noqa: BLE001 - classes of model code, and builtins that it replaced, may raise any
        problem = f"{whole} cannot be read: {class_name(error)}"
    return Crossing(problem=written_out(problem))


def crossing_of(names: Sequence[str], namespace: Mapping[str, Any]) -> Crossing:
    """Encode the values of variables as one list."""
    encoded: list[bytes] = []
    for name in names:
        if name not in namespace:
            return Crossing(problem=f"there is no variable {name!r}")
        one = crossing(namespace[name], name)
        if one.encoded is msgspec.UNSET:
            return one
        encoded.append(bytes(one.encoded))
    return Crossing(msgspec.Raw(b"[%s]" % b",".join(encoded)))


def written_out(text: str) -> str:
    """Return text with lone surrogates replaced by their escapes in Python source, so that any message can hold it."""
    return str.encode(text, "utf-8", "backslashreplace").decode()
