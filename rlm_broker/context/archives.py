"""Archives, read from start to end: member after member, in memory, and never onto a disk.

Names in an archive are only shown, and no path is opened by them. Links and special files are left out.

`tarfile` and `zipfile` trust the sizes that an archive states. `_Forward` and `_Bounded` stand between them and the
file, so that each read is bounded, and a tar is never read backwards.
"""

import bz2
import importlib
import lzma
import os
import re
import stat
import sys
import tarfile
import zipfile
import zlib
from collections.abc import Callable, Iterable, Iterator
from typing import Any, Final, NamedTuple, Protocol

from msgspec import Struct

from rlm_broker.context.found_files import PIECE_BYTES, FileUnfit, unsteering
from rlm_broker.errors import ContextRefused

MAX_UNPACKED_BYTES: Final = 1 << 32
"""Unpacked bytes of all compressed files and documents of one context; a context with more is refused. The same bound
holds for their stored bytes, up to 4 for each character."""
MAX_MEMBERS: Final = 100_000
"""Entries of all archives of one context together; a context with more is refused."""
DAMAGED: Final = "damaged"
"""Reason for damaged files."""
_XZ_MEMORY_BYTES: Final = 1 << 27
"""Bytes of memory that `lzma` may take for one stream; a stream that needs more is refused."""
_ZSTD_WINDOW_BYTES: Final = 1 << 27
"""Window of a zstd stream, in bytes; a stream with a larger one is refused."""
_ZSTD_FEED_BYTES: Final = 1 << 8
"""Bytes given to the package `zstandard` at a time. It has no bound for its output: four bytes can become 128 KB."""


class ByteReader:
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
        """Yield the pieces, and count their bytes. Raise ContextRefused if all counted bytes together are too many."""
        for piece in pieces:
            self._bytes_left -= len(piece)
            if self._bytes_left < 0:
                raise _too_much(given, "unpacked")
            yield piece

    def count_stored(self, size_bytes: int, given: str) -> None:
        """Count stored bytes of unpacked texts. Raise ContextRefused if all of them together are too many."""
        self._stored_bytes_left -= size_bytes
        if self._stored_bytes_left < 0:
            raise _too_much(given, "stored, each character as wide as the widest of its text")

    def count_members(self, number: int, given: str) -> None:
        """Count entries of an archive. Raise ContextRefused if all of them together are too many."""
        self.require_members(number, given)
        self._members_left -= number

    def require_members(self, number: int, given: str) -> None:
        """Raise ContextRefused unless an archive may have so many entries more."""
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
    """A way to compress: what it `begins` with, and how many bytes its decompressor is given at a time."""

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
_PACKED_BEGIN_BYTES: Final = 10
"""Bytes needed to recognise a packing."""


def packing_of(beginning: bytes) -> Packing | None:
    """Return the way in which bytes with this beginning are compressed, or None."""
    return next((packing for packing in _PACKINGS if packing.begins.match(beginning)), None)


def unpacked(reader: ByteReader, packing: Packing, given: str) -> Iterator[bytes]:
    """Yield the unpacked bytes, in pieces. Several streams in a row are one, and zeros may follow them. Raise FileUnfit
    if they are cut or damaged, if other bytes follow, or without a library for them."""
    try:
        while packing_of(reader.peek(_PACKED_BEGIN_BYTES)) is packing:
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


def _stream(reader: ByteReader, packing: Packing) -> Iterator[bytes]:
    """Yield the unpacked bytes of one stream. The bytes behind it stay unread."""
    one = packing.decompressor()
    while not one.eof:
        data = reader.read(packing.feed_bytes) if one.needs_input else b""
        if not data and one.needs_input:
            raise EOFError("its stream has no end")
        if piece := one.decompress(data, PIECE_BYTES):
            yield piece
    reader.unread(len(one.unused_data))


def _pass_zeros(reader: ByteReader) -> None:
    while zeros := len(ahead := reader.peek(PIECE_BYTES)) - len(ahead.lstrip(b"\0")):
        reader.read(zeros)


BEGIN_BYTES: Final = 512
"""Bytes needed to recognise an archive."""
MAX_HEADER_BYTES: Final = 1 << 14
"""Bytes of the header of a tar's member. A longer one is damaged or hostile: Python would search it for minutes."""
MAX_GLOBAL_HEADER_CHARS: Final = 1 << 13
"""Characters of all global headers of a tar; beyond it the tar is refused. Python copies them for each member."""
MAX_DIRECTORY_BYTES: Final = 1 << 24
"""Bytes of the directory of a zip; beyond it the zip is refused. Each member in it takes memory."""
MAX_NAME_CHARS: Final = 1 << 10
"""Characters of a member's path; a member with a longer one is left out. All names of a context are held in memory."""
_ZIP_METHODS: Final = (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED, zipfile.ZIP_BZIP2)
"""Compression methods in use. LZMA is not one: it takes as much memory as the member states."""
_ENCRYPTED: Final = 1
"""Bit of a zip member's flags that marks it as encrypted."""
_END_BYTES: Final = 22 + (1 << 16) + 56 + 20
"""Bytes at the end of a zip with its end record: with the longest comment, the record of ZIP64 and its locator."""
_IN_ZIP64: Final = 0xFFFF
"""Number of entries stated by a zip whose record of ZIP64 has the true one."""
_LONG_NAME: Final = f"a name of more than {MAX_NAME_CHARS:,} characters in an archive"


class Member(Struct, frozen=True):
    """A file in an archive. Read it before the next one is asked for.

    Attributes:
        name: Its path in the archive, as it can be shown.
        unfit: Reason why it is left out, or an empty text.
        was_packed: Whether it was compressed, so that its stored bytes count against the bound of unpacked ones.
    """

    name: str
    pieces: Iterator[bytes]
    unfit: str = ""
    was_packed: bool = False


def is_zip(beginning: bytes) -> bool:
    """Whether bytes with this beginning are a zip."""
    return beginning.startswith((b"PK\x03\x04", b"PK\x05\x06"))


def is_tar(beginning: bytes, name: str) -> bool:
    """Whether bytes with this beginning are a tar. A tar of the oldest kind has no mark, so its name counts, too."""
    if beginning[257:262] == b"ustar":
        return True
    if ".tar" not in name and not name.endswith((".tgz", ".tbz2", ".txz", ".tzst")):
        return False
    try:
        tarfile.TarInfo.frombuf(beginning, "utf-8", "surrogateescape")
    except tarfile.HeaderError:
        return False
    return True


# -- tar -------------------------------------------------------------------------------------------------------------


def tar_members(reader: ByteReader, given: str, unpacking: Unpacking, was_packed: bool) -> Iterator[Member]:
    """Yield the files of a tar in their order. Raise FileUnfit if it is damaged or cut, maybe after any number of
    members, and ContextRefused if the archives of the context have too many."""
    forward: Any = _Forward(reader, given)
    global_chars = 0
    try:
        tar = tarfile.TarFile(fileobj=forward)
        while (entry := tar.next()) is not None:
            vars(tar)["members"].clear()  # `tarfile` would keep every member in memory
            global_chars += sum(len(key) + len(value) for key, value in tar.pax_headers.items())
            if global_chars > MAX_GLOBAL_HEADER_CHARS:
                raise tarfile.ReadError(f"global headers of more than {MAX_GLOBAL_HEADER_CHARS:,} characters")
            vars(tar)["pax_headers"].clear()  # global headers are not used here, and are copied for each member
            unpacking.count_members(1, given)
            if entry.isdir():
                continue
            name = _shown(entry.name)
            if unfit := _unfit_of_tar(entry):
                yield _unfit(name, unfit)
            else:
                yield Member(name, forward.data(entry.size), was_packed=was_packed)
    except (tarfile.TarError, ValueError, OverflowError, RecursionError, EOFError) as error:
        raise FileUnfit(DAMAGED, f"{given} is damaged: it cannot be read as tar ({error!s:.100})") from None


def _unfit_of_tar(entry: tarfile.TarInfo) -> str:
    if entry.type not in (tarfile.REGTYPE, tarfile.AREGTYPE) or entry.issparse():
        return "not a regular file"
    return _LONG_NAME if len(entry.name) > MAX_NAME_CHARS else ""


class _Forward:
    """File for `tarfile` that reads headers of bounded size, and only goes forward."""

    def __init__(self, reader: ByteReader, given: str) -> None:
        self._reader = reader
        self._given = given
        self._at = 0

    def read(self, size: int) -> bytes:
        if not 0 <= size <= MAX_HEADER_BYTES:
            raise tarfile.ReadError(f"a header of {size:,} bytes")
        data = self._reader.read(size)
        self._at += len(data)
        return data

    def tell(self) -> int:
        return self._at

    def seek(self, position: int) -> None:
        if position < self._at:
            raise tarfile.ReadError("it refers to bytes before the present position")
        for _ in self.data(position - self._at):
            pass

    def data(self, size: int) -> Iterator[bytes]:
        """Yield the next `size` bytes."""
        while size:
            piece = self._reader.read(min(size, PIECE_BYTES))
            if not piece:
                raise FileUnfit(DAMAGED, f"{self._given} is cut: the data of a member has no end")
            self._at += len(piece)
            size -= len(piece)
            yield piece


# -- zip -------------------------------------------------------------------------------------------------------------


def zip_members(fd: int, given: str, unpacking: Unpacking) -> Iterator[Member]:
    """Yield the files of a zip in the order of its directory. `fd` is a descriptor of a regular file. Raise as
    `tar_members` does."""
    # Before the directory is read: 100,000 entries take a second. What an end record states may be untrue.
    unpacking.require_members(_stated_entries(fd), given)
    try:
        with zipfile.ZipFile(_Bounded(fd)) as archive:
            unpacking.count_members(len(archive.infolist()), given)
            for entry in archive.infolist():
                path = entry.filename.replace("\\", "/")  # some tools on Windows write backslashes, against the format
                if path.endswith("/"):
                    continue
                name = _shown(path)
                if unfit := _unfit_of_zip(entry):
                    yield _unfit(name, unfit)
                else:
                    data = unpacking.counted(_zip_data(archive, entry, given), given)
                    yield Member(name, data, was_packed=True)
    except (zipfile.BadZipFile, NotImplementedError, ValueError, OverflowError, OSError) as error:
        raise FileUnfit(DAMAGED, f"{given} is damaged: it cannot be read as zip ({error!s:.100})") from None


def _stated_entries(fd: int) -> int:
    """Return the number of entries that the end record of a zip states; 0 if none is found."""
    end = os.pread(fd, _END_BYTES, max(0, os.fstat(fd).st_size - _END_BYTES))
    at = end.rfind(b"PK\x05\x06")
    if at < 0 or len(end) < at + 12:
        return 0
    entries = int.from_bytes(end[at + 10 : at + 12], "little")
    if entries == _IN_ZIP64 and (zip64 := end.rfind(b"PK\x06\x06", 0, at)) >= 0:
        entries = int.from_bytes(end[zip64 + 32 : zip64 + 40], "little")
    return entries


def _unfit_of_zip(entry: zipfile.ZipInfo) -> str:
    if entry.flag_bits & _ENCRYPTED:
        return "encrypted"
    mode = entry.external_attr >> 16
    if stat.S_IFMT(mode) not in (0, stat.S_IFREG):
        return "not a regular file"
    if entry.compress_type not in _ZIP_METHODS:
        return "compressed in a way that is not read"
    return _LONG_NAME if len(entry.filename) > MAX_NAME_CHARS else ""


def _zip_data(archive: zipfile.ZipFile, entry: zipfile.ZipInfo, given: str) -> Iterator[bytes]:
    try:
        with archive.open(entry) as file:
            while piece := file.read(PIECE_BYTES):
                yield piece
    except GeneratorExit:
        raise
    except Exception as error:  # noqa: BLE001 - each decompressor raises errors of its own for hostile bytes
        sentence = f"{given} is damaged: its member {_shown(entry.filename)} cannot be read ({error!s:.100})"
        raise FileUnfit(DAMAGED, sentence) from None


class _Bounded:
    """Regular file for `zipfile` with bounded reads."""

    def __init__(self, fd: int) -> None:
        self._fd = fd
        self._at = 0

    def read(self, size: int = -1) -> bytes:
        left = max(0, os.fstat(self._fd).st_size - self._at)
        wanted = left if size < 0 else min(size, left)
        if wanted > MAX_DIRECTORY_BYTES:
            raise zipfile.BadZipFile(f"its directory is more than {MAX_DIRECTORY_BYTES:,} bytes")
        data = os.pread(self._fd, wanted, self._at)
        self._at += len(data)
        return data

    def seek(self, position: int, whence: int = os.SEEK_SET) -> int:
        base = {os.SEEK_SET: 0, os.SEEK_CUR: self._at, os.SEEK_END: os.fstat(self._fd).st_size}[whence]
        if base + position < 0:
            raise OSError("it refers to bytes before its beginning")  # `zipfile` relies on the OSError of a real file
        self._at = base + position
        return self._at

    def tell(self) -> int:
        return self._at

    def seekable(self) -> bool:
        return True


def _unfit(name: str, reason: str) -> Member:
    return Member(name, iter(()), reason)


def _shown(name: str) -> str:
    """Return the path of a member as it can be shown, without empty parts and `.`."""
    text = name.encode("utf-8", "surrogateescape").decode("utf-8", "backslashreplace")
    return unsteering("/".join(part for part in text.split("/") if part not in ("", ".")))
