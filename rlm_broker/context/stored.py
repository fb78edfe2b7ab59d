"""A stored context, and the facts about it that need no reading."""

import os
import weakref
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any, Final, Self

from rlm_broker.context.found import LeftOut
from rlm_broker.context.memfd import JsonMemfd, TextMemfd
from rlm_broker.errors import ContextRefused
from rlm_broker.values.text import clip
from sandbox_worker.loading.context import load_into
from sandbox_worker.loading.form import ContextForm, ContextPiece
from sandbox_worker.wire.names import CONTEXT
from sandbox_worker.wire.values import decode_context

MAX_PARTS_TOLD: Final = 100
"""Most parts that a `ContextInfo` names."""

MAX_NAME_CHARS: Final = 200
"""Characters of a part's name in a `ContextInfo`. Of a longer key it has the start."""


@dataclass(frozen=True, slots=True)
class ContextInfo:
    """Facts about a context that need no reading.

    Attributes:
        type_name: Type of the Python value that the worker gets: `str`, `dict`, `list`, `DataFrame`, `ndarray`, ...
        total_chars: Characters of a text, or of all texts in a dict or list of texts alone; otherwise bytes of the
            context as it is stored.
        parts: Name and length of the first `MAX_PARTS_TOLD` files, keys of a dict, or items of a list (by index). A
            name has at most `MAX_NAME_CHARS` characters. The length is in characters for a text, in bytes of its JSON
            for any other value.
        parts_total: Number of all parts.
        skipped: Number of files, folders or entries of archives that were left out, by reason.
        replaced_bytes, replaced_parts: Number of bytes that could not be decoded and became U+FFFD, and number of the
            texts that have any.
        made_of: Class of an object that arrives as a dict, such as a dataclass; empty for any other value.
        shape: Shape of a table or an array; empty for any other value.
        skipped_names: Reason -> the names of the first 20 entries that were left out for it.
    """

    type_name: str
    total_chars: int
    parts: tuple[tuple[str, int], ...] = ()
    parts_total: int = 0
    skipped: Mapping[str, int] = field(default_factory=dict)
    replaced_bytes: int = 0
    replaced_parts: int = 0
    made_of: str = ""
    shape: tuple[int, ...] = ()
    skipped_names: Mapping[str, tuple[str, ...]] = field(default_factory=dict)

    def headline(self) -> str:
        """Return what the context is, as words that follow "is"."""
        if self.shape:
            return f"a {self.type_name} of shape {self.shape}"
        made_of = f" made of an object of class {self.made_of}," if self.made_of else ""
        return f"a {self.type_name}{made_of} with {self.total_chars:,} characters in all"

    def remarks(self, *, with_names: bool = False) -> list[str]:
        """Return how the context differs from the user's data, one line each: what was left out, and what was
        replaced. `with_names` adds the names of what was left out."""
        lines = []
        for reason, count in self.skipped.items():
            line = f"left out: {count:,} ({reason})"
            if with_names and (names := self.skipped_names.get(reason)):
                more = (f"{count - len(names):,} more",) if len(names) < count else ()
                line += f": {', '.join((*names, *more))}"
            lines.append(line)
        if self.replaced_bytes:
            where = f", in {self.replaced_parts:,} texts" if self.replaced_parts > 1 else ""
            lines.append(f"replaced by U+FFFD: {self.replaced_bytes:,} (bytes that cannot be decoded{where})")
        return lines


class StoredContext:
    """A context in sealed memfds: one, or one for each value of a dict.

    It owns the descriptors, which any number of workers may get. It closes them in `close`, or when it is collected.

    Attributes:
        info: Facts about the context.
    """

    def __init__(self, pieces: Iterable[tuple[int, ContextPiece]], info: ContextInfo) -> None:
        self.info: Final = info
        self._pieces = tuple(pieces)
        fds = [fd for fd, _ in self._pieces]
        self._close = weakref.finalize(self, close_all, fds)  # once, by `close` or by the collector

    def pieces(self) -> tuple[tuple[int, ContextPiece], ...]:
        """Return the descriptors, each sealed and close-on-exec, and what they hold.

        Raises:
            ContextRefused: The context was closed. Its numbers may belong to other files by now.
        """
        if not self._close.alive:
            raise ContextRefused("this context was closed: store it again")
        return self._pieces

    @property
    def is_open(self) -> bool:
        """Whether it was not closed yet."""
        return self._close.alive

    @property
    def size_bytes(self) -> int:
        """Bytes of the context as it is stored."""
        return sum(piece.form.size_bytes for _, piece in self._pieces)

    def value(self) -> Any:
        """Return the context itself, as a worker gets it."""
        loaded: dict[str, Any] = {}
        for fd, piece in self.pieces():
            load_into(loaded, CONTEXT, fd, piece, False, decode_context)
        return loaded[CONTEXT]

    def another(self, info: ContextInfo | None = None) -> "StoredContext":
        """Return the same context with descriptors of its own, and with other facts about it if these are given."""
        return StoredContext(_duplicates(self.pieces()), info or self.info)

    def close(self) -> None:
        """Close the descriptors. Workers keep what they have loaded. Harmless when repeated."""
        self._close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def close_all(fds: Iterable[int]) -> None:
    """Close descriptors."""
    for fd in fds:
        os.close(fd)


def _duplicates(pieces: Iterable[tuple[int, ContextPiece]]) -> list[tuple[int, ContextPiece]]:
    made: list[tuple[int, ContextPiece]] = []
    try:
        for fd, piece in pieces:
            made.append((os.dup(fd), piece))
    except OSError:
        close_all(fd for fd, _ in made)
        raise
    return made


@dataclass(slots=True)
class Replaced:
    """Count of what was replaced in the texts of a context.

    Attributes:
        bytes: Bytes that became U+FFFD.
        parts: Texts that have any.
    """

    bytes: int = 0
    parts: int = 0

    def add(self, replaced_bytes: int) -> None:
        """Count those of one text."""
        self.bytes += replaced_bytes
        self.parts += replaced_bytes > 0


def sealed(memfd: TextMemfd | JsonMemfd, form: ContextForm, info: ContextInfo) -> StoredContext:
    """Seal a memfd, and return its context. No more can be written to it."""
    return StoredContext([(memfd.seal(), ContextPiece(form))], info)


class Parts:
    """Count of the parts of a context, while they are written."""

    def __init__(self) -> None:
        self.total = 0
        self._first: list[tuple[str, int]] = []
        self._chars: int | None = 0

    def add(self, name: str, length: int, is_text: bool) -> None:
        """Count one part."""
        if self.total < MAX_PARTS_TOLD:
            told = clip(name, MAX_NAME_CHARS - 3)
            self._first.append(
                (told.encode("utf-8", "backslashreplace").decode(), length)
            )  # lone surrogates are written out, since no message can hold them
        self.total += 1
        self._chars = None if self._chars is None or not is_text else self._chars + length

    def info(
        self, type_name: str, length: int, skipped: LeftOut | None = None, replaced: Replaced | None = None
    ) -> ContextInfo:
        """Return the facts. `length` is the total of a context whose parts are not all texts."""
        chars = self._chars if self.total and self._chars is not None else length
        replaced = replaced or Replaced()
        told = tuple(self._first), self.total, dict(skipped or {}), replaced.bytes, replaced.parts
        names = {reason: tuple(names) for reason, names in (skipped.names if skipped else {}).items()}
        return ContextInfo(type_name, chars, *told, skipped_names=names)
