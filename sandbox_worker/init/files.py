"""Files opened for the orchestrator: it reads and writes them through descriptors.

Model code cannot change init, but it can replace every name in the folder at any moment. So init follows no link at any
place of a path, and checks the descriptor after opening: only a regular file is passed on. Files are opened with
O_NONBLOCK, since opening a FIFO would otherwise wait for its other end.

An absolute path means what it means to code. If it leads into the scratch folder, the rules above hold. Elsewhere files
are only read, and links are followed, since init lives in the same root and the same Landlock domain as code. /proc is
the exception, and refused: there init sees more than code does.

Where the scratch folder lies on the host's file system, which has no limit for one folder, it is counted here. Model
code changes the folder while it is walked. openat2(2) with RESOLVE_BENEATH and RESOLVE_NO_SYMLINKS keeps the walk
inside, also if a folder on the way is replaced by a link.
"""

import contextlib
import errno
import os
import stat
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import islice
from typing import NamedTuple

from sandbox_worker.isolation import syscalls
from sandbox_worker.wire.bounds import ReplBounds
from sandbox_worker.wire.control import (
    ROOT,
    EntryKind,
    FileRequest,
    Listed,
    ListedEntry,
    ListFolder,
    Opened,
    OpenToRead,
    OpenToWrite,
    Refused,
    Removed,
    RemoveFile,
)
from sandbox_worker.wire.errors import FileKind, file_kind

_FOLDER = os.O_PATH | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
_HOW = struct.Struct("=QQQ")
"""`struct open_how` of openat2(2): flags, mode, how the path is resolved."""
_RESOLVE_NO_MAGICLINKS, _RESOLVE_NO_SYMLINKS, _RESOLVE_BENEATH = 0x02, 0x04, 0x08

MAX_ENTRIES = 10_000
"""Most entries of a folder that is listed. A larger folder is refused: sorting it would keep init from watching."""
PAGE_BYTES = 1 << 14
"""Most bytes of entries in one answer. The rest comes with the next answer."""
ENTRY_BYTES = 24
"""Most bytes of one entry in an answer, without its name."""
_FILE = os.O_NOFOLLOW | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC
_BLOCK_BYTES = 512
"""Unit of `st_blocks`, in bytes."""


class FileNotOpened(Exception):
    """A file cannot be opened. The message gives the reason, as the rest of a sentence about its path."""

    def __init__(self, why: str, kind: FileKind = "file") -> None:
        super().__init__(why)
        self.kind: FileKind = kind


@dataclass(frozen=True, slots=True)
class Contents:
    """Size of a folder.

    Attributes:
        size_bytes: Bytes that its files take on the disk.
        files: Number of its files and folders.
    """

    size_bytes: int
    files: int


class Scratch(NamedTuple):
    """The scratch folder, which is init's current folder.

    Attributes:
        other_name: Its second absolute name; the first one is that of the current folder.
        bounds: Bounds of the REPL.
        is_counted: Whether its bounds hold by counting. If not, it is a file system with a size of its own.
    """

    other_name: str
    bounds: ReplBounds
    is_counted: bool

    def inner(self, path: list[bytes]) -> list[bytes]:
        """Return an absolute path that leads into the folder as one that begins there; any other path as it is."""
        if path[:1] == [ROOT]:
            for name in (os.getcwdb(), os.fsencode(self.other_name)):  # noqa: PTH109 - bytes
                own = [ROOT, *name.split(b"/")[1:]]
                if path[: len(own)] == own:
                    return path[len(own) :]
        return path


def answer(request: FileRequest, scratch: Scratch) -> tuple[Opened | Listed | Removed | Refused, list[int]]:
    """Carry out the orchestrator's request. Return the answer and the descriptors to send with it."""
    path = scratch.inner(request.path)
    try:
        match request:
            case ListFolder(after=after):
                return listed(path, after), []
            case _ if not path:
                raise FileNotOpened("is a folder", "folder")
            case OpenToRead():
                return Opened(), [open_to_read(path, scratch.bounds.scratch_bytes)]
            case OpenToWrite(size_bytes=size_bytes):
                return Opened(), [open_to_write(path, size_bytes, scratch.bounds if scratch.is_counted else None)]
            case RemoveFile():
                return remove(path), []
    except (FileNotOpened, OSError) as error:
        return refusal(error), []


def refusal(error: FileNotOpened | OSError) -> Refused:
    """Return why a file or folder cannot be opened."""
    if isinstance(error, OSError):
        return Refused(f"cannot be opened: {error.strerror}", file_kind(error))
    return Refused(str(error), error.kind)


def open_to_read(path: Sequence[bytes], most_bytes: int) -> int:
    """Return a descriptor of a regular file below the current folder, or at an absolute path elsewhere.

    Args:
        path: Names of the folders, then the file's.
        most_bytes: Bytes of a file elsewhere; a larger one is refused. Code can make no larger one in its folder.

    Raises:
        FileNotOpened, OSError: There is no such file, or it is not a regular one.
    """
    if path[0] == ROOT:
        os.close(_regular(_elsewhere(path, os.O_PATH | os.O_CLOEXEC)))  # opening what is no file may have an effect
        fd = _regular(_elsewhere(path, os.O_RDONLY | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC))
        if (size_bytes := os.fstat(fd).st_size) > most_bytes:
            os.close(fd)
            raise FileNotOpened(f"has {size_bytes:,} bytes, more than scratch_bytes = {most_bytes:,}", "too_large")
        return fd
    folder = open_folder(path[:-1])
    try:
        _require_file(os.stat(path[-1], dir_fd=folder, follow_symlinks=False))
        return _regular(os.open(path[-1], os.O_RDONLY | _FILE, dir_fd=folder))
    finally:
        os.close(folder)


def open_to_write(path: Sequence[bytes], size_bytes: int, bounds: ReplBounds | None) -> int:
    """Empty or create a file below the current folder, and its missing folders. Return a descriptor of it.

    Args:
        path: Names from the current folder to the file.
        size_bytes: Bytes that will be written. If there is no room for them, an existing file stays as it is.
        bounds: Bounds of the scratch folder; None if it is a file system with a size of its own.

    Raises:
        FileNotOpened, OSError: The file cannot be written, or the folder has no room for it.
    """
    _require_inner(path)
    room_bytes, room_files = (1 << 63, 1 << 63) if bounds is None else _room(bounds)
    folder, made = _walk_and_make(path[:-1], room_files - 1)
    try:
        old_bytes = 0
        try:
            found = os.stat(path[-1], dir_fd=folder, follow_symlinks=False)
        except FileNotFoundError:
            if room_files - made < 1:
                raise FileNotOpened("would be one more file than max_scratch_files allows", "no_room") from None
        else:
            _require_file(found)
            old_bytes = found.st_blocks * _BLOCK_BYTES
        if bounds is None:
            system = os.statvfs(folder)
            room_bytes = system.f_bavail * system.f_frsize
        if size_bytes > room_bytes + old_bytes:
            free = max(0, room_bytes + old_bytes)
            raise FileNotOpened(f"needs {size_bytes:,} bytes, and scratch_bytes leaves room for {free:,}", "no_room")
        fd = _regular(os.open(path[-1], os.O_WRONLY | os.O_CREAT | _FILE, 0o600, dir_fd=folder))
    finally:
        os.close(folder)
    os.ftruncate(fd, 0)
    return fd


def remove(path: Sequence[bytes]) -> Removed:
    """Remove a file below the current folder, or a link itself.

    Raises:
        FileNotOpened, OSError: There is no such file, or it is a folder.
    """
    _require_inner(path)
    folder = open_folder(path[:-1])
    try:
        if stat.S_ISDIR(os.stat(path[-1], dir_fd=folder, follow_symlinks=False).st_mode):
            raise FileNotOpened("is a folder", "folder")
        os.unlink(path[-1], dir_fd=folder)
    finally:
        os.close(folder)
    return Removed()


def listed(path: Sequence[bytes], after: bytes) -> Listed:
    """Return entries of a folder, sorted by name, as many as fit one answer.

    Args:
        path: Names from the current folder to the folder, or an absolute path.
        after: The last name of the answer before; empty for the first answer.

    Raises:
        FileNotOpened, OSError: There is no such folder, or it has more than `MAX_ENTRIES`.
    """
    inner = open_folder(path)
    try:
        folder = os.open(".", os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC, dir_fd=inner)
    finally:
        os.close(inner)
    try:
        with os.scandir(folder) as found:
            names = [os.fsencode(entry.name) for entry in islice(found, MAX_ENTRIES + 1)]
        if len(names) > MAX_ENTRIES:
            raise FileNotOpened(f"has more than {MAX_ENTRIES:,} entries: list it with code", "too_large")
        entries: list[ListedEntry] = []
        size_bytes = 0
        for name in sorted(name for name in names if name > after):
            if size_bytes > PAGE_BYTES:
                return Listed(entries=entries, is_all=False)
            try:
                status = os.stat(name, dir_fd=folder, follow_symlinks=False)
            except FileNotFoundError:  # removed meanwhile
                continue
            entries.append(ListedEntry(name, _kind(status), status.st_size))
            size_bytes += len(name) + ENTRY_BYTES
        return Listed(entries=entries, is_all=True)
    finally:
        os.close(folder)


def open_folder(path: Sequence[bytes]) -> int:
    """Return a descriptor of a folder below the current one, reached without following a link; or at an absolute path.

    Raises:
        FileNotOpened, OSError: There is none.
    """
    if path[:1] == [ROOT]:
        return _elsewhere(path, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    folder = os.open(".", _FOLDER)
    for name in path:
        folder = _step(folder, name)
    return folder


def _walk_and_make(path: Sequence[bytes], room_files: int) -> tuple[int, int]:
    """Open a folder as `open_folder` does, and make missing folders. Return its descriptor and the number made."""
    folder = os.open(".", _FOLDER)
    made = 0
    for name in path:
        try:
            os.stat(name, dir_fd=folder, follow_symlinks=False)
        except FileNotFoundError:
            made += 1
            try:
                if made > room_files:
                    raise FileNotOpened("needs more folders than max_scratch_files allows", "no_room") from None
                os.mkdir(name, 0o700, dir_fd=folder)
            except BaseException:
                os.close(folder)
                raise
        except BaseException:
            os.close(folder)
            raise
        folder = _step(folder, name)
    return folder, made


def _step(folder: int, name: bytes) -> int:
    """Open a folder inside of `folder`, whose descriptor is closed."""
    try:
        found = os.stat(name, dir_fd=folder, follow_symlinks=False)
        if not stat.S_ISDIR(found.st_mode):
            through = f"goes through {os.fsdecode(name)!r}, which is"
            if stat.S_ISLNK(found.st_mode):
                raise FileNotOpened(f"{through} a link, and links are not followed", "permission")
            raise FileNotOpened(f"{through} not a folder")
        return os.open(name, _FOLDER, dir_fd=folder)
    finally:
        os.close(folder)


def _elsewhere(path: Sequence[bytes], flags: int) -> int:
    """Open a file or folder at an absolute path, following links as code may. The caller has found no way into the
    scratch folder."""
    whole = b"/" + b"/".join(path[1:])
    how = _HOW.pack(flags, 0, _RESOLVE_NO_MAGICLINKS)
    try:
        fd = syscalls.call("openat2", -1, whole, how, len(how))
    except OSError as error:
        if error.errno not in (errno.ENOSYS, errno.EPERM):  # before Linux 5.6, where only `process` runs
            raise OSError(error.errno, os.strerror(error.errno or 0)) from None  # without the name of the call
        fd = os.open(whole, flags)
    if os.fstat(fd).st_dev == os.stat("/proc").st_dev:  # noqa: PTH116 - path objects would copy pages
        os.close(fd)
        raise FileNotOpened("is in /proc, which only code may read", "permission")
    return fd


def _require_inner(path: Sequence[bytes]) -> None:
    if path[0] == ROOT:
        raise FileNotOpened("is outside of the scratch folder, where files are only read", "permission")


def _regular(fd: int) -> int:
    """Return `fd` if it is of a regular file. The name may have been replaced between the check and the opening."""
    try:
        _require_file(os.fstat(fd))
    except BaseException:
        os.close(fd)
        raise
    return fd


def _require_file(found: os.stat_result) -> None:
    if stat.S_ISDIR(found.st_mode):
        raise FileNotOpened("is a folder", "folder")
    if stat.S_ISLNK(found.st_mode):
        raise FileNotOpened("is a link, and links are not followed", "permission")
    if not stat.S_ISREG(found.st_mode):
        raise FileNotOpened("is not a regular file")


def _room(bounds: ReplBounds) -> tuple[int, int]:
    """Return the number of bytes and of files that the current folder has room for."""
    found = contents(".", bounds.max_scratch_files)
    if found.files > bounds.max_scratch_files:
        why = "cannot be added: the scratch folder has more files than max_scratch_files allows"
        raise FileNotOpened(why, "no_room")
    return bounds.scratch_bytes - found.size_bytes, bounds.max_scratch_files - found.files


def contents(folder: str, max_files: int) -> Contents:
    """Count a folder. The walk stops beyond `max_files`.

    A folder that cannot be read, for example one nested deeper than a path can name, counts as too many files.
    """
    size_bytes = files = 0
    folders = ["."]
    try:
        base = os.open(folder, _FOLDER)
    except FileNotFoundError:
        return Contents(0, 0)
    except OSError:
        return Contents(0, max_files + 1)
    try:
        while folders and files <= max_files:
            path = folders.pop()
            try:
                entries = _entries(base, path)
            except FileNotFoundError:  # removed or replaced meanwhile: the next walk counts it
                continue
            for entry in entries:
                found = entry.stat(follow_symlinks=False)
                size_bytes += found.st_blocks * _BLOCK_BYTES
                files += 1
                if entry.is_dir(follow_symlinks=False):
                    folders.append(f"{path}/{entry.name}")
                if files > max_files:
                    break
    except OSError:
        files = max_files + 1
    finally:
        os.close(base)
    return Contents(size_bytes, files)


def _entries(base: int, path: str) -> "list[os.DirEntry[str]]":
    """List a folder below `base`, also if model code has taken away its permissions.

    A folder outside of `base` is never changed, also if model code replaces a folder by a link to it.
    """
    found = _below(base, path)
    try:
        try:
            folder = os.open(".", os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC, dir_fd=found)
        except PermissionError:
            # Model code has changed its mode. Init has the same owner and sets it back. The name in /proc/self/fd leads
            # to the folder that was opened, also if its own name leads elsewhere by now.
            os.chmod(f"/proc/self/fd/{found}", 0o700)  # noqa: PTH101
            folder = os.open(".", os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC, dir_fd=found)
    finally:
        os.close(found)
    try:
        with os.scandir(folder) as entries:
            listed = []
            for entry in entries:
                with contextlib.suppress(FileNotFoundError):  # removed meanwhile
                    entry.stat(follow_symlinks=False)  # the entry keeps the result; later the descriptor is closed
                    listed.append(entry)
            return listed
    finally:
        os.close(folder)


def _below(base: int, path: str) -> int:
    """Return a descriptor of a folder, reached without following a link.

    Raises:
        FileNotFoundError: There is no folder of this name any more.
        OSError: The folder cannot be opened.
    """
    how = _HOW.pack(_FOLDER, 0, _RESOLVE_NO_SYMLINKS | _RESOLVE_BENEATH)
    try:
        return syscalls.call("openat2", base, os.fsencode(path), how, len(how))
    except OSError as error:
        if error.errno in (errno.ENOENT, errno.ELOOP, errno.ENOTDIR, errno.EAGAIN):
            raise FileNotFoundError from None
        if error.errno in (errno.ENOSYS, errno.EPERM):  # before Linux 5.6, where only `process` runs
            return os.open(path, _FOLDER, dir_fd=base)
        raise


def _kind(found: os.stat_result) -> EntryKind:
    if stat.S_ISREG(found.st_mode):
        return "file"
    if stat.S_ISDIR(found.st_mode):
        return "folder"
    return "link" if stat.S_ISLNK(found.st_mode) else "other"
