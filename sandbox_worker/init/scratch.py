"""The scratch folder where it is a folder of the host's: nothing but looking bounds it as a whole."""

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
    """`files` counts folders, too."""

    size_bytes: int
    files: int


def contents(folder: str, max_files: int) -> Contents:
    """What is in a folder, as far as it need be known: nothing is looked at beyond `max_files`.

    A folder that cannot be looked into, such as one nested deeper than a path can say, counts as too many files.
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
            except FileNotFoundError:  # removed or exchanged meanwhile; what there is instead is seen the next time
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
    """List a folder below `base`. Nothing is done to a folder outside, whatever model code puts in the place of one."""
    found = _below(base, path)
    try:
        try:
            folder = os.open(".", os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC, dir_fd=found)
        except PermissionError:
            # Model code has made it so; it is its owner, and so are we. By this name, it is what was found.
            os.chmod(f"/proc/self/fd/{found}", 0o700)  # noqa: PTH101
            folder = os.open(".", os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC, dir_fd=found)
    finally:
        os.close(found)
    try:
        with os.scandir(folder) as entries:
            listed = []
            for entry in entries:
                with contextlib.suppress(FileNotFoundError):  # removed meanwhile
                    entry.stat(follow_symlinks=False)  # kept by the entry, which needs the descriptor
                    listed.append(entry)
            return listed
    finally:
        os.close(folder)


def _below(base: int, path: str) -> int:
    """Return a descriptor of a folder, reached without following a link.

    Raises:
        FileNotFoundError: Something else is there now.
        OSError: It cannot be reached.
    """
    how = _HOW.pack(_FOLDER, 0, _RESOLVE_NO_SYMLINKS | _RESOLVE_BENEATH)
    try:
        return syscalls.call("openat2", base, os.fsencode(path), how, len(how))
    except OSError as error:
        if error.errno in (errno.ENOENT, errno.ELOOP, errno.ENOTDIR, errno.EAGAIN):
            raise FileNotFoundError from None
        if error.errno in (errno.ENOSYS, errno.EPERM):  # before Linux 5.6, where no level protects anything
            return os.open(path, _FOLDER, dir_fd=base)
        raise
