"""`str` objects whose characters lie in a mapped memfd, which many processes share.

Theory of operation
===================
A worker maps the memfd of a context. It makes only the headers of the texts itself, and each header points to the
characters in the mapping:

    one anonymous mapping           pages of the memfd, shared by all workers
    ┌────────┬────────┬────         ┌──────────────────┬──────────────────┬────
    │ header │ header │ ...         │ characters, zero │ characters, zero │ ...
    └───┬────┴───┬────┴────         └──────────────────┴──────────────────┴────
        │        └─────────────────────────────────────▲
        └───────────────────────────▲

A gigabyte of text then costs a worker one mapping and one header. Model code sees exact `str` objects.

Layout. CPython has two forms of a string (Include/cpython/unicodeobject.h, 3.11 to 3.14). In the *compact* form the
characters follow the header. In the *legacy* form (`PyUnicodeObject`, `state.compact == 0`) the header ends with a
pointer to characters elsewhere. CPython makes the legacy form for instances of subclasses of `str`
(`unicode_subtype_new` in Objects/unicodeobject.c). The macro `PyUnicode_DATA`, through which all code of CPython finds
the characters, looks at `state.compact` and not at the class. So a legacy header whose class is `str` works as well.

The fields of the header differ between versions. So none is computed here: `_read` makes instances of a subclass with
two known lengths, and reads off which words hold the length and the pointer (`_Model`). A new header has the words of
the model, its text's length and address, the class `str`, and a reference count that never reaches 0.

Why it is safe:

- Bytes cannot change. The memfd has all four seals (`form.SEALS`), so no process can write to it or shrink it. A cached
  hash stays right, and no access beyond the end of the file raises SIGBUS. The mapping is read-only as well.
- CPython writes to no string of this kind in place. `unicode_modifiable` demands a reference count of 1, and these
  counts are huge, so `text += "x"` copies.
- CPython frees none. The count is beyond any real one, so neither `free` nor the deallocator sees the addresses.
  Mappings live until the process ends: no code could tell when the last reference is gone.
- CPython does write to headers: hash, cached UTF-8, interning. Headers are private memory of the process.
- Invariants of CPython hold because `form` demands them. Each text has the narrowest width for its widest character,
  since `==` takes strings of different widths for unequal. A zero character ends it, since C code reads ASCII as a C
  string.
- Offsets cannot lead out of the mapping: `context.index` checks the spans of all texts against the size of the memfd.

What would break it: a CPython that drops the legacy form, that asks for the class instead of `state.compact`, or that
counts references in another way (free-threaded builds; builds that trace references). `models_are_known` refuses builds
with another object head. `self_test` uses mapped strings in a forked child before any worker does. If either fails,
then `context` copies texts into ordinary strings, which is slower and otherwise equal.

Alternatives rejected:

- Copying: each worker pays the memory of all texts and the time of the copy, where a mapping costs microseconds.
- Inheriting one copy from a fork server: the fork server must load the context before it forks, so it serves the
  workers of that context alone.
- Instances of a subclass, as CPython makes them: `type(text) is str` is false, and packages such as msgspec refuse
  them.
- `bytes`, `mmap` or a class of our own: model code expects the methods of `str`.
"""

import ctypes
import mmap
import os
import sys
from array import array
from collections.abc import Sequence
from functools import cache
from itertools import compress, count
from typing import Any

from msgspec import Struct

from sandbox_worker.loading.form import KINDS

SAMPLES: dict[int, str] = {0: "a", 1: "\xe9", 2: "\u20ac", 4: "\U0001f600"}
"""Kind → a character of this kind."""
CODECS: dict[int, str] = {0: "ascii", 1: "latin-1", 2: "utf-16-le", 4: "utf-32-le"}
"""Kind → codec whose bytes are CPython's characters, but for lone surrogates."""

_WORD_BYTES = 8
_HEAD_BYTES = 16  # PyObject_HEAD: reference count and class. Builds without a GIL or with Py_TRACE_REFS have more.
_COUNT, _TYPE, _LENGTH, _HASH = range(4)  # first words of PyASCIIObject, equal in 3.11 to 3.14; later ones differ
_NO_HASH = (1 << 64) - 1  # -1 as unsigned: the hash is not computed yet
# A reference count with which no string is freed. On 3.11 it is an ordinary count, larger than any real one. On 3.12
# and 3.13 the 32 ones mark an immortal object (PEP 683; _Py_IMMORTAL_REFCNT in Include/object.h). 3.14 uses the middle
# of the immortal range instead (_Py_IMMORTAL_INITIAL_REFCNT, 3 << 30, in Include/refcount.h): it would free an object
# with 32 ones.
_NEVER_FREED = 0xC000_0000 if sys.version_info >= (3, 14) else 0xFFFF_FFFF
# From 3.14 on, a bit of the state must say that the string is statically allocated. Without it, the interpreter
# releases an interned string at its exit, which crashes for a mapped one. `_static_bit` finds the bit.
_HAS_STATIC_BIT = sys.version_info >= (3, 14)
_STATE, _FLAGS, _INTERNED = 4, 0xFF, 0x3  # word of the state; bits of it that are used; bits that concern interning
_MODEL_LENGTHS = (1009, 2003)  # no other field of a header has one of these values by chance, still less both in turn
_MAP_FAILED = ctypes.c_void_p(-1).value

_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long]
_libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]


class LayoutUnknown(Exception):
    """This interpreter's strings have another layout. The message shows the header."""


class _Apart(str):
    """Subclass of `str`: its instances have their characters apart from their headers."""

    __slots__ = ()


class _Model(Struct, frozen=True):
    """Common header of all texts of one kind.

    Attributes:
        words: Words of 8 bytes, with zeros where texts differ.
        lengths_at: Indexes of the words with the number of characters. ASCII has two: its UTF-8 form is as long.
        pointers_at: Indexes of the words with their address. ASCII has two: they are its UTF-8 form as well.
    """

    words: "array[int]"
    lengths_at: tuple[int, ...]
    pointers_at: tuple[int, ...]


def models_are_known() -> bool:
    """Whether the headers of this interpreter's strings have the expected layout.

    The models are cached for `mapped_strings`. With an unexpected layout this may crash: call it in a child first.
    """
    # Free-threaded builds, and builds that trace references, have other fields at the start of every object.
    if sys.implementation.name != "cpython" or object.__basicsize__ != _HEAD_BYTES or sys.byteorder != "little":
        return False
    try:
        return all(map(_model, KINDS))
    except LayoutUnknown:
        return False


def mapped_strings(fd: int, size_bytes: int, kinds: bytes, lengths: Sequence[int], starts: Sequence[int]) -> list[str]:
    """Return the texts in a memfd as strings that are never freed.

    Args:
        fd: Sealed memfd.
        size_bytes: Bytes to map, from the start.
        kinds: Kind of each text, one byte each.
        lengths: Characters of each text.
        starts: Offset of each text. Each text, with its final zero, must lie within `size_bytes`: this is not checked.

    Raises:
        OSError: There is not enough memory or address space.
    """
    # Map read-only: neither RLIMIT_DATA nor strict overcommit then counts pages that all workers share.
    characters = _map_pages(size_bytes, mmap.PROT_READ, mmap.MAP_PRIVATE, fd)
    header_bytes = str.__basicsize__
    try:
        headers = _map_pages(
            len(kinds) * header_bytes, mmap.PROT_READ | mmap.PROT_WRITE, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS, -1
        )
    except OSError:
        _libc.munmap(characters, size_bytes)
        raise
    texts = [""] * len(kinds)
    for kind in set(kinds):
        # Make all headers of one kind at once, field by field. One header after the other would take ten times as long.
        chosen = kinds.translate(bytes(each == kind for each in range(256)))
        of_kind = array("Q", compress(lengths, chosen))
        pointers = array("Q", map(characters.__add__, compress(starts, chosen)))
        model, fields = _model(kind), header_bytes // _WORD_BYTES
        words = model.words * len(of_kind)
        for values, places in ((of_kind, model.lengths_at), (pointers, model.pointers_at)):
            for field in places:
                words[field::fields] = values
        for at, text in zip(compress(count(), chosen), _objects_of(words, headers), strict=True):
            # Keep "" itself for empty texts. From 3.13 on, `if text` may compare the address with the one empty text's
            # string (TO_BOOL_STR in Python/bytecodes.c), so a second empty string would count as true.
            if lengths[at]:
                texts[at] = text
        headers += len(of_kind) * header_bytes
    return texts


def _objects_of(words: "array[int]", address: int) -> list[str]:
    """Copy headers to `address`, and return references to them as objects."""
    size_bytes = len(words) * _WORD_BYTES
    ctypes.memmove(address, words.buffer_info()[0], size_bytes)
    addresses = array("Q", range(address, address + size_bytes, str.__basicsize__))
    objects: list[Any] = (ctypes.py_object * len(addresses)).from_buffer(addresses)[:]
    return objects


class MappedBytes:
    """Bytes of a memfd that stay mapped until `unmap`, also once its descriptor is closed.

    Args:
        fd: Sealed memfd.
        size_bytes: Bytes to map, from the start.

    Raises:
        OSError: There is not enough memory or address space.
    """

    def __init__(self, fd: int, size_bytes: int) -> None:
        self._address = _map_pages(size_bytes, mmap.PROT_READ, mmap.MAP_PRIVATE, fd)
        self._size_bytes = size_bytes

    def copied(self) -> bytes:
        """Return a copy of the bytes."""
        return bytes(memoryview((ctypes.c_char * self._size_bytes).from_address(self._address)))

    def unmap(self) -> None:
        """Release the address space. Call this once; no other method works afterwards."""
        _libc.munmap(self._address, self._size_bytes)


def _map_pages(size_bytes: int, rights: int, flags: int, fd: int) -> int:
    mapped = _libc.mmap(None, size_bytes, rights, flags, fd, 0)
    if mapped is None or mapped == _MAP_FAILED:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))
    return int(mapped)


# -- layout of this interpreter's strings ----------------------------------------------------------------------------


@cache
def _model(kind: int) -> _Model:
    """Return the common header of all texts of a kind.

    Raises:
        LayoutUnknown: The headers of two texts differ in more than length and address.
    """
    one, other = (_read(kind, length) for length in _MODEL_LENGTHS)
    if one != other:
        raise LayoutUnknown(f"headers of kind {kind} differ in more than length and address")
    return one


def _read(kind: int, length: int) -> _Model:
    """Read the header of a string of a subclass, after a check of each known field."""
    text = _Apart("".join([SAMPLES[kind]] * length))
    words = _words_of(text)
    pointer = words[-1]
    hash_of_text = hash(text) & _NO_HASH
    characters = text.encode(CODECS[kind]) + bytes(kind or 1)
    there = (
        words[_TYPE] == id(_Apart),
        words[_LENGTH] == length,
        words[_HASH] == _NO_HASH,
        _words_of(text)[_HASH] == hash_of_text,
        ctypes.string_at(pointer, len(characters)) == characters,
        text.__sizeof__() == len(words) * _WORD_BYTES + len(characters),
    )
    if not all(there):
        raise LayoutUnknown(f"a header of kind {kind} has an unexpected layout: {words.tolist()}")
    lengths_at = tuple(at for at, word in enumerate(words) if word == length)
    pointers_at = tuple(at for at, word in enumerate(words) if word == pointer)
    for at in (*lengths_at, *pointers_at):
        words[at] = 0
    words[_COUNT], words[_TYPE] = _NEVER_FREED, id(str)
    words[_STATE] |= _static_bit()
    return _Model(words, lengths_at, pointers_at)


@cache
def _static_bit() -> int:
    """Return the bit of the state word that marks statically allocated strings; 0 before CPython 3.14.

    Raises:
        LayoutUnknown: A static and an allocated string do not differ by exactly one bit.
    """
    if not _HAS_STATIC_BIT:
        return 0
    # CPython allocates strings of one latin-1 character statically. A string of two is allocated, with the same kind.
    own, allocated = (_words_of(text)[_STATE] & _FLAGS for text in ("\xe9", "".join(["\xe9", "\xea"])))
    bit = own & ~allocated & ~_INTERNED
    if bit.bit_count() != 1:
        raise LayoutUnknown(f"expected states of strings that differ by one bit, got {own:#x} and {allocated:#x}")
    return bit


def _words_of(text: str) -> "array[int]":
    return array("Q", ctypes.string_at(id(text), str.__basicsize__))
