"""Opening of the user's regular files, which may change meanwhile: none is mapped, waited for, or held as a whole."""

import errno
import os
import stat
from collections.abc import Iterator
from typing import Final

from rlm_broker.concurrency.threads import stop_requested
from rlm_broker.context.found import FileUnfit, FoundFile
from rlm_broker.errors import ContextRefused

PIECE_BYTES: Final = 1 << 18
"""Bytes that are read at once. A file of any size takes a few times as much of our own memory."""

_KINDS = {
    stat.S_IFDIR: "a folder",
    stat.S_IFIFO: "a named pipe",
    stat.S_IFSOCK: "a socket",
    stat.S_IFCHR: "a device",
    stat.S_IFBLK: "a device",
}
"""Kinds of files that are not regular, as an error names them."""


def open_regular(file: FoundFile) -> tuple[int, int]:
    """Return a descriptor of the file, which the caller closes, and the file's size in bytes.

    Raises:
        FileUnfit: The file cannot be opened, or is not a regular file.
    """
    # O_NONBLOCK: if a pipe has taken the file's place since it was found, opening it must not wait for a writer.
    flags = os.O_RDONLY | os.O_CLOEXEC | os.O_NOCTTY | os.O_NONBLOCK
    try:
        # The kind is checked before opening, since opening a device can have effects, and again afterwards, since the
        # path may lead to another file by then.
        _refuse_special(file, os.stat(file.path).st_mode)  # noqa: PTH116 - a path object takes longer than the call
        fd = os.open(file.path, flags if file.named else flags | os.O_NOFOLLOW)
    except OSError as error:
        if error.errno in (errno.EMFILE, errno.ENFILE):  # not the file's fault, which would be left out of a folder
            raise
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
    """Yield the content of the file, in pieces. Bytes that are appended meanwhile are left out.

    Raises:
        FileUnfit: The file cannot be read. This may come after any number of pieces.
    """
    left = size_bytes or (1 << 62)  # files of /proc have text, and a size of 0
    try:
        while left and (piece := os.read(fd, min(left, PIECE_BYTES))):
            if not size_bytes and (size_bytes := os.fstat(fd).st_size):
                return  # the file was empty: this was appended meanwhile, and a writer may append without end
            if stop_requested():
                raise ContextRefused(f"{file.given} was not read to its end")
            yield piece
            left -= len(piece)
    except OSError as error:
        raise _unreadable(file, error) from error


def _unreadable(file: FoundFile, error: OSError) -> FileUnfit:
    return FileUnfit("unreadable", f"{file.given} cannot be read: {error.strerror}")
