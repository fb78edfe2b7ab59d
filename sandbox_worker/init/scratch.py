"""Counts the scratch folder where it lies on the host's file system, which has no limit for one folder.

Model code changes the folder while it is walked. openat2(2) with RESOLVE_BENEATH and RESOLVE_NO_SYMLINKS keeps the walk
inside, also if a folder on the way is replaced by a link.
"""

import contextlib
import errno
import os
import struct
from dataclasses import dataclass

from sandbox_worker.isolation import syscalls

_FOLDER = os.O_PATH | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
_HOW = struct.Struct("=QQQ")
"""`struct open_how` of openat2(2): flags, mode, how the path is resolved."""
_RESOLVE_NO_SYMLINKS, _RESOLVE_BENEATH = 0x04, 0x08


@dataclass(frozen=True, slots=True)
class Contents:
    """Size of a folder.

    Attributes:
        size_bytes: Bytes that its files take on the disk.
        files: Number of its files and folders.
    """

    size_bytes: int
    files: int


def contents(folder: str, max_files: int) -> Contents:
    """Count a folder. The walk stops beyond `max_files`.

    A folder that cannot be read, such as one nested deeper than a path can name, counts as too many files.
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
                size_bytes += found.st_blocks * 512
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
