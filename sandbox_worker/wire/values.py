"""Values on the wire: JSON, and tags for what JSON does not have. Both sides use it; it imports neither.

What JSON holds is itself. All else is an object of one key that begins with `$`:

| tag | content |
| --- | --- |
| `$tuple`, `$set`, `$frozenset` | list of the elements |
| `$dict` | list of key, value, key, value: keys that are not all text, or a dict that looks like a tag |
| `$float` | `nan`, `inf` or `-inf` |
| `$int` | hexadecimal digits of an integer that is too long for JSON |
| `$str` | text with lone surrogates: its UTF-8 with `surrogatepass`, as base64 |
| `$bytes`, `$bytearray` | base64 |
| `$complex` | list of two floats |
| `$date`, `$timedelta` | ISO text; days, seconds, microseconds |
| `$datetime`, `$time` | ISO text without a zone, fold, and the zone: null, microseconds from UTC, or a name |
| `$decimal`, `$path`, `$purepath` | text |
| `$array`, `$scalar` | of numpy, see `arrays` |
| `$series`, `$frame`, `$polars`, `$arrow` | of tables, see `tables` |

Of a subclass, such as a Counter, the built-in class arrives, which is equal. Nothing is pickled, and no name in a text
is looked up but in tables of our own.
"""

import mmap
from typing import Any, Final

import msgspec

from sandbox_worker.loading.context import NO_MEMORY, ContextBroken
from sandbox_worker.wire.counting import has_more_values_than
from sandbox_worker.wire.decoding import Decoding
from sandbox_worker.wire.encoding import MAX_NESTING, Encoding, Others
from sandbox_worker.wire.errors import MessageInvalid, ValueInvalid, ValueProblem, ValueRefused

MAX_ENCODED_VALUES: Final = 1 << 25
"""Values inside one that is encoded; more are refused. As many do not fit into a frame of the default size."""
MAX_DECODED_VALUES: Final = 1 << 20
"""Values inside one that comes out of a worker because the user asked for it; more are refused. Decoding as many empty
lists takes 60 MB and a tenth of a second, of the thread that looks at the value."""
MAX_BINARY_BYTES: Final = 1 << 30
"""Bytes of arrays and bytes inside one value; more are refused before they are copied."""


DECODING_FACTOR: Final = 3
"""Memory that decoding takes, at most, in sizes of what is decoded: its text, its bytes, and the array of them."""


def encode(
    value: object,
    whole: str,
    *,
    others: Others | None = None,
    most_values: int = MAX_ENCODED_VALUES,
    most_bytes: int = MAX_BINARY_BYTES,
) -> bytes:
    """Encode a value as JSON.

    Args:
        whole: Name of the value, for the sentence.
        others: Called with what does not cross. What it returns crosses in its place; `repr` is one. It raises
            `ValueProblem` where it has nothing either.
        most_values: Values inside of `value`; one with more is refused.
        most_bytes: Bytes of all arrays and bytes inside of `value`; one with more is refused.

    Raises:
        ValueRefused: Something in it does not cross.
    """
    try:
        try:
            return msgspec.json.encode(Encoding(whole, others, most_values, most_bytes).wire(value))
        except (UnicodeEncodeError, ValueError):  # lone surrogates, or an integer of more digits than Python prints
            encoding = Encoding(whole, others, most_values, most_bytes, is_plain_checked=True)
            return msgspec.json.encode(encoding.wire(value))
    except RecursionError:
        raise ValueRefused(f"{whole} is nested too deeply") from None
    except RuntimeError as error:  # a thread changes a dict or set meanwhile
        raise ValueRefused(f"{whole} cannot be read: {error}") from None


def encode_json(value: object, whole: str) -> bytes:
    """Do the same with a value that came out of JSON, or of a context: large ones need not be looked through.

    Raises:
        ValueRefused: It is nested too deeply.
    """
    try:
        data = msgspec.json.encode(value)
        if not has_tags(data):
            return data
    except (UnicodeEncodeError, ValueError, TypeError, RecursionError):
        pass  # lone surrogates, or of a subclass
    return encode(value, whole)


def decode(data: bytes | bytearray | memoryview, most_values: int | None = None) -> Any:
    """Decode what `encode` returned.

    Args:
        most_values: Values that may be inside, and then depth is bounded, too. None is for what the orchestrator sent.

    Raises:
        ValueInvalid: It is something else; no other exception leaves here, whatever the bytes.
    """
    data = bytes(data)
    try:
        if most_values is not None and has_more_values_than(most_values, data):
            raise ValueInvalid(f"it holds more than {most_values:,} values")
        tree = msgspec.json.decode(data)
        if has_tags(data) or (most_values is not None and data.count(b"[") + data.count(b"{") > MAX_NESTING):
            return Decoding().value(tree, 0)
        return tree
    except MessageInvalid:
        raise
    except ValueProblem as problem:
        raise ValueInvalid(str(problem)) from None
    except RecursionError:
        raise ValueInvalid("it is nested too deeply") from None
    except (msgspec.MsgspecError, ValueError, TypeError, ArithmeticError, LookupError, AttributeError) as error:
        raise ValueInvalid(f"it is no value: {error}") from None


def decode_context(data: bytes) -> Any:
    """Decode a context of kind `value`, which the orchestrator wrote.

    Raises:
        ContextBroken: It cannot be had here: a package is missing, or there is no memory for it.
    """
    try:
        # Ask for the memory first: msgspec crashes where there is none for a long text.
        mmap.mmap(-1, DECODING_FACTOR * len(data), mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS).close()
        return decode(data)
    except ValueInvalid as invalid:
        raise ContextBroken(str(invalid)) from None
    except (OSError, MemoryError):
        raise ContextBroken(NO_MEMORY) from None


def has_tags(data: bytes) -> bool:
    """Whether some part of an encoded value is no plain JSON."""
    return b"$" in data and b'{"$' in data  # one character is found ten times as fast as three
