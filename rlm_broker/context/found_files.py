"""A found file, its name, and the reason why a file cannot be part of a context."""

import errno
import os
import re
import stat
from collections import Counter
from collections.abc import Iterator
from typing import Final

from msgspec import Struct

from rlm_broker.concurrency.threads import stop_requested
from rlm_broker.errors import ContextRefused

_STEERING: Final = re.compile("[\x00-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028\u2029\u202a-\u202e\u2066-\u2069]")
"""Characters that begin a line, or steer a terminal or the direction of text. Names come from archives, too."""


MOST_NAMES: Final = 20
"""Names kept of what is left out for one reason. All of it is counted."""


class LeftOut(Counter[str]):
    """Counts what is left out of a context, by reason. `names` maps a reason to the first `MOST_NAMES` names."""

    def __init__(self) -> None:
        super().__init__()
        self.names: dict[str, list[str]] = {}

    def add(self, reason: str, name: str) -> None:
        """Count one file, folder or entry of an archive."""
        self[reason] += 1
        names = self.names.setdefault(reason, [])
        if len(names) < MOST_NAMES:
            names.append(name)


class FileUnfit(Exception):
    """A file cannot be part of a context. The message is one sentence; one of many files is counted under `reason`."""

    def __init__(self, reason: str, sentence: str) -> None:
        super().__init__(sentence)
        self.reason = reason


class FoundFile(Struct, frozen=True):
    """A file to read.

    Attributes:
        name: Its name in the context.
        given: Its path for messages: as the user wrote it, or below the folder that the user wrote.
        path: Path to open.
        named: Whether the user named this very file. It may then be a symbolic link to anywhere.
    """

    name: str
    given: str
    path: str
    named: bool = False


def printable(path: str | os.PathLike[str]) -> str:
    """Return a path that can be printed and sent. A byte that is not UTF-8 is shown as `\\xff`, a line break as
    `\\n`."""
    path = os.fspath(path)
    if path.isascii() and path.isprintable():
        return path
    return unsteering(os.fsencode(path).decode("utf-8", "backslashreplace"))


def unsteering(text: str) -> str:
    """Return the text with line breaks and other steering characters written as in Python source."""
    return _STEERING.sub(lambda found: found[0].encode("unicode_escape").decode(), text)


MAX_PATH_CHARS: Final = 4_096
"""Longest path of Linux, in characters (PATH_MAX). A longer text is no path."""
PIECE_BYTES: Final = 1 << 18
"""Bytes read at once. A file of any size takes a few times as much of our own memory."""

_KINDS = {
    stat.S_IFDIR: "a folder",
    stat.S_IFIFO: "a named pipe",
    stat.S_IFSOCK: "a socket",
    stat.S_IFCHR: "a device",
    stat.S_IFBLK: "a device",
}
"""Kinds of files that are not regular, as an error names them."""


def open_regular(file: FoundFile) -> tuple[int, int]:
    """Return a descriptor of a regular file for the caller to close, and its size in bytes. Raise FileUnfit for
    anything else."""
    # O_NONBLOCK: if a pipe has taken the file's place since it was found, opening it must not wait for a writer.
    flags = os.O_RDONLY | os.O_CLOEXEC | os.O_NOCTTY | os.O_NONBLOCK
    try:
        # The kind is checked before opening, since opening a device can have effects, and again afterwards, since the
        # path may lead to another file by then.
        _refuse_special(file, os.stat(file.path).st_mode)  # noqa: PTH116 - a path object takes longer than the call
        fd = os.open(file.path, flags if file.named else flags | os.O_NOFOLLOW)
    except OSError as error:
        if error.errno in (errno.EMFILE, errno.ENFILE):  # not its fault: it must not be left out of a folder
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
    """Yield the content of the file, in pieces, without bytes appended meanwhile. Raise FileUnfit if it cannot be read,
    maybe after any number of pieces."""
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
