"""Counts of the values in JSON, made from its bytes before it is decoded.

Two bytes on the wire can become 64 bytes in memory: an empty list. Fifteen million of them took 1.1 GB and held the
event loop for 7 s. So a receiver counts first, in one linear pass that allocates no object per value.

The patterns use possessive quantifiers (`*+`, `++`, since Python 3.11), so that `re` examines no byte twice: hostile
input cannot cause backtracking.
"""

import itertools
import re

MAX_VALUES = 1 << 16
"""Maximum values in one JSON text of free shape: arguments of a tool, an answer of a type, a one-shot request. Texts
with more are refused. Decoding as many empty lists takes 10 ms; finding that all have a wrong type takes 70 ms."""

_STRING = re.compile(rb'"[^"\\]*+(?:(?:\\.)++[^"\\]*+)*+(?:"|\Z)', re.DOTALL)
"""Pattern of a JSON string with its quotes. The last string of a text need not end."""

_FLAT = rb'\[(?:[^"\[\]]++|"[^"\\]*+(?:(?:\\.)++[^"\\]*+)*+")*+\]'
_PARTS = re.compile(rb'\[(?:[^"\[\]]++|"[^"\\]*+(?:(?:\\.)++[^"\\]*+)*+"|%s)*+\]' % _FLAT, re.DOTALL)
"""Pattern of a list that may hold flat lists: content parts, or chat messages whose content is a list of parts. A list
that is nested deeper does not match."""
_DIGITS = bytes.maketrans(b"123456789", b"000000000")
_BETWEEN = re.compile(rb"[ \t\r\n]*+([,\]])[ \t\r\n]*+")
_BEGIN = re.compile(rb"[ \t\r\n]*+\[[ \t\r\n]*+")


def split_prompts(array: bytes, most: int) -> list[memoryview] | None:
    """Return the elements of a JSON array as slices of it, without decoding them.

    Elements are strings, or lists that hold at most flat lists (see `_PARTS`). A decoder would build one object for
    each element before it could count them: 32 million numbers in 64 MB took 2.4 GB.

    Returns:
        One slice for each element; or None if an element has another form, or there are more than `most`.
    """
    begin = _BEGIN.match(array)
    if begin is None:
        return None
    view, at, elements = memoryview(array), begin.end(), list[memoryview]()
    if array[at : at + 1] == b"]":
        return elements
    while len(elements) < most:
        end = _end_of_string(array, at) if array[at : at + 1] == b'"' else _end_of_parts(array, at)
        after = _BETWEEN.match(array, end)
        if after is None:
            return None
        elements.append(view[at:end])
        if after[1] == b"]":
            return elements
        at = after.end()
    return None


def _end_of_string(array: bytes, at: int) -> int:
    """Return the end of the string that begins at `at`, or 0 if the string does not end."""
    end = array.find(b'"', at + 1) + 1
    # If no backslash precedes the first quote, it ends the string. Most texts end here, at the speed of `find`.
    if array[end - 2 : end - 1] != b"\\":
        return end
    string = _STRING.match(array, at)
    return 0 if string is None else string.end()


def _end_of_parts(array: bytes, at: int) -> int:
    parts = _PARTS.match(array, at)
    return 0 if parts is None else parts.end()


def has_more_strings_than(most: int, payload: bytes | bytearray) -> bool:
    """Whether JSON holds more than `most` strings, the keys of objects included."""
    if payload.count(b'"') <= 2 * most:
        return False
    return sum(1 for _ in itertools.islice(_STRING.finditer(payload), most + 1)) > most


def has_more_values_than(most: int, payload: bytes | bytearray) -> bool:
    """Whether JSON holds more than `most` values.

    Each value but the outermost is the first of a list or an object, or follows a comma. So commas and opening
    brackets are counted, outside of strings; an empty list counts one too many.
    """
    if _values(payload) <= most:
        return False
    if has_more_strings_than(2 * most, payload):  # each string is a value, or the key of a value
        return True
    return _values(_STRING.sub(b"", payload)) > most  # commas in strings separate no values


def has_longer_number_than(most: int, payload: bytes) -> bool:
    """Whether JSON holds a number of more than `most` digits in a row. Python writes one of 4,300 digits in 0.1 ms."""
    return _has_digits(most + 1, payload) and _has_digits(most + 1, _STRING.sub(b"", payload))


def _has_digits(count: int, payload: bytes) -> bool:
    return b"0" * count in payload.translate(_DIGITS)


def _values(payload: bytes | bytearray) -> int:
    return 1 + payload.count(b",") + payload.count(b"[") + payload.count(b"{")
