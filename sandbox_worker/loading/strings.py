"""`str` objects whose characters lie where somebody else put them: in a mapping that many processes share.

    one anonymous mapping           pages of the memfd, shared by every worker
    ┌────────┬────────┬────         ┌──────────────────┬──────────────────┬────
    │ header │ header │ ...         │ characters, zero │ characters, zero │ ...
    └───┬────┴───┬────┴────         └──────────────────┴──────────────────┴────
        │        └─────────────────────────────────────▲
        └───────────────────────────▲

A header with a pointer is how CPython keeps instances of *subclasses* of `str` (PyUnicodeObject in
Include/cpython/unicodeobject.h, 3.11 to 3.13; those of `str` itself have their characters right behind the header), and
all of its own code goes by what the header says. Its fields differ between versions, so they are read off such
instances. It is an implementation detail nevertheless: `self_test` tries it out.
"""

import ctypes
import mmap
import os
import sys
from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from itertools import compress, count
from typing import Any

from sandbox_worker.loading.form import KINDS

SAMPLES: dict[int, str] = {0: "a", 1: "\xe9", 2: "\u20ac", 4: "\U0001f600"}
CODECS: dict[int, str] = {0: "ascii", 1: "latin-1", 2: "utf-16-le", 4: "utf-32-le"}

_WORD_BYTES = 8
_HEAD_BYTES = 16  # PyObject_HEAD with a GIL, without tracing
_COUNT, _TYPE, _LENGTH, _HASH = range(4)  # PyASCIIObject; what is behind it differs
_NO_HASH = (1 << 64) - 1  # -1: not computed yet
# On 3.11 larger than any real count, so that nothing ever frees the object; on 3.12 and 3.13 these 32 ones are the mark
# of an immortal one (PEP 683, _Py_IMMORTAL_REFCNT in Include/object.h). 3.14 begins such counts in the middle of the
# immortal range (_Py_IMMORTAL_INITIAL_REFCNT in Include/refcount.h), and frees an object with 32 ones.
_NEVER_FREED = 0xC000_0000 if sys.version_info >= (3, 14) else 0xFFFF_FFFF
# From 3.14 on a bit of the state says that an object was never allocated: its end, at the interpreter's exit, is
# otherwise that of an interned string, which crashes. Where the bit lies is read off a one-character string.
_HAS_STATIC_BIT = sys.version_info >= (3, 14)
_STATE, _FLAGS, _INTERNED = 4, 0xFF, 0x3  # the word, and in it the bits that say something, and which are of interning
_MODEL_LENGTHS = (1009, 2003)  # which no other field has by chance, and not both
_MAP_FAILED = ctypes.c_void_p(-1).value

_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long]
_libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]


class LayoutUnknown(Exception):
    """This interpreter keeps its strings in another way. The message says in which respect."""


class _Apart(str):
    """Its instances have their characters apart from their headers."""

    __slots__ = ()


@dataclass(frozen=True, slots=True)
class _Model:
    """The header of all texts of one kind.

    Attributes:
        words: With zeros where texts differ.
        lengths_at: Which of them hold the number of characters. Of ASCII this is also that of its bytes in UTF-8.
        pointers_at: Which of them point to the characters. Of ASCII they are its UTF-8, too.
    """

    words: "array[int]"
    lengths_at: tuple[int, ...]
    pointers_at: tuple[int, ...]


def models_are_known() -> bool:
    """Read real strings before one is made up. Where they are not what they are taken for, this may well crash."""
    # Free-threaded builds and those that trace references have other fields at the start of every object.
    if sys.implementation.name != "cpython" or object.__basicsize__ != _HEAD_BYTES or sys.byteorder != "little":
        return False
    try:
        return all(map(_model, KINDS))
    except LayoutUnknown:
        return False


def mapped_strings(fd: int, size_bytes: int, kinds: bytes, lengths: Sequence[int], starts: Sequence[int]) -> list[str]:
    """Texts in the first `size_bytes` of `fd`, as objects that are never freed. Their spans have to lie within.

    Raises:
        OSError: There is no memory or no address space for it.
    """
    # Read-only, so that neither an RLIMIT_DATA nor a strict overcommit counts what every worker shares.
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
        # All of a kind at once, field by field: one after the other they would take ten times as long.
        chosen = kinds.translate(bytes(each == kind for each in range(256)))
        of_kind = array("Q", compress(lengths, chosen))
        pointers = array("Q", map(characters.__add__, compress(starts, chosen)))
        model, fields = _model(kind), header_bytes // _WORD_BYTES
        words = model.words * len(of_kind)
        for values, places in ((of_kind, model.lengths_at), (pointers, model.pointers_at)):
            for field in places:
                words[field::fields] = values
        for at, text in zip(compress(count(), chosen), _objects_of(words, headers), strict=True):
            if lengths[
                at
            ]:  # there is but one empty string: from 3.12 on `if text` may look only whether it is that one
                texts[at] = text
        headers += len(of_kind) * header_bytes
    return texts


def _objects_of(words: "array[int]", address: int) -> list[str]:
    """Put headers into place, and take them for what they are."""
    size_bytes = len(words) * _WORD_BYTES
    ctypes.memmove(address, words.buffer_info()[0], size_bytes)
    addresses = array("Q", range(address, address + size_bytes, str.__basicsize__))
    objects: list[Any] = (ctypes.py_object * len(addresses)).from_buffer(addresses)[:]
    return objects


class MappedBytes:
    """Bytes of `fd`, mapped without a descriptor, until `unmap`.

    Raises:
        OSError: They cannot be mapped.
    """

    def __init__(self, fd: int, size_bytes: int) -> None:
        self._address = _map_pages(size_bytes, mmap.PROT_READ, mmap.MAP_PRIVATE, fd)
        self._size_bytes = size_bytes

    def copied(self) -> bytes:
        """Return them."""
        return bytes(memoryview((ctypes.c_char * self._size_bytes).from_address(self._address)))

    def unmap(self) -> None:
        """Give the address space back. To be called once, and last."""
        _libc.munmap(self._address, self._size_bytes)


def _map_pages(size_bytes: int, rights: int, flags: int, fd: int) -> int:
    mapped = _libc.mmap(None, size_bytes, rights, flags, fd, 0)
    if mapped is None or mapped == _MAP_FAILED:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))
    return int(mapped)


# -- how this interpreter does it ------------------------------------------------------------------------------------


@cache
def _model(kind: int) -> _Model:
    """Raises: LayoutUnknown."""
    one, other = (_read(kind, length) for length in _MODEL_LENGTHS)
    if one != other:
        raise LayoutUnknown(f"headers of kind {kind} differ in more than length and address")
    return one


def _read(kind: int, length: int) -> _Model:
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
        raise LayoutUnknown(f"a header of kind {kind} is {words.tolist()}")
    lengths_at = tuple(at for at, word in enumerate(words) if word == length)
    pointers_at = tuple(at for at, word in enumerate(words) if word == pointer)
    for at in (*lengths_at, *pointers_at):
        words[at] = 0
    words[_COUNT], words[_TYPE] = _NEVER_FREED, id(str)
    words[_STATE] |= _static_bit()
    return _Model(words, lengths_at, pointers_at)


@cache
def _static_bit() -> int:
    """The bit of the state word by which a string of the interpreter's own differs from one that was allocated.

    Raises:
        LayoutUnknown: They do not differ by one bit.
    """
    if not _HAS_STATIC_BIT:
        return 0
    # One latin-1 character alone is a string of the interpreter's own; two are allocated, of the same width and form.
    own, allocated = (_words_of(text)[_STATE] & _FLAGS for text in ("\xe9", "".join(["\xe9", "\xea"])))
    bit = own & ~allocated & ~_INTERNED
    if bit.bit_count() != 1:
        raise LayoutUnknown(f"the states of strings are {own:#x} and {allocated:#x}")
    return bit


def _words_of(text: str) -> "array[int]":
    return array("Q", ctypes.string_at(id(text), str.__basicsize__))
