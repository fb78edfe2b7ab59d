"""Files in the scratch folder, opened for the orchestrator: it reads and writes them through descriptors.

Model code cannot alter init, but it can change every name meanwhile. So no link is followed at any place of a path, and
what was opened is looked at afterwards: only a regular file is handed over. Nothing is opened that could make us wait.
"""

import os
import stat
from collections.abc import Sequence
from itertools import islice

from sandbox_worker.init.scratch import contents
from sandbox_worker.wire.bounds import ReplBounds
from sandbox_worker.wire.control import (
    Entry,
    EntryKind,
    FileRequest,
    Listed,
    ListFolder,
    Opened,
    OpenToRead,
    OpenToWrite,
    Refused,
)

MAX_ENTRIES = 10_000
"""Entries of a folder that is listed. Beyond it the folder is refused: sorting more would keep init from watching."""
PAGE_BYTES = 1 << 14
"""Bytes of entries in one answer. The rest comes with the next."""
ENTRY_BYTES = 24
"""What an entry takes in it beside its name, at most."""
_FOLDER = os.O_PATH | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
_FILE = os.O_NOFOLLOW | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC
_BLOCK_BYTES = 512
"""What `st_blocks` counts in."""


class FileNotOpened(Exception):
    """A file cannot be had. The message says why, as the rest of a sentence about its path."""


def answer(request: FileRequest, bounds: ReplBounds | None) -> tuple[Opened | Listed | Refused, list[int]]:
    """Do what the orchestrator asks; return what is said, and the descriptors that go beside it.

    Args:
        bounds: Of the scratch folder; None where it is a file system with bounds of its own.
    """
    try:
        match request:
            case OpenToRead(path=path):
                return Opened(), [open_to_read(path)]
            case OpenToWrite(path=path, size_bytes=size_bytes):
                return Opened(), [open_to_write(path, size_bytes, bounds)]
            case ListFolder(path=path, after=after):
                return listed(path, after), []
    except (FileNotOpened, OSError) as error:
        return Refused(reason(error)), []


def reason(error: FileNotOpened | OSError) -> str:
    """Why a file or folder cannot be had, as the rest of a sentence about its path."""
    return f"cannot be opened: {error.strerror}" if isinstance(error, OSError) else str(error)


def open_to_read(path: Sequence[bytes]) -> int:
    """Return a descriptor of a regular file below the current folder.

    Raises:
        FileNotOpened, OSError: There is none.
    """
    folder = open_folder(path[:-1])
    try:
        _require_file(os.stat(path[-1], dir_fd=folder, follow_symlinks=False))
        return _regular(os.open(path[-1], os.O_RDONLY | _FILE, dir_fd=folder))
    finally:
        os.close(folder)


def open_to_write(path: Sequence[bytes], size_bytes: int, bounds: ReplBounds | None) -> int:
    """Return a descriptor of a file below the current folder that is empty now. Missing folders are made.

    Args:
        size_bytes: What is going to be written. A file that is there stays as it is if there is no room for that.
        bounds: Of the folder; None where the folder is a file system with bounds of its own.

    Raises:
        FileNotOpened, OSError: It cannot be written, or there is no room.
    """
    room_bytes, room_files = (1 << 63, 1 << 63) if bounds is None else _room(bounds)
    folder, made = _walk_and_make(path[:-1], room_files - 1)
    try:
        old_bytes = 0
        try:
            found = os.stat(path[-1], dir_fd=folder, follow_symlinks=False)
        except FileNotFoundError:
            if room_files - made < 1:
                raise FileNotOpened("would be one more file than max_scratch_files allows") from None
        else:
            _require_file(found)
            old_bytes = found.st_blocks * _BLOCK_BYTES
        if bounds is None:
            system = os.statvfs(folder)
            room_bytes = system.f_bavail * system.f_frsize
        if size_bytes > room_bytes + old_bytes:
            free = max(0, room_bytes + old_bytes)
            raise FileNotOpened(f"needs {size_bytes:,} bytes, and scratch_bytes leaves room for {free:,}")
        fd = _regular(os.open(path[-1], os.O_WRONLY | os.O_CREAT | _FILE, 0o600, dir_fd=folder))
    finally:
        os.close(folder)
    os.ftruncate(fd, 0)
    return fd


def listed(path: Sequence[bytes], after: bytes) -> Listed:
    """Return entries of a folder below the current one, by name, as many as one answer holds.

    Args:
        after: The last name that is known already, or nothing.

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
            raise FileNotOpened(f"has more than {MAX_ENTRIES:,} entries: list it with code")
        entries: list[Entry] = []
        size_bytes = 0
        for name in sorted(name for name in names if name > after):
            if size_bytes > PAGE_BYTES:
                return Listed(entries=entries, is_all=False)
            try:
                status = os.stat(name, dir_fd=folder, follow_symlinks=False)
            except FileNotFoundError:  # removed meanwhile
                continue
            entries.append(Entry(name, _kind(status), status.st_size))
            size_bytes += len(name) + ENTRY_BYTES
        return Listed(entries=entries, is_all=True)
    finally:
        os.close(folder)


def open_folder(path: Sequence[bytes]) -> int:
    """Return a descriptor of a folder below the current one, reached without following a link.

    Raises:
        FileNotOpened, OSError: There is none.
    """
    folder = os.open(".", _FOLDER)
    for name in path:
        folder = _step(folder, name)
    return folder


def _walk_and_make(path: Sequence[bytes], room_files: int) -> tuple[int, int]:
    """Do as `open_folder`, and make the folders that are not there; return how many were made, too."""
    folder = os.open(".", _FOLDER)
    made = 0
    for name in path:
        try:
            os.stat(name, dir_fd=folder, follow_symlinks=False)
        except FileNotFoundError:
            made += 1
            try:
                if made > room_files:
                    raise FileNotOpened("needs more folders than max_scratch_files allows") from None
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
    """Go into a folder; the descriptor of the one before is closed."""
    try:
        found = os.stat(name, dir_fd=folder, follow_symlinks=False)
        if not stat.S_ISDIR(found.st_mode):
            kind = "a link, and links are not followed" if stat.S_ISLNK(found.st_mode) else "no folder"
            raise FileNotOpened(f"goes through {os.fsdecode(name)!r}, which is {kind}")
        return os.open(name, _FOLDER, dir_fd=folder)
    finally:
        os.close(folder)


def _regular(fd: int) -> int:
    """Return the descriptor again, if it is of a regular file: it may have been replaced since it was looked at."""
    try:
        _require_file(os.fstat(fd))
    except BaseException:
        os.close(fd)
        raise
    return fd


def _require_file(found: os.stat_result) -> None:
    if stat.S_ISDIR(found.st_mode):
        raise FileNotOpened("is a folder")
    if stat.S_ISLNK(found.st_mode):
        raise FileNotOpened("is a link, and links are not followed")
    if not stat.S_ISREG(found.st_mode):
        raise FileNotOpened("is no regular file")


def _room(bounds: ReplBounds) -> tuple[int, int]:
    """Return how many bytes and files the current folder has room for."""
    found = contents(".", bounds.max_scratch_files)
    if found.files > bounds.max_scratch_files:
        raise FileNotOpened("cannot be added: the scratch folder has more files than max_scratch_files allows")
    return bounds.scratch_bytes - found.size_bytes, bounds.max_scratch_files - found.files


def _kind(found: os.stat_result) -> EntryKind:
    if stat.S_ISREG(found.st_mode):
        return "file"
    if stat.S_ISDIR(found.st_mode):
        return "folder"
    return "link" if stat.S_ISLNK(found.st_mode) else "other"
