"""Archives, read through: their members one after the other, in memory, and never onto a disk.

Names in an archive are only shown: none of them is opened. Links and special files are left out.
"""

import os
import stat
import tarfile
import zipfile
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Final

from rlm_broker.context.found import FileUnfit, unsteering
from rlm_broker.context.opening import PIECE_BYTES
from rlm_broker.context.packed import DAMAGED, Reader, Unpacking

BEGIN_BYTES: Final = 512
"""What has to be there to tell an archive."""
MAX_HEADER_BYTES: Final = 1 << 14
"""Of what describes a member of a tar; a longer one is damaged or hostile, and Python would search it for minutes."""
MAX_GLOBAL_HEADER_CHARS: Final = 1 << 13
"""Of what all global headers of a tar say; beyond it the tar is refused. Python copies them for each member."""
MAX_DIRECTORY_BYTES: Final = 1 << 24
"""Of what describes all members of a zip, each of which takes memory; beyond it the zip is refused."""
MAX_NAME_CHARS: Final = 1 << 10
"""Longest path of a member; one with a longer path is left out. All names of a context are held in memory."""
_ZIP_METHODS: Final = (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED, zipfile.ZIP_BZIP2)
"""Not LZMA, which takes as much memory as the member says."""
_ENCRYPTED: Final = 1
_LONG_NAME: Final = f"a name of more than {MAX_NAME_CHARS:,} characters in an archive"


@dataclass(frozen=True, slots=True)
class Member:
    """A file in an archive, to be read before the next one is asked for.

    Attributes:
        name: Its path in the archive, as it can be shown.
        pieces: What it has.
        unfit: Why it is left out, if it is.
        was_packed: Whether it was compressed, so that what is stored of it counts.
    """

    name: str
    pieces: Iterator[bytes]
    unfit: str = ""
    was_packed: bool = False


def is_zip(beginning: bytes) -> bool:
    """Whether bytes that begin so are a zip."""
    return beginning.startswith((b"PK\x03\x04", b"PK\x05\x06"))


def is_tar(beginning: bytes, name: str) -> bool:
    """Whether bytes that begin so are a tar. One of the oldest kind is told by its name, too."""
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


def tar_members(reader: Reader, given: str, unpacking: Unpacking, was_packed: bool) -> Iterator[Member]:
    """Yield the files of a tar in their order.

    Args:
        was_packed: Whether it was compressed.

    Raises:
        FileUnfit: It is damaged or cut. This may come after any number of members.
        ContextRefused: It has too many members.
    """
    forward: Any = _Forward(reader, given)
    global_chars = 0
    try:
        tar = tarfile.TarFile(fileobj=forward)
        while (entry := tar.next()) is not None:
            vars(tar)["members"].clear()  # it would keep all of them
            global_chars += sum(len(key) + len(value) for key, value in tar.pax_headers.items())
            if global_chars > MAX_GLOBAL_HEADER_CHARS:
                raise tarfile.ReadError(f"global headers of more than {MAX_GLOBAL_HEADER_CHARS:,} characters")
            vars(tar)["pax_headers"].clear()  # nothing in them is of use here
            unpacking.count_member(given)
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
    """Lets `tarfile` read headers, each of which is bounded, and go forward."""

    def __init__(self, reader: Reader, given: str) -> None:
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
            raise tarfile.ReadError("it refers to what lies before")
        for _ in self.data(position - self._at):
            pass

    def data(self, size: int) -> Iterator[bytes]:
        """Yield so many bytes that come next."""
        while size:
            piece = self._reader.read(min(size, PIECE_BYTES))
            if not piece:
                raise FileUnfit(DAMAGED, f"{self._given} is cut: the data of a member has no end")
            self._at += len(piece)
            size -= len(piece)
            yield piece


# -- zip -------------------------------------------------------------------------------------------------------------


def zip_members(fd: int, given: str, unpacking: Unpacking) -> Iterator[Member]:
    """Yield the files of a zip in the order of its directory.

    Args:
        fd: Of a regular file.

    Raises:
        FileUnfit: It is damaged or cut. This may come after any number of members.
        ContextRefused: It has too many members.
    """
    try:
        with zipfile.ZipFile(_Bounded(fd)) as archive:
            for entry in archive.infolist():
                unpacking.count_member(given)
                path = entry.filename.replace("\\", "/")  # some tools on Windows write it so, against the format
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
    except Exception as error:  # noqa: BLE001 - each way to compress has errors of its own for hostile bytes
        sentence = f"{given} is damaged: its member {_shown(entry.filename)} cannot be read ({error!s:.100})"
        raise FileUnfit(DAMAGED, sentence) from None


class _Bounded:
    """A regular file as `zipfile` reads it: what is read at once is bounded."""

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
            raise OSError("it refers to what lies before its begin")  # as a file does, and `zipfile` relies on it
        self._at = base + position
        return self._at

    def tell(self) -> int:
        return self._at

    def seekable(self) -> bool:
        return True


def _unfit(name: str, reason: str) -> Member:
    return Member(name, iter(()), reason)


def _shown(name: str) -> str:
    """Return the path of a member, without parts that say nothing."""
    text = name.encode("utf-8", "surrogateescape").decode("utf-8", "backslashreplace")
    return unsteering("/".join(part for part in text.split("/") if part not in ("", ".")))
