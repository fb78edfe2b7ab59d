"""Values on their way out of the REPL: encoded, or the reason why not. Objects of model code may do anything."""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import msgspec

from sandbox_worker.repl.classes import class_name
from sandbox_worker.wire.errors import ValueRefused
from sandbox_worker.wire.messages import MAX_RESULT_BYTES, EncodedValue
from sandbox_worker.wire.values import MAX_DECODED_VALUES, encode

PROBLEM_CHARS = 1000
"""Of the sentence on why a value does not cross; the rest of a longer one is cut."""


class Crossing(NamedTuple):
    """An encoded value; or nothing, and why."""

    encoded: EncodedValue = msgspec.UNSET
    problem: str | None = None


def crossing(value: object, whole: str) -> Crossing:
    """Encode a value of model code's. An interrupt is let through.

    Args:
        whole: Its name in the sentence.
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
    except BaseException as error:  # noqa: BLE001 - of the model's own classes, or since it has replaced builtins
        problem = f"{whole} cannot be read: {class_name(error)}"
    return Crossing(problem=written_out(problem))


def crossing_of(names: Sequence[str], namespace: Mapping[str, Any]) -> Crossing:
    """Encode the values of variables as a list."""
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
    """Return text with its lone surrogates as Python source has them, which any message can hold."""
    return str.encode(text, "utf-8", "backslashreplace").decode()
