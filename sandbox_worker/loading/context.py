"""Loading of a context: from the orchestrator's sealed memfd to a Python value for model code.

The characters of a text stay in the memfd; only a header with a pointer to them is made (`strings`). So a gigabyte of
text costs a worker neither time nor memory, and ten thousand texts cost their headers alone. If this interpreter does
not work with mapped strings (`self_test`), then texts are copied into ordinary strings. JSON becomes ordinary objects.

This code expects a little-endian machine, like the rest of the sandbox.
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
"""Maximum bytes of a copied text: up to here a copy takes less time than a mapping, and little memory."""


NO_MEMORY = "there is no memory left for it"
"""Reason in an error message, for a context that cannot be decoded for lack of memory."""


class ContextBroken(Exception):
    """A descriptor does not hold the announced context, or it cannot be loaded. The message is one sentence."""


Decode = Callable[[bytes], Any]
"""Decoder of the bytes of a context of kind `value`. It raises ContextBroken."""


class Undecoded:
    """Placeholder for a context of kind `value`, until the REPL decodes it.

    Init does not decode: a table has pandas imported, and init, pid 1 of the worker, must import no package.

    Args:
        mapped: Bytes to decode.
    """

    def __init__(self, mapped: MappedBytes) -> None:
        self._mapped = mapped
        self._holder: dict[str, Any] = {}
        self._key = ""

    def lies_in(self, holder: dict[str, Any], key: str) -> None:
        """Set the dict and the key where the value shall stand."""
        self._holder, self._key = holder, key

    def decode(self, decode: Decode) -> None:
        """Decode the value, put it where the placeholder stands, and unmap the bytes.

        Raises:
            ContextBroken: The value cannot be decoded.
        """
        try:
            data = self._mapped.copied()
        except MemoryError:
            raise ContextBroken(NO_MEMORY) from None
        self._holder[self._key] = decode(data)
        self._mapped.unmap()


def load(fd: int, form: ContextForm, mapping_works: bool) -> Any:
    """Return the content of a memfd.

    `fd` stays open; the caller may close it at once. A mapped text lives as long as its process. After loading many
    objects, call `gc.freeze()`: otherwise the collector writes to their headers, and so copies their pages after a
    fork.

    Args:
        fd: Memfd with all four seals.
        form: Layout of the content.
        mapping_works: Result of `self_test.mapping_works()` in this interpreter. If False, texts are copied.

    Returns:
        The value; for kind `value` an `Undecoded`.

    Raises:
        ContextBroken: The memfd is not sealed, or its size differs from `form`. Or its content is not JSON, or its
            columns contradict each other. Or there is not enough memory.
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
        raise ContextBroken(f"a context of {form.size_bytes:,} bytes cannot be loaded into memory: {reason}") from error


def load_into(
    contexts: dict[str, Any], name: str, fd: int, piece: ContextPiece, mapping_works: bool, decode: Decode | None = None
) -> Undecoded | None:
    """Load one piece of the context called `name`: the whole context, or one value of a dict.

    Args:
        contexts: Name of a context → its value. The piece is added here.
        name: Name of the context.
        fd: Memfd of the piece.
        piece: Description of the piece.
        mapping_works: See `load`.
        decode: Decoder applied to a piece of kind `value` at once; None leaves it undecoded.

    Returns:
        The placeholder that must still be decoded, or None.

    Raises:
        ContextBroken: See `load` and `Undecoded.decode`.
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
    # Check the seals first: an unsealed file may still shrink, and access to a mapping beyond its end raises SIGBUS.
    try:
        seals = fcntl.fcntl(fd, fcntl.F_GET_SEALS)
    except OSError as error:
        raise ContextBroken(f"the context's descriptor is not a memfd: {error.strerror}") from error
    if seals & SEALS != SEALS:
        raise ContextBroken(f"the context's memfd has the seals {seals:#x}, expected all of {SEALS:#x}")
    if (size_bytes := os.fstat(fd).st_size) != form.size_bytes:
        raise ContextBroken(f"the context's memfd has {size_bytes:,} bytes, expected {form.size_bytes:,}")
    if (form.kind == "texts") != bool(form.texts) or (form.names_bytes and not form.texts):
        raise ContextBroken(f"a context of kind {form.kind!r} cannot have {form.texts:,} texts")
    if form.width != 1 and (form.ascii or form.kind != "text"):
        raise ContextBroken(f"a context of kind {form.kind!r} (ascii: {form.ascii}) cannot be {form.width} bytes wide")


# -- texts -----------------------------------------------------------------------------------------------------------


def index(fd: int, form: ContextForm) -> "tuple[array[int], bytes, array[int], list[str] | None]":
    """Return length, kind and start of each text, and their names or None.

    Raises:
        ContextBroken: The columns contradict each other or the size of the memfd.
    """
    columns = os.pread(fd, form.texts * ENTRY_BYTES, form.length)
    lengths, kinds = array("Q", columns[: -form.texts]), columns[-form.texts :]
    if not set(kinds) <= set(KINDS):
        raise ContextBroken(f"the context's texts have the kinds {sorted(set(kinds))}, expected some of {KINDS}")
    try:
        starts = array("Q", accumulate(map(span_bytes, lengths, kinds), initial=0))
    except OverflowError:
        raise ContextBroken("the context's texts have lengths that exceed any memory") from None
    if (end := starts.pop()) != form.length:
        raise ContextBroken(f"the context's texts end at byte {end:,} by their lengths, expected {form.length:,}")
    try:
        names: list[str] | None = _decoded(fd, form.size_bytes - form.names_bytes, list[str] | None)
    except ContextBroken as error:
        raise ContextBroken(f"the names of the context's texts are broken: {error}") from error
    if names is not None and len(names) != form.texts:
        raise ContextBroken(f"the context has {form.texts:,} texts and {len(names):,} names")
    return lengths, kinds, starts, names


def _copied_strings(fd: int, size_bytes: int, kinds: bytes, lengths: Sequence[int], starts: Sequence[int]) -> list[str]:
    # A codec would not do: UTF-16 joins two adjacent lone surrogates into one character.
    with mmap.mmap(fd, size_bytes, access=mmap.ACCESS_COPY) as view:
        first = ctypes.c_char.from_buffer(view)
        base = ctypes.addressof(first)
        try:
            return [
                _from_characters(kind or 1, base + start, length)
                for kind, length, start in zip(kinds, lengths, starts, strict=True)
            ]
        finally:
            del first  # `mmap.close` raises BufferError while a ctypes object uses its buffer


# -- JSON ------------------------------------------------------------------------------------------------------------


def _decoded(fd: int, start: int, wanted: Any) -> Any:
    """Decode the JSON after the first `start` bytes."""
    if os.fstat(fd).st_size == start:  # mmap refuses to map 0 bytes, so this case has an error of its own
        raise ContextBroken("the context is not JSON: it is empty")
    with mmap.mmap(fd, 0, prot=mmap.PROT_READ, flags=mmap.MAP_PRIVATE) as view, memoryview(view)[start:] as data:
        try:
            with _no_collection():
                try:
                    return msgspec.json.decode(data, type=wanted)
                except (msgspec.MsgspecError, UnicodeError):
                    # msgspec refuses lone surrogates, raw and escaped. A `str` may hold them, and `json` reads them.
                    value = json.loads(str(data, "utf-8", "surrogatepass"), parse_constant=_refuse_constant)
                    return msgspec.convert(value, wanted)
        except RecursionError:
            raise ContextBroken("the context is JSON that is nested too deeply") from None
        except (ValueError, msgspec.MsgspecError) as error:
            raise ContextBroken(f"the context is not JSON: {error}") from error


def _refuse_constant(name: str) -> object:
    raise ValueError(f"{name} is not a JSON value")


@contextlib.contextmanager
def _no_collection() -> Iterator[None]:
    """Switch the garbage collector off meanwhile.

    Decoding makes millions of objects and drops none. Each allocation may start the collector. It would take three
    times as long as the decoding itself.
    """
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


class Preloaded(msgspec.Struct):
    """Objects in a worker's memory at its fork.

    Attributes:
        seed: Seed of `random` and of numpy's global generator in each REPL; None for a different one in each.
        contexts: Name of a context → its value.
        variables: Name → value, for the variables of the set-up code.
        undecoded: Parts of contexts that the REPL must still decode.
    """

    seed: int | None = None
    contexts: dict[str, Any] = msgspec.field(default_factory=dict)
    variables: dict[str, Any] = msgspec.field(default_factory=dict)
    undecoded: list[Undecoded] = msgspec.field(default_factory=list)
