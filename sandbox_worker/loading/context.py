"""A context, from the sealed memfd that the orchestrator wrote to the Python value that model code sees.

Text is no heap object: its characters stay in the memfd, and only headers that point to them are made (`strings`). So a
gigabyte costs a worker neither time nor memory, and ten thousand texts cost it what their headers do. Where that does
not work (`self_test`), they are copied into ordinary ones. JSON becomes ordinary objects. For little-endian machines,
like the rest of the sandbox.
"""

import contextlib
import ctypes
import fcntl
import gc
import json
import mmap
import os
from array import array
from collections.abc import Callable, Iterator, Sequence
from itertools import accumulate
from typing import Any

import msgspec

from sandbox_worker.loading.form import ENTRY_BYTES, KINDS, SEALS, ContextForm, ContextPiece, span_bytes
from sandbox_worker.loading.strings import MappedBytes, mapped_strings

_from_characters = ctypes.pythonapi.PyUnicode_FromKindAndData
_from_characters.restype = ctypes.py_object
_from_characters.argtypes = [ctypes.c_int, ctypes.c_void_p, ctypes.c_ssize_t]

SMALL_BYTES = 1 << 14
"""A text that is copied in less time than it is mapped, and that each REPL may as well have to itself."""


NO_MEMORY = "there is no memory left for it"


class ContextBroken(Exception):
    """What a descriptor holds is not the context that was announced. The message is one sentence."""


Decode = Callable[[bytes], Any]
"""Makes a value of what a context of kind `value` holds. Raises ContextBroken."""


class Undecoded:
    """In the place of a context of kind `value`. What decodes it may import packages, which init is not to do.

    Args:
        mapped: What it is decoded from.
    """

    def __init__(self, mapped: MappedBytes) -> None:
        self._mapped = mapped
        self._holder: dict[str, Any] = {}
        self._key = ""

    def lies_in(self, holder: dict[str, Any], key: str) -> None:
        """Remember where it lies."""
        self._holder, self._key = holder, key

    def decode(self, decode: Decode) -> None:
        """Put the value in its place. Raises: ContextBroken."""
        try:
            data = self._mapped.copied()
        except MemoryError:
            raise ContextBroken(NO_MEMORY) from None
        self._holder[self._key] = decode(data)
        self._mapped.unmap()


def load(fd: int, form: ContextForm, mapping_works: bool) -> Any:
    """The context that `fd` holds. `fd` stays open, and may be closed at once.

    A mapped text lives as long as its process. After a context of many objects, `gc.freeze()` keeps the collector from
    touching (and so copying, after a fork) the pages that it lies on.

    Args:
        fd: A memfd with all four seals.
        mapping_works: What `mapping_works()` said in this interpreter. If not, texts are copied into ordinary ones.

    Returns:
        The value; an `Undecoded` in the place of one of kind `value`.

    Raises:
        ContextBroken: It is not sealed, its size is not what `form` says, it is not JSON, its texts do not end
            where it says, or there is no memory for it.
    """
    _refuse_all_but(fd, form)
    strings = mapped_strings if mapping_works else _copied_strings
    try:
        match form.kind:
            case "json":
                return _decoded(fd, 0, Any)
            case "value":
                return Undecoded(MappedBytes(fd, form.size_bytes))
            case "text" if form.size_bytes <= SMALL_BYTES:
                return _from_characters(form.width, os.pread(fd, form.length * form.width, 0), form.length)
            case "text":
                return strings(fd, form.size_bytes, bytes([0 if form.ascii else form.width]), [form.length], [0])[0]
            case "texts":
                lengths, kinds, starts, names = index(fd, form)
                texts = strings(fd, form.length, kinds, lengths, starts)
                return texts if names is None else dict(zip(names, texts, strict=True))
    except (OSError, MemoryError) as error:
        reason = getattr(error, "strerror", None) or "out of memory"
        raise ContextBroken(
            f"a context of {form.size_bytes:,} bytes cannot be brought into memory: {reason}"
        ) from error


def load_into(
    contexts: dict[str, Any], name: str, fd: int, piece: ContextPiece, mapping_works: bool, decode: Decode | None = None
) -> Undecoded | None:
    """Load one piece of the context called `name`: all of it, or one value of the dict that it is.

    Args:
        decode: Decodes one of kind `value` at once.

    Returns:
        What is still to be decoded, or None.

    Raises:
        ContextBroken: As for `load` and `decode`.
    """
    value = load(fd, piece.form, mapping_works)
    holder, key = (contexts, name) if piece.name is None else (contexts.setdefault(name, {}), piece.name)
    holder[key] = value
    if not isinstance(value, Undecoded):
        return None
    value.lies_in(holder, key)
    if decode is None:
        return value
    value.decode(decode)
    return None


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
    if (form.kind == "texts") != bool(form.texts) or (form.names_bytes and not form.texts):
        raise ContextBroken(f"a context of kind {form.kind!r} cannot have {form.texts:,} texts")
    if form.width != 1 and (form.ascii or form.kind != "text"):
        raise ContextBroken(f"a context of kind {form.kind!r} (ascii: {form.ascii}) cannot be {form.width} bytes wide")


# -- texts -----------------------------------------------------------------------------------------------------------


def index(fd: int, form: ContextForm) -> "tuple[array[int], bytes, array[int], list[str] | None]":
    """Length, kind and start of each text, and their names, if they have any."""
    columns = os.pread(fd, form.texts * ENTRY_BYTES, form.length)
    lengths, kinds = array("Q", columns[: -form.texts]), columns[-form.texts :]
    if not set(kinds) <= set(KINDS):
        raise ContextBroken(f"the context's texts are said to be of the kinds {sorted(set(kinds))}")
    try:
        starts = array("Q", accumulate(map(span_bytes, lengths, kinds), initial=0))
    except OverflowError:
        raise ContextBroken("the context's texts are said to be longer than any memory") from None
    if (end := starts.pop()) != form.length:
        raise ContextBroken(f"the context's texts end at byte {end:,} by their lengths, at {form.length:,} in fact")
    try:
        names: list[str] | None = _decoded(fd, form.size_bytes - form.names_bytes, list[str] | None)
    except ContextBroken as error:
        raise ContextBroken(f"the names of the context's texts are broken: {error}") from error
    if names is not None and len(names) != form.texts:
        raise ContextBroken(f"the context has {form.texts:,} texts and {len(names):,} names")
    return lengths, kinds, starts, names


def _copied_strings(fd: int, size_bytes: int, kinds: bytes, lengths: Sequence[int], starts: Sequence[int]) -> list[str]:
    # Not a codec: UTF-16 would join two lone surrogates that stand side by side into one character.
    with mmap.mmap(fd, size_bytes, access=mmap.ACCESS_COPY) as view:
        first = ctypes.c_char.from_buffer(view)
        base = ctypes.addressof(first)
        try:
            return [
                _from_characters(kind or 1, base + start, length)
                for kind, length, start in zip(kinds, lengths, starts, strict=True)
            ]
        finally:
            del first  # a mapping with an exported buffer cannot be closed


# -- JSON ------------------------------------------------------------------------------------------------------------


def _decoded(fd: int, start: int, wanted: Any) -> Any:
    """What lies behind the first `start` bytes."""
    if os.fstat(fd).st_size == start:  # and mmap would refuse to map nothing
        raise ContextBroken("the context is not JSON: it is empty")
    with mmap.mmap(fd, 0, prot=mmap.PROT_READ, flags=mmap.MAP_PRIVATE) as view, memoryview(view)[start:] as data:
        try:
            with _no_collection():
                try:
                    return msgspec.json.decode(data, type=wanted)
                except (msgspec.MsgspecError, UnicodeError):
                    # msgspec refuses lone surrogates, which a `str` may hold, in both forms: raw and escaped.
                    value = json.loads(str(data, "utf-8", "surrogatepass"), parse_constant=_refuse_constant)
                    return msgspec.convert(value, wanted)
        except RecursionError:
            raise ContextBroken("the context is nested too deep for JSON") from None
        except (ValueError, msgspec.MsgspecError) as error:
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
