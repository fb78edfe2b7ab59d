"""How much JSON holds, told from its bytes before anything is decoded.

Two bytes on the wire can be 64 in memory: an empty list. Fifteen million of them took 1.1 GB and kept the event loop
for seven seconds.
"""

import itertools
import re

MAX_VALUES = 1 << 16
"""Values in one JSON text of free shape: arguments of a tool, an answer of a type, a one-shot request. Decoding as many
empty lists takes 10 ms, and finding that all are of a wrong type 70 ms."""

_STRING = re.compile(rb'"[^"\\]*+(?:(?:\\.)++[^"\\]*+)*+(?:"|\Z)', re.DOTALL)
"""A string. Possessive, so that nothing is looked at twice; the last one need not end."""

_FLAT = rb'\[(?:[^"\[\]]++|"[^"\\]*+(?:(?:\\.)++[^"\\]*+)*+")*+\]'
_PARTS = re.compile(rb'\[(?:[^"\[\]]++|"[^"\\]*+(?:(?:\\.)++[^"\\]*+)*+"|%s)*+\]' % _FLAT, re.DOTALL)
"""A list of content parts, or of chat messages, whose content may be such a list: lists in lists of it are none."""
_BETWEEN = re.compile(rb"[ \t\r\n]*+([,\]])[ \t\r\n]*+")
_BEGIN = re.compile(rb"[ \t\r\n]*+\[[ \t\r\n]*+")


def split_prompts(array: bytes, most: int) -> list[memoryview] | None:
    """The elements of a JSON array of strings and of lists with at most flat lists in them, as slices of it.

    Decoders build one object for each element before they count them: 32 million numbers in 64 MB were 2.4 GB.

    Returns:
        None if an element is something else, or there are more than `most`.
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
    """Where the string that begins at `at` ends; 0 if it does not."""
    end = array.find(b'"', at + 1) + 1
    if array[end - 2 : end - 1] != b"\\":  # no escaped quote before it: most texts end here, at the speed of `find`
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
    """Whether JSON holds more than `most` values: each is the first of a list or object, or comes after a comma."""
    if _values(payload) <= most:
        return False
    if has_more_strings_than(2 * most, payload):  # each is a value, or the key of one
        return True
    return _values(_STRING.sub(b"", payload)) > most  # a long text may be full of commas


def _values(payload: bytes | bytearray) -> int:
    return 1 + payload.count(b",") + payload.count(b"[") + payload.count(b"{")
