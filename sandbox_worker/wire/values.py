"""Values on the wire: JSON, with tags for types beyond JSON's. Both sides import it; it imports neither side.

A value of JSON stands for itself. Any other value is an object with one key, a tag beginning with `$`:

| tag | content |
| --- | --- |
| `$tuple`, `$set`, `$frozenset` | list of the elements |
| `$dict` | list of key, value, key, value; for a dict with a key other than text, or with the look of a tag |
| `$float` | `nan`, `inf` or `-inf` |
| `$int` | hexadecimal digits of an integer too long for JSON |
| `$str` | text with lone surrogates: its UTF-8 with `surrogatepass`, as base64 |
| `$bytes`, `$bytearray` | base64 |
| `$complex` | list of two floats |
| `$date`, `$timedelta` | ISO text; days, seconds, microseconds |
| `$datetime`, `$time` | ISO text without a zone, fold, and the zone: null, microseconds from UTC, or a name |
| `$decimal`, `$path`, `$purepath` | text |
| `$array`, `$scalar`, `$image` | array or scalar of numpy, image of PIL, see `tables` |
| `$series`, `$frame`, `$polars`, `$arrow` | tables, see `tables` |

An object of a subclass, for example a Counter, arrives as an equal object of the built-in class. Pickle is not used: it
would run code of the sender's choice. Names in a message are looked up in the fixed tables of these modules alone.
"""

from typing import Any, Final

import msgspec

from sandbox_worker.loading.context import NO_MEMORY, ContextBroken
from sandbox_worker.wire.counts import has_more_values_than
from sandbox_worker.wire.decoding import Decoding
from sandbox_worker.wire.encoding import MAX_NESTING, Encoding, Others
from sandbox_worker.wire.errors import MessageInvalid, ValueInvalid, ValueProblem, ValueRefused
from sandbox_worker.wire.text_json import decodable, encode_growing

MAX_ENCODED_VALUES: Final = 1 << 25
"""Maximum values inside one encoded value; more are refused. A frame of the default 64 MiB holds fewer: each
takes two bytes or more."""
MAX_DECODED_VALUES: Final = 1 << 20
"""Maximum values inside one value for the user, from a worker; more are refused. Decoding as many empty lists takes 60
MB, and 0.1 s of the reading thread."""
MAX_BINARY_BYTES: Final = 1 << 30
"""Maximum bytes of all arrays and bytes objects inside one value; more are refused before they are copied."""


def encode(
    value: object,
    whole: str,
    *,
    others: Others | None = None,
    most_values: int = MAX_ENCODED_VALUES,
    most_bytes: int = MAX_BINARY_BYTES,
) -> bytes:
    """Encode a value as JSON with tags.

    Args:
        value: Value to encode.
        whole: Name of the value for error messages, for example "the final answer".
        others: Function called with each object that cannot cross, such as `repr`. Its result crosses instead. It
            raises `ValueProblem` to refuse the object.
        most_values: Maximum values inside of `value`; more are refused.
        most_bytes: Maximum bytes of all arrays and bytes objects inside of `value`; more are refused.

    Raises:
        ValueRefused: The value, or a part of it, cannot cross. The message names the part.
    """
    try:
        try:
            return encode_growing(Encoding(whole, others, most_values, most_bytes).wire(value))
        # msgspec met lone surrogates, or an integer of more digits than Python prints. Look at each text and integer.
        except (UnicodeEncodeError, ValueError):
            encoding = Encoding(whole, others, most_values, most_bytes, is_plain_checked=True)
            return encode_growing(encoding.wire(value))
    except RecursionError:
        raise ValueRefused(f"{whole} is nested too deeply") from None
    except RuntimeError as error:  # another thread changed a dict or set while it was iterated
        raise ValueRefused(f"{whole} cannot be read: {error}") from None


def encode_json(value: object, whole: str) -> bytes:
    """Encode a value from JSON, or a context, without walking through it in Python.

    Args:
        value: Value of JSON's types. A value with other types is encoded as `encode` does it.
        whole: Name of the value for error messages.

    Raises:
        ValueRefused: The value cannot cross, or is nested too deeply.
    """
    try:
        data = msgspec.json.encode(value)
        if not has_tags(data):
            return data
    except (UnicodeEncodeError, ValueError, TypeError, RecursionError):
        pass  # the value has lone surrogates, or an object of a subclass or of another type
    return encode(value, whole)


def decode(data: bytes | bytearray | memoryview, most_values: int | None = None) -> Any:
    """Decode a value of `encode`.

    Args:
        data: JSON with tags.
        most_values: Maximum values inside; more are refused, and so is deep nesting. None, for no bound, is meant for
            values from the orchestrator alone.

    Raises:
        ValueInvalid: The bytes do not encode a value. No bytes cause any other exception.
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
        raise ValueInvalid(f"it does not encode a value: {error}") from None


def decode_context(data: bytes) -> Any:
    """Decode a value from the orchestrator, in a REPL.

    Raises:
        ContextBroken: A package is missing here, or there is not enough memory.
    """
    try:
        return decode(decodable(data))
    except ValueInvalid as invalid:
        raise ContextBroken(str(invalid)) from None
    except MemoryError:
        raise ContextBroken(NO_MEMORY) from None


def has_tags(data: bytes) -> bool:
    """Whether an encoded value may have a tag. False means plain JSON; a text can look like a tag."""
    return b"$" in data and b'{"$' in data  # a search for one character is ten times as fast as one for three
