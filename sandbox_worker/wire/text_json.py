"""JSON of text with lone surrogates: halves of a character. A `str` may hold them, UTF-8 may not.

msgspec refuses to encode them. There are four ways to handle them. The name of each function for them says its way:

- refused: `msgspec.json.encode` or `encode_growing` alone, for values that must arrive unchanged.
- escaped: as JSON escapes such as `\\ud800`, for files of our own, since `json` and `decode_escaped` read them back.
- written out: as six visible characters, for people, for models, and for other programs, since their JSON parsers may
  refuse the escapes.
- raw: as bytes beyond UTF-8, for contexts, since their texts must arrive unchanged.
"""

import json
import mmap
import re
from collections.abc import Callable
from typing import Any, Final, TypeVar

import msgspec

T = TypeVar("T")
Data = TypeVar("Data", bound=bytes | bytearray)
DECODING_FACTOR: Final = 3
"""Peak memory of decoding, as a multiple of the encoded size: the text, its bytes, and the array made of them."""
ALLOCATOR_BYTES: Final = 1 << 20
"""Bytes of one mapping of an allocator for small objects."""
_ENCODER = msgspec.json.Encoder()
_LONE = re.compile("[\ud800-\udfff]")


def encode_growing(value: Any, encoder: msgspec.json.Encoder = _ENCODER) -> bytes:
    """Encode as JSON, also where memory may be full; lone surrogates are refused.

    `encode` of msgspec 0.22 dereferences NULL if its buffer cannot grow, and a REPL would die by SIGSEGV. `encode_into`
    does not.

    Raises:
        MemoryError: There is not enough memory.
    """
    buffer = bytearray()
    encoder.encode_into(value, buffer)
    return bytes(buffer)


def decodable(data: Data) -> Data:
    """Return JSON after a trial: the memory for its decoding is mapped and released.

    msgspec 0.22 dereferences NULL if the memory for a text is missing.

    Raises:
        MemoryError: There is not enough memory.
    """
    try:
        size_bytes = DECODING_FACTOR * len(data) + ALLOCATOR_BYTES
        mmap.mmap(-1, size_bytes, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS).close()
    except OSError:
        raise MemoryError from None
    return data


def encode_escaped(value: Any) -> bytes:
    """Encode as JSON, with lone surrogates as JSON escapes such as `\\ud800`. `decode_escaped` and `json` read it."""
    try:
        return msgspec.json.encode(value)
    except UnicodeEncodeError:
        return json.dumps(msgspec.to_builtins(value)).encode()


def decode_escaped(data: bytes, wanted: type[T]) -> T:
    """Decode JSON of `encode_escaped`.

    Raises:
        msgspec.ValidationError: The value is not of the type `wanted`.
        ValueError: The bytes are not JSON.
        RecursionError: The value is nested too deeply.
    """
    try:
        return msgspec.json.decode(data, type=wanted)
    except msgspec.ValidationError:
        raise
    except msgspec.DecodeError:  # msgspec does not read escapes of lone surrogates; `json` does
        return msgspec.convert(json.loads(data), wanted)


def encode_written_out(value: Any, enc_hook: Callable[[Any], Any] | None = None) -> bytes:
    """Encode as UTF-8 JSON, with lone surrogates written out as six visible characters.

    Args:
        value: Value to encode.
        enc_hook: Function for objects of other types, as for `msgspec.json.encode`.
    """
    try:
        return encode_growing(value, msgspec.json.Encoder(enc_hook=enc_hook))
    except UnicodeEncodeError:
        return written_out(json.dumps(msgspec.to_builtins(value, enc_hook=enc_hook), ensure_ascii=False)).encode()


def encode_raw(value: Any) -> bytes:
    """Encode as JSON, with each lone surrogate as three bytes, by the rule of UTF-8 (`surrogatepass`).

    Escapes would not do: a reader joins two adjacent escapes of a high and a low surrogate into one character.

    Args:
        value: Value of JSON's types.
    """
    try:
        return msgspec.json.encode(value)
    except (UnicodeEncodeError, TypeError):  # msgspec raises TypeError for a subclass of str, int or float
        return json.dumps(value, ensure_ascii=False, separators=(",", ":")).encode("utf-8", "surrogatepass")


def written_out(json_text: str) -> str:
    """Return JSON with each lone surrogate replaced by six visible characters, its escape in Python source."""
    return _LONE.sub(lambda half: f"\\\\u{ord(half[0]):04x}", json_text)


def unfenced(text: str) -> str:
    """Return the text without a Markdown fence around it: models often wrap JSON in one."""
    text = text.strip()
    if text.startswith("```") and text.endswith("```") and "\n" in text:
        return text.partition("\n")[2].removesuffix("```").strip()
    return text
