"""The file operations of a journal: all writes of a batch pass through here."""

import errno
import fcntl
import os
import stat
from pathlib import Path
from typing import BinaryIO

from rlm_broker.errors import ConfigurationError

PRIVATE = 0o600
"""Mode of files that this user alone can read."""
READ_BYTES = 1 << 20
"""Bytes of a file that are read at a time."""
GO_ON = "the same call goes on from here once that is put right"


def open_to_append(path: Path) -> int:
    """Open a file to write at its end, and make it if it is missing; return its descriptor.

    Raises:
        ConfigurationError: It is a link, or no regular file.
        OSError: It cannot be opened.
    """
    return _opened(path, os.O_RDWR | os.O_APPEND | os.O_CREAT)


def open_to_read(path: Path) -> BinaryIO:
    """Open a file to read it.

    Raises:
        ConfigurationError: It is a link, or no regular file.
        OSError: It is missing, or cannot be opened.
    """
    return open(_opened(path, os.O_RDONLY), "rb", buffering=READ_BYTES)


def require_own(folder: Path) -> None:
    """Refuse a folder whose files another user may have made.

    Raises:
        ConfigurationError: It is a link, or no folder, or another user owns it or can write to it.
        OSError: It is missing, or cannot be looked at.
    """
    found = folder.lstat()
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.geteuid() or found.st_mode & 0o022:
        raise ConfigurationError(
            f"{folder} is not a folder that this user alone can write to: put its owner and mode right (`chmod go-w`), "
            "or name another file for the results"
        )


def append(descriptor: int, data: bytes, end: int) -> int:
    """Write at the end of a file, and return its new length. After a failure the file is as long as before.

    Args:
        descriptor: File, opened to append.
        data: Whole lines.
        end: Length of the file in bytes.

    Raises:
        OSError: The disk is full, or broken.
    """
    left = memoryview(data)
    try:
        while left:
            left = left[os.write(descriptor, left) :]
    except OSError:
        cut(descriptor, end)
        raise
    return end + len(data)


def cut(descriptor: int, end: int) -> None:
    """Cut a file to a length in bytes."""
    os.ftruncate(descriptor, end)


def sync(descriptor: int) -> None:
    """Wait until the content of a file is on the disk."""
    os.fdatasync(descriptor)


def sync_folder(folder: Path) -> None:
    """Wait until the names in a folder are on the disk."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def put_in_place(written: Path, path: Path) -> None:
    """Give a file that was written the name that it is for, in place of one that has it."""
    written.rename(path)
    sync_folder(path.parent)


def remove(path: Path) -> None:
    """Remove a file. One that is gone already is no failure."""
    path.unlink(missing_ok=True)


def lock(descriptor: int) -> bool:
    """Lock a file for this process, until its descriptor is closed; return False if another process has the lock."""
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _opened(path: Path, flags: int) -> int:
    try:  # without O_NONBLOCK, opening a named pipe waits for its other end
        descriptor = os.open(path, flags | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_NOCTTY, PRIVATE)
    except OSError as error:
        if error.errno in (errno.ELOOP, errno.EISDIR, errno.ENXIO):  # a link, a folder, a socket
            raise _not_regular(path) from None
        raise
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise _not_regular(path)
    return descriptor


def _not_regular(path: Path) -> ConfigurationError:
    return ConfigurationError(f"{path} is not a regular file: remove it, or name another file for the results")


def unwritable(path: Path, error: OSError) -> ConfigurationError:
    """Return the error of a file that cannot be written."""
    return ConfigurationError(f"cannot write to {path}: {error.strerror or error}; {GO_ON}")
