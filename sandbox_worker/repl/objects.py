"""Values of model code: their class without running code of theirs, and their encoding when they leave the REPL."""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, TypeGuard, TypeVar

import msgspec

from sandbox_worker.wire.counts import number_of_values
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


def crossing_of(names: Sequence[str], namespace: Mapping[str, Any], room_bytes: int) -> Crossing:
    """Encode variables as two objects: name → value, and name → reason why there is no value.

    Args:
        names: Names of the variables.
        namespace: Name → value.
        room_bytes: Maximum bytes of all of them. A variable without room has a reason in place of its value.
    """
    values: list[bytes] = []
    problems: dict[str, str] = {}
    room = MAX_DECODED_VALUES - 3
    most_bytes = room_bytes
    try:
        for name in dict.fromkeys(names):
            one = (
                crossing(namespace[name], name)
                if name in namespace
                else Crossing(problem=f"there is no variable {name!r}")
            )
            problem, encoded = one.problem, b"" if isinstance(one.encoded, msgspec.UnsetType) else bytes(one.encoded)
            count = 1 if encoded.startswith(b'"') else number_of_values(encoded)
            if problem is None and (len(name) + len(encoded) + 4 > room_bytes or count > room):
                problem = f"{name} has no room in a message beside the others: read it alone"
                if len(name) + len(encoded) + 4 > most_bytes:
                    problem = f"{name} has {len(encoded):,} bytes, more than a message: {most_bytes:,}"
            if problem is None:
                values.append(b"%s:%s" % (msgspec.json.encode(name), encoded))
                room_bytes, room = room_bytes - len(values[-1]) - 1, room - count
            elif (taken := len(msgspec.json.encode((name, problem)))) < room_bytes and room:
                problems[name] = problem
                room_bytes, room = room_bytes - taken, room - 1
        return Crossing(msgspec.Raw(b"[{%s},%s]" % (b",".join(values), msgspec.json.encode(problems))))
    except MemoryError:
        return Crossing(problem="there is no memory left for sending variables")


def written_out(text: str) -> str:
    """Return text with lone surrogates replaced by their escapes in Python source, so that any message can hold it."""
    return str.encode(text, "utf-8", "backslashreplace").decode()
