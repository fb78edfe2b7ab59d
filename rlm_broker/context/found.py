"""A file that was found, its name, and the reason why a file cannot be part of a context."""

import os
import re
from dataclasses import dataclass
from typing import Final

_STEERING: Final = re.compile("[\x00-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028\u2029\u202a-\u202e\u2066-\u2069]")
"""Characters that begin a line, or steer a terminal or the direction of text. Names come from archives, too."""


class FileUnfit(Exception):
    """A file cannot be part of a context. The message is one sentence.

    Attributes:
        reason: Reason under which the file is counted, if it is one of many.
    """

    def __init__(self, reason: str, sentence: str) -> None:
        super().__init__(sentence)
        self.reason = reason


@dataclass(frozen=True, slots=True)
class FoundFile:
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
