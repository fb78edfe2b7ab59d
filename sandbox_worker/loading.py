"""A context, from the sealed memfd that the host wrote to the Python value that model code sees.

Text is no heap object: its characters stay in the memfd, as CPython keeps them (1, 2 or 4 bytes each, by the widest).
They are mapped behind a page that ends in a `str` header:

      anonymous page             pages of the memfd, shared by every worker
    ┌───────────────┬────────┬─────────────────────────────────────┬──────────────┐
    │    unused     │ header │ characters                          │ a zero       │
    └───────────────┴────────┴─────────────────────────────────────┴──────────────┘
                    ▲ the object                                    ▲ the rest of the last page, or a page of its own

So a gigabyte costs a worker neither time nor memory. CPython's layout is an implementation detail (the compact forms
in Include/cpython/unicodeobject.h, 3.11 to 3.13): `mapping_works` tries it out, an ordinary `str` is the fallback.
JSON becomes ordinary objects. For little-endian machines, like the rest of the sandbox.
"""

import contextlib
import ctypes
import fcntl
import gc
import json
import mmap
import os
import re
import sys
from collections.abc import Iterator
from typing import Annotated, Literal

import msgspec

Width = Literal[1, 2, 4]

SEALS = fcntl.F_SEAL_SEAL | fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_WRITE
"""With all four neither the bytes nor their number can change any more, for anybody who holds the descriptor."""

_PAGE = mmap.PAGESIZE
_MAP_FIXED = 0x10  # include/uapi/asm-generic/mman-common.h; the mmap module does not name it
_MAP_FAILED = ctypes.c_void_p(-1).value
_LENGTH_OFFSET, _HASH_OFFSET, _HEAD_BYTES = 16, 24, 16  # PyASCIIObject; PyObject_HEAD with a GIL, without tracing
# On 3.11 larger than any real count, so that nothing ever frees the object; from 3.12 on these 32 ones are the mark of
# an immortal one (PEP 683, _Py_IMMORTAL_REFCNT in Include/object.h).
_NEVER_FREED = 0xFFFF_FFFF
_SAMPLES: dict[tuple[Width, bool], str] = {
    (1, True): "a",
    (1, False): "\xe9",
    (2, False): "\u20ac",
    (4, False): "\U0001f600",
}
_CODECS: dict[Width, str] = {1: "latin-1", 2: "utf-16-le", 4: "utf-32-le"}

_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long]
_libc.mprotect.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
_libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
_from_characters = ctypes.pythonapi.PyUnicode_FromKindAndData
_from_characters.restype = ctypes.py_object
_from_characters.argtypes = [ctypes.c_int, ctypes.c_void_p, ctypes.c_ssize_t]


class ContextBroken(Exception):
    """What a descriptor holds is not the context that was announced. The message is one sentence."""


class ContextForm(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What has to be known of a descriptor to load it.

    Attributes:
        kind: `text`: the characters of one `str`; `json`: UTF-8 JSON.
        length: Characters of a text; bytes of JSON.
        width: Bytes of each character of a text. It must be the narrowest that holds the widest character, as in
            CPython: otherwise neither `==` nor `hash` is right. Whoever writes the descriptor answers for that.
        ascii: Whether the text is ASCII; a text of width 1 that is not has characters from U+0080 to U+00FF.
    """

    kind: Literal["text", "json"]
    length: Annotated[int, msgspec.Meta(ge=0, le=1 << 60)]
    width: Width = 1
    ascii: bool = False

    @property
    def size_bytes(self) -> int:
        """Bytes that the descriptor has to hold."""
        return self.length * self.width


def load(fd: int, form: ContextForm, mapping_works: bool) -> object:
    """The context that `fd` holds. `fd` stays open, and may be closed at once.

    A mapped text lives as long as its process. After a JSON context, `gc.freeze()` keeps the collector from touching
    (and so copying, after a fork) the pages that it lies on.

    Args:
        fd: A memfd with all four seals.
        mapping_works: What `mapping_works()` said in this interpreter. If not, a text is copied into an ordinary `str`.

    Raises:
        ContextBroken: It is not sealed, its size is not what `form` says, it is not JSON, or there is no memory for it.
    """
    _refuse_all_but(fd, form)
    try:
        if form.kind == "json":
            return _decoded(fd)
        return _mapped(fd, form) if mapping_works else _copied(fd, form)
    except (OSError, MemoryError) as error:
        reason = getattr(error, "strerror", None) or "out of memory"
        raise ContextBroken(
            f"a context of {form.size_bytes:,} bytes cannot be brought into memory: {reason}"
        ) from error


def _refuse_all_but(fd: int, form: ContextForm) -> None:
    # The seals first: only behind them is the size a fact, and a mapping past the end of a file is a SIGBUS.
    try:
        seals = fcntl.fcntl(fd, fcntl.F_GET_SEALS)
    except OSError as error:
        raise ContextBroken(f"the context's descriptor is not a memfd: {error.strerror}") from error
    if seals & SEALS != SEALS:
        raise ContextBroken(f"the context's memfd has the seals {seals:#x}, it needs all of {SEALS:#x}")
    if (size_bytes := os.fstat(fd).st_size) != form.size_bytes:
        raise ContextBroken(f"the context's memfd has {size_bytes:,} bytes, {form.size_bytes:,} were announced")
    if (form.ascii and form.width != 1) or (form.kind == "json" and form.width != 1):
        raise ContextBroken(f"a context of kind {form.kind!r} (ascii: {form.ascii}) cannot be {form.width} bytes wide")


# -- text ------------------------------------------------------------------------------------------------------------


def _mapped(fd: int, form: ContextForm) -> str:
    header, header_bytes = _header(form.width, form.ascii)
    # The zero behind the characters is what the kernel fills the last page with, or the first of an anonymous one.
    span_bytes = _PAGE + -(-(form.size_bytes + form.width) // _PAGE) * _PAGE
    # Read-only, so that neither an RLIMIT_DATA nor a strict overcommit counts what every worker shares.
    start = _map_pages(None, span_bytes, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS, -1)
    try:
        if form.size_bytes:
            _map_pages(start + _PAGE, form.size_bytes, mmap.MAP_PRIVATE | _MAP_FIXED, fd)
        if _libc.mprotect(start, _PAGE, mmap.PROT_READ | mmap.PROT_WRITE):
            raise _last_error()
    except OSError:
        _libc.munmap(start, span_bytes)
        raise
    address = start + _PAGE - header_bytes
    ctypes.memmove(address, header, header_bytes)
    ctypes.c_ssize_t.from_address(address).value = _NEVER_FREED
    ctypes.c_ssize_t.from_address(address + _LENGTH_OFFSET).value = form.length
    ctypes.c_ssize_t.from_address(address + _HASH_OFFSET).value = -1  # not computed yet
    text: str = ctypes.cast(address, ctypes.py_object).value
    return text


def _header(width: Width, is_ascii: bool) -> tuple[bytes, int]:
    """The header of a fresh string of the same kind: never interned, its UTF-8 form not cached."""
    model = "".join([_SAMPLES[width, is_ascii]] * 2)  # joined at run time: a constant would be shared
    header_bytes = sys.getsizeof(model) - (len(model) + 1) * width
    return ctypes.string_at(id(model), header_bytes), header_bytes


def _map_pages(address: int | None, size_bytes: int, flags: int, fd: int) -> int:
    mapped = _libc.mmap(address, size_bytes, mmap.PROT_READ, flags, fd, 0)
    if mapped is None or mapped == _MAP_FAILED:
        raise _last_error()
    return int(mapped)


def _last_error() -> OSError:
    number = ctypes.get_errno()
    return OSError(number, os.strerror(number))


def _copied(fd: int, form: ContextForm) -> str:
    if not form.length:
        return ""
    # Not a codec: UTF-16 would join two lone surrogates that stand side by side into one character.
    with mmap.mmap(fd, form.size_bytes, access=mmap.ACCESS_COPY) as view:
        first = ctypes.c_char.from_buffer(view)
        try:
            text: str = _from_characters(form.width, ctypes.addressof(first), form.length)
        finally:
            del first  # a mapping with an exported buffer cannot be closed
        return text


# -- JSON ------------------------------------------------------------------------------------------------------------


def _decoded(fd: int) -> object:
    if not os.fstat(fd).st_size:  # what mmap would take as "all of it", and refuse
        raise ContextBroken("the context is not JSON: it is empty")
    with mmap.mmap(fd, 0, prot=mmap.PROT_READ, flags=mmap.MAP_PRIVATE) as view, _no_collection():
        try:
            try:
                return msgspec.json.decode(view)
            except (msgspec.MsgspecError, UnicodeError):
                # msgspec refuses lone surrogates, which a `str` may hold, in both forms: raw and escaped.
                return json.loads(str(view, "utf-8", "surrogatepass"), parse_constant=_refuse_constant)
        except RecursionError:
            raise ContextBroken("the context is nested too deep for JSON") from None
        except ValueError as error:
            raise ContextBroken(f"the context is not JSON: {error}") from error


def _refuse_constant(name: str) -> object:
    raise ValueError(f"{name} is no JSON value")


@contextlib.contextmanager
def _no_collection() -> Iterator[None]:
    """While millions of objects are made and none is dropped, collecting takes three times as long as making them."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


# -- whether this interpreter's `str` is what `_mapped` takes it for -------------------------------------------------


def mapping_works() -> bool:
    """Whether texts can be mapped here. Found out in a forked child, which keeps the test's mappings, and a crash.

    Needs `memfd_create`, and a SIGCHLD that is not ignored. Call it in a process with one thread, before any walls.
    """
    if not _layout_is_known():
        return False
    child = os.fork()
    if not child:
        works = False
        try:
            works = all(_survives_mapping(text) for text in _known_texts())
        finally:
            os._exit(0 if works else 1)  # nothing of the parent's may run twice, whatever went wrong here
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


def _layout_is_known() -> bool:
    """Read real strings before one is made up: a header that is not where we look ends here and not in a crash."""
    # Free-threaded builds and those that trace references have other fields at the start of every object.
    if sys.implementation.name != "cpython" or object.__basicsize__ != _HEAD_BYTES or sys.byteorder != "little":
        return False
    for (width, is_ascii), sample in _SAMPLES.items():
        model = "".join([sample] * 5)
        _, header_bytes = _header(width, is_ascii)
        characters = model.encode(_CODECS[width]) + bytes(width)
        if sys.getsizeof(model) != header_bytes + len(characters):
            return False
        there = (
            ctypes.c_void_p.from_address(id(model) + 8).value == id(str),
            ctypes.c_ssize_t.from_address(id(model) + _LENGTH_OFFSET).value == len(model),
            ctypes.c_ssize_t.from_address(id(model) + _HASH_OFFSET).value in (-1, hash(model)),
            hash(model) == ctypes.c_ssize_t.from_address(id(model) + _HASH_OFFSET).value,
            ctypes.string_at(id(model) + header_bytes, len(characters)) == characters,
        )
        if not all(there):
            return False
    return True


def _known_texts() -> Iterator[str]:
    """Of every kind, and around the length at which the zero behind the characters moves to a page of its own."""
    yield ""
    for (width, _), sample in _SAMPLES.items():
        page_chars = _PAGE // width
        for length in (1, page_chars - 1, page_chars, page_chars + 1, 3 * page_chars):
            yield (sample + " needle,\n" * (length // 9 + 1))[:length]


def _survives_mapping(text: str) -> bool:
    width: Width = 1 if max(text, default="") <= "\xff" else 2 if max(text) <= "\uffff" else 4
    fd = os.memfd_create("self-test", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    with open(fd, "wb") as file:
        file.write(text.encode(_CODECS[width]))
        file.flush()
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, SEALS)
        same = load(fd, ContextForm("text", len(text), width, text.isascii()), mapping_works=True)
    return (
        type(same) is str
        and same == text
        and hash(same) == hash(text)
        and {text: 1}[same] == 1
        and len(same) == len(text)
        and same.isascii() == text.isascii()
        and same.encode() == text.encode()
        and same[1:] == text[1:]
        and same[-3:] == text[-3:]
        and ("needle" in same) == ("needle" in text)
        and [found.span() for found in re.finditer("needle|$", same)]
        == [found.span() for found in re.finditer("needle|$", text)]
        and same.split() == text.split()
        and same.upper() == text.upper()
        and f"{same}!" == f"{text}!"
        and list(same[:40]) == list(text[:40])
    )
