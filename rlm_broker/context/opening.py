"""Opening a regular file of the user's: it may change meanwhile, and is never mapped, waited for or held as a whole."""

import os
import stat
from collections.abc import Iterator
from typing import Final

from rlm_broker.context.found import FileUnfit, FoundFile

PIECE_BYTES: Final = 1 << 18
"""Read at once: whatever a file's size, it takes a few times this of our own memory."""

_KINDS = {
    stat.S_IFDIR: "a folder",
    stat.S_IFIFO: "a named pipe",
    stat.S_IFSOCK: "a socket",
    stat.S_IFCHR: "a device",
    stat.S_IFBLK: "a device",
}


def open_regular(file: FoundFile) -> tuple[int, int]:
    """A descriptor, which is the caller's to close, and the size of what it is of.

    Raises:
        FileUnfit: It cannot be opened, or is no regular file.
    """
    flags = os.O_RDONLY | os.O_CLOEXEC | os.O_NOCTTY | os.O_NONBLOCK  # a pipe that became of it is not waited for
    try:
        # Before it is opened: opening a device can do something.
        _refuse_special(file, os.stat(file.path).st_mode)  # noqa: PTH116 - a path object takes longer than the call
        fd = os.open(file.path, flags if file.named else flags | os.O_NOFOLLOW)
    except OSError as error:
        raise _unreadable(file, error) from error
    try:
        opened = os.fstat(fd)
        _refuse_special(file, opened.st_mode)
    except FileUnfit:
        os.close(fd)
        raise
    return fd, opened.st_size


def _refuse_special(file: FoundFile, mode: int) -> None:
    if not stat.S_ISREG(mode):
        kind = _KINDS.get(stat.S_IFMT(mode), "something else")
        raise FileUnfit(
            "not a regular file", f"{file.given} is {kind}, not a file: read it first, and hand in its text"
        )


def bytes_of(file: FoundFile, fd: int, size_bytes: int) -> Iterator[bytes]:
    """What the file has, in pieces. What is appended to it meanwhile is left out.

    Raises:
        FileUnfit: It cannot be read. This may come after any number of pieces.
    """
    left = size_bytes or (1 << 62)  # files of /proc have text and no size
    try:
        while left and (piece := os.read(fd, min(left, PIECE_BYTES))):
            if not size_bytes and (size_bytes := os.fstat(fd).st_size):
                return  # it was empty: this was appended meanwhile, and more may be without end
            yield piece
            left -= len(piece)
    except OSError as error:
        raise _unreadable(file, error) from error


def _unreadable(file: FoundFile, error: OSError) -> FileUnfit:
    return FileUnfit("unreadable", f"{file.given} cannot be read: {error.strerror}")
