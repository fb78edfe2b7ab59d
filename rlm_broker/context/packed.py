"""Compressed bytes, recognised by their beginning and read in bounded pieces."""

import bz2
import importlib
import lzma
import re
import sys
import zlib
from collections.abc import Callable, Iterable, Iterator
from typing import Any, Final, NamedTuple, Protocol

from rlm_broker.context.found import FileUnfit
from rlm_broker.context.opening import PIECE_BYTES
from rlm_broker.errors import ContextRefused

MAX_UNPACKED_BYTES: Final = 1 << 32
"""Bytes that all compressed files and documents of one context may unpack to; a context with more is refused.

The same bound holds for what is stored of them, which takes up to 4 bytes for each character.
"""
MAX_MEMBERS: Final = 100_000
"""Entries of all archives of one context together; a context with more is refused."""
DAMAGED: Final = "damaged"
"""Reason for files that cannot be unpacked."""
_XZ_MEMORY_BYTES: Final = 1 << 27
"""Memory that `lzma` may take for one stream; a stream that needs more is refused."""
_ZSTD_WINDOW_BYTES: Final = 1 << 27
"""Window of a zstd stream, in bytes; a stream that needs a larger one is refused."""
_ZSTD_FEED_BYTES: Final = 1 << 8
"""Bytes given to the package `zstandard` at a time. It has no bound for its output: four bytes can become 128 KB."""


class Reader:
    """Bytes that come in pieces, none of them empty. They can be looked at before they are read."""

    def __init__(self, pieces: Iterable[bytes]) -> None:
        self._pieces = iter(pieces)
        self._piece = b""
        self._at = 0

    def peek(self, size: int) -> bytes:
        """Return the next `size` bytes without reading them; fewer at the end."""
        while len(self._piece) - self._at < size and (more := next(self._pieces, b"")):
            self._piece, self._at = self._piece[self._at :] + more, 0
        return self._piece[self._at : self._at + size]

    def read(self, size: int) -> bytes:
        """Return the next `size` bytes; fewer only at the end."""
        found = self.peek(size)
        self._at += len(found)
        return found

    def unread(self, size: int) -> None:
        """Put the last `size` bytes of the last read back."""
        self._at -= size

    def __iter__(self) -> Iterator[bytes]:
        if left := self._piece[self._at :]:
            self._piece, self._at = b"", 0
            yield left
        yield from self._pieces


class Unpacking:
    """Bounds of what one context unpacks."""

    def __init__(self) -> None:
        self._bytes_left = self._stored_bytes_left = MAX_UNPACKED_BYTES
        self._members_left = MAX_MEMBERS

    def counted(self, pieces: Iterable[bytes], given: str) -> Iterator[bytes]:
        """Yield the pieces, and count their bytes.

        Raises:
            ContextRefused: The bytes, with all that were counted before, are too many.
        """
        for piece in pieces:
            self._bytes_left -= len(piece)
            if self._bytes_left < 0:
                raise _too_much(given, "unpacked")
            yield piece

    def count_stored(self, size_bytes: int, given: str) -> None:
        """Count bytes that are stored of unpacked texts.

        Raises:
            ContextRefused: The bytes, with all that were counted before, are too many.
        """
        self._stored_bytes_left -= size_bytes
        if self._stored_bytes_left < 0:
            raise _too_much(given, "stored, each character as wide as the widest of its text")

    def count_members(self, number: int, given: str) -> None:
        """Count entries of an archive.

        Raises:
            ContextRefused: The entries of all archives are too many.
        """
        self.require_members(number, given)
        self._members_left -= number

    def require_members(self, number: int, given: str) -> None:
        """Check that an archive may have so many entries more.

        Raises:
            ContextRefused: The entries of all archives would be too many.
        """
        if number > self._members_left:
            raise ContextRefused(
                f"{given}: the archives of a context may have {MAX_MEMBERS:,} entries together: unpack what is needed "
                "yourself, or leave it out"
            )


def _too_much(given: str, done: str) -> ContextRefused:
    return ContextRefused(
        f"{given}: the compressed files and documents of a context may be {MAX_UNPACKED_BYTES:,} bytes together when "
        f"they are {done}: unpack what is needed yourself, or leave it out"
    )


class Decompressor(Protocol):
    """Interface of the decompressors of `bz2`, `lzma` and, from Python 3.14 on, `compression.zstd`."""

    @property
    def eof(self) -> bool: ...
    @property
    def needs_input(self) -> bool: ...
    @property
    def unused_data(self) -> bytes: ...
    def decompress(self, data: bytes, max_length: int = -1) -> bytes: ...


class _Gzip:
    """Decompressor by `zlib`."""

    def __init__(self) -> None:
        self._zlib = zlib.decompressobj(16 + zlib.MAX_WBITS)

    @property
    def eof(self) -> bool:
        return self._zlib.eof

    @property
    def needs_input(self) -> bool:
        return not self._zlib.unconsumed_tail

    @property
    def unused_data(self) -> bytes:
        return self._zlib.unused_data

    def decompress(self, data: bytes, max_length: int = -1) -> bytes:
        return self._zlib.decompress(self._zlib.unconsumed_tail + data, max_length)


class _Zstandard:
    """Decompressor by the package `zstandard`. It does not bound its output, so it is given little input at a time."""

    needs_input = True

    def __init__(self, package: Any) -> None:
        self._object = package.ZstdDecompressor(max_window_size=_ZSTD_WINDOW_BYTES).decompressobj()

    @property
    def eof(self) -> bool:
        return bool(self._object.eof)

    @property
    def unused_data(self) -> bytes:
        return bytes(self._object.unused_data)

    def decompress(self, data: bytes, max_length: int = -1) -> bytes:  # noqa: ARG002 - as the others have it
        return bytes(self._object.decompress(data))


def _zstd() -> Decompressor:
    if sys.version_info >= (3, 14):
        found: Decompressor = importlib.import_module("compression.zstd").ZstdDecompressor()
        return found
    return _Zstandard(importlib.import_module("zstandard"))


class Packing(NamedTuple):
    """A way to compress.

    Attributes:
        begins: Matches the beginning of what is compressed so.
        feed_bytes: Bytes that the decompressor is given at a time.
    """

    name: str
    begins: re.Pattern[bytes]
    decompressor: Callable[[], Decompressor]
    feed_bytes: int = 1 << 14


_PACKINGS: Final = (
    Packing("gzip", re.compile(rb"\x1f\x8b\x08"), _Gzip),
    Packing("bzip2", re.compile(rb"BZh[1-9](1AY&SY|\x17rE8P\x90)"), bz2.BZ2Decompressor),
    Packing("xz", re.compile(rb"\xfd7zXZ\0"), lambda: lzma.LZMADecompressor(lzma.FORMAT_XZ, _XZ_MEMORY_BYTES)),
    Packing("zstd", re.compile(rb"\x28\xb5\x2f\xfd"), _zstd, _ZSTD_FEED_BYTES),
)
BEGIN_BYTES: Final = 10
"""Bytes that are needed to recognise a packing."""


def packing_of(beginning: bytes) -> Packing | None:
    """Return the way in which bytes with this beginning are compressed, or None."""
    return next((packing for packing in _PACKINGS if packing.begins.match(beginning)), None)


def unpacked(reader: Reader, packing: Packing, given: str) -> Iterator[bytes]:
    """Yield the unpacked bytes, in pieces. Several streams in a row are one, and zeros may follow them.

    Raises:
        FileUnfit: The bytes are cut or damaged, other bytes follow them, or a library is not installed.
    """
    try:
        while packing_of(reader.peek(BEGIN_BYTES)) is packing:
            yield from _stream(reader, packing)
            _pass_zeros(reader)
    except (FileUnfit, GeneratorExit):
        raise
    except ImportError:
        sentence = f"{given} is compressed by zstd: pip install 'rlm-broker[zstd]', or unpack it first"
        raise FileUnfit("zstd, which needs rlm-broker[zstd]", sentence) from None
    except Exception as error:  # noqa: BLE001 - each library raises errors of its own for hostile bytes
        sentence = f"{given} is damaged: it cannot be unpacked as {packing.name} ({error!s:.100})"
        raise FileUnfit(DAMAGED, sentence) from None
    if reader.peek(1):
        raise FileUnfit(DAMAGED, f"{given} is damaged: there is something else behind its {packing.name} stream")


def _stream(reader: Reader, packing: Packing) -> Iterator[bytes]:
    """Yield the unpacked bytes of one stream. The bytes behind it stay unread."""
    one = packing.decompressor()
    while not one.eof:
        data = reader.read(packing.feed_bytes) if one.needs_input else b""
        if not data and one.needs_input:
            raise EOFError("its stream has no end")
        if piece := one.decompress(data, PIECE_BYTES):
            yield piece
    reader.unread(len(one.unused_data))


def _pass_zeros(reader: Reader) -> None:
    while zeros := len(ahead := reader.peek(PIECE_BYTES)) - len(ahead.lstrip(b"\0")):
        reader.read(zeros)
