"""Arrays and scalars of numpy on the wire: dtype, shape and raw bytes.

`$array` has a list of dtype, shape and base64 of the bytes in C order; `$scalar` has a list of dtype and base64. The
receiver imports numpy when the first of them arrives; the sender never imports it, since a process without numpy has
no array.
"""

import importlib
import math
import re
import sys
from typing import Any, Final, Protocol

from sandbox_worker.wire.errors import ValueProblem

MAX_DIMENSIONS: Final = 32
"""Maximum dimensions of an array, as in numpy 1; an array with more is invalid."""
MAX_EMPTY_LENGTH: Final = 1 << 24
"""Maximum product of the nonzero lengths of an array without elements; a larger one is invalid. Such an array costs the
sender no bytes, but code that receives it may loop over as many rows."""
_KINDS: Final = "biufcmMSU"
_DTYPE: Final = re.compile(
    r"[<>|=]?[biufcmMSU][1-9]\d{0,8}(\[(\d{1,9})?(Y|M|W|D|h|m|s|ms|us|ns|ps|fs|as)\])?|[<>=]?[mM]8"
)
_LAST_CHARACTER: Final = 0x10FFFF


class Base64(Protocol):
    """Encoder of bytes; `encoding.Encoding` is one."""

    def base64(self, data: memoryview | bytes) -> str:
        """Return bytes as base64 text."""
        ...

    def take(self, length: int) -> None:
        """Count bytes before they are copied."""
        ...


def encoded(value: Any, encoding: Base64) -> dict[str, Any] | None:
    """Return the tag for an array or a scalar of numpy; None for any other object.

    Raises:
        ValueProblem: The array has a dtype that cannot cross, or is of a subclass.
    """
    numpy = sys.modules.get("numpy")
    generic = getattr(numpy, "generic", None)
    if generic is None:
        return None
    kind = type(value)
    if kind is numpy.ndarray:  # type: ignore[union-attr]
        dtype, data = _raw(value, encoding)
        return {"$array": [dtype, list(value.shape), data]}
    if issubclass(kind, generic):
        return {"$scalar": _raw(numpy.asarray(value), encoding)}  # type: ignore[union-attr]
    if issubclass(kind, numpy.ndarray):  # type: ignore[union-attr]
        raise ValueProblem(f"is a {kind.__name__}, which does not cross: numpy.array() makes an array of it")
    return None


def _raw(array: Any, encoding: Base64) -> list[str]:
    """Return the dtype, and the bytes as base64."""
    if array.dtype.kind not in _KINDS:
        raise ValueProblem(f"is an array of dtype {array.dtype!s:.60}, which does not cross")
    if not array.dtype.itemsize:  # an array of empty texts: "U0" has no bytes, from which no length would follow
        array = array.astype(f"{array.dtype.kind}1")
    encoding.take(array.nbytes)
    return [array.dtype.str, encoding.base64(array.tobytes())]


def array(content: Any, bytes_of: Any) -> Any:
    """Return the array for a tag's content.

    Args:
        content: List of dtype, shape and base64.
        bytes_of: Function that decodes base64.

    Raises:
        ValueProblem, ValueError, TypeError: The content does not describe an array.
    """
    dtype, shape, data = content
    numpy = module("numpy")
    if type(shape) is not list or len(shape) > MAX_DIMENSIONS or not all(type(n) is int and n >= 0 for n in shape):
        raise ValueProblem("an array has an invalid shape")
    elements = _elements(numpy, dtype, bytes_of(data))
    if elements.size != math.prod(shape):
        raise ValueProblem(f"an array of shape {tuple(shape)!s:.80} has {elements.size:,} elements")
    if not elements.size and math.prod(n for n in shape if n) > MAX_EMPTY_LENGTH:
        raise ValueProblem(f"an array without elements has the shape {tuple(shape)!s:.80}, which is too large")
    return elements.reshape(shape)


def scalar(content: Any, bytes_of: Any) -> Any:
    """Return the scalar for a tag's content, see `array`."""
    dtype, data = content
    elements = _elements(module("numpy"), dtype, bytes_of(data))
    if elements.size != 1:
        raise ValueProblem(f"a scalar has {elements.size:,} elements, expected 1")
    return elements[0]


def _elements(numpy: Any, dtype: Any, data: bytes) -> Any:
    """Return a flat, writable array."""
    if type(dtype) is not str or not _DTYPE.fullmatch(dtype):
        raise ValueProblem(f"an array has the unsupported dtype {dtype!r:.60}")
    made = numpy.dtype(dtype)
    if made.kind not in _KINDS or not made.itemsize or made.hasobject:
        raise ValueProblem(f"an array has the unsupported dtype {dtype!r:.60}")
    if len(data) % made.itemsize:
        raise ValueProblem(f"an array of dtype {dtype} has {len(data):,} bytes, no multiple of {made.itemsize:,}")
    elements = numpy.frombuffer(bytearray(data), made)
    if made.kind == "b" and data and elements.view("u1").max() > 1:
        raise ValueProblem("a boolean array has a byte that is neither 0 nor 1")
    if made.kind == "U" and data and elements.view(f"{made.str[0]}u4").max() > _LAST_CHARACTER:
        raise ValueProblem("an array of text has a code point above U+10FFFF")
    return elements


def module(name: str) -> Any:
    """Import the package of a value. `name` is a constant of our code, never a text from a message.

    Raises:
        ValueProblem: The package is not installed here.
    """
    try:
        return importlib.import_module(name)
    except ImportError:
        raise ValueProblem(f"it needs the package {name}, which is not installed here") from None
