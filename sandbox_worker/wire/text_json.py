"""JSON of text with lone surrogates: half characters that a `str` may hold, and UTF-8 may not.

msgspec refuses them. There are four ways to go on, and each function here that encodes says which one it takes:

- refuse: `msgspec.json.encode` alone, for what must arrive unchanged.
- as JSON escapes: for files of our own, since `json` and `decode_escaped` read them back.
- written out: for what a person or a model reads, and for other programs, whose JSON need not have them.
- raw: for contexts, whose texts must arrive unchanged whatever they hold.
"""

import json
import re
from collections.abc import Callable
from typing import Any, TypeVar

import msgspec

T = TypeVar("T")
_LONE = re.compile("[\ud800-\udfff]")


def encode_escaped(value: Any) -> bytes:
    """Encode as JSON with lone surrogates as its escapes, `\\ud800`. `decode_escaped` and `json` read it."""
    try:
        return msgspec.json.encode(value)
    except UnicodeEncodeError:
        return json.dumps(msgspec.to_builtins(value)).encode()


def decode_escaped(data: bytes, wanted: type[T]) -> T:
    """Decode what `encode_escaped` returned.

    Raises:
        msgspec.ValidationError: It is not of the type `wanted`.
        ValueError, RecursionError: It is not JSON, or is nested too deeply.
    """
    try:
        return msgspec.json.decode(data, type=wanted)
    except msgspec.ValidationError:
        raise
    except msgspec.DecodeError:  # it does not read lone surrogates
        return msgspec.convert(json.loads(data), wanted)


def encode_written_out(value: Any, enc_hook: Callable[[Any], Any] | None = None) -> bytes:
    """Encode as UTF-8 JSON with lone surrogates written out.

    Args:
        enc_hook: As for `msgspec.json.encode`.
    """
    try:
        return msgspec.json.encode(value, enc_hook=enc_hook)
    except UnicodeEncodeError:
        return written_out(json.dumps(msgspec.to_builtins(value, enc_hook=enc_hook), ensure_ascii=False)).encode()


def encode_raw(value: Any) -> bytes:
    """Encode as JSON with lone surrogates as UTF-8 would have them (`surrogatepass`). `value` is plain.

    As escapes, two that stand side by side would be read as one character.
    """
    try:
        return msgspec.json.encode(value)
    except (UnicodeEncodeError, TypeError):  # TypeError: a subclass of str, int or float
        return json.dumps(value, ensure_ascii=False, separators=(",", ":")).encode("utf-8", "surrogatepass")


def written_out(json_text: str) -> str:
    """Return JSON with its lone surrogates as Python source has them: `\\\\ud800`, six characters that can be read."""
    return _LONE.sub(lambda half: f"\\\\u{ord(half[0]):04x}", json_text)
