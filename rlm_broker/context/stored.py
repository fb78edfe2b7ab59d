"""A context that is stored, and what may be told of it."""

import os
import weakref
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any, Final, Self

from rlm_broker.context.found import LeftOut
from rlm_broker.context.memfd import JsonMemfd, TextMemfd
from rlm_broker.errors import ContextRefused
from sandbox_worker.loading.context import load_into
from sandbox_worker.loading.form import ContextForm, ContextPiece
from sandbox_worker.wire.names import CONTEXT
from sandbox_worker.wire.values import decode_context

MAX_PARTS_TOLD: Final = 100
"""Parts that a `ContextInfo` names."""

MAX_NAME_CHARS: Final = 200
"""Of a part's name in a `ContextInfo`; of a longer key only the start is told."""


@dataclass(frozen=True, slots=True)
class ContextInfo:
    """What may be told of a context without reading it.

    Attributes:
        type_name: Of the Python value that the worker gets: `str`, `dict`, `list`, `DataFrame`, `ndarray`, ...
        total_chars: Characters of a text, or of all texts in a dict or list that has nothing but texts in it;
            otherwise bytes of the context as it is stored.
        parts: Name and length of the first `MAX_PARTS_TOLD` files, keys of a dict, or items of a list (by index). A
            name has at most `MAX_NAME_CHARS`. The length is in characters; of what is no text, in bytes of its JSON.
        parts_total: How many parts there are.
        skipped: How many files or folders below what was named, or entries of archives, were left out, by reason.
        replaced_bytes, replaced_parts: How many bytes could not be decoded, so that U+FFFD stands in their place, and
            in how many texts.
        made_of: Class of an object that arrives as a dict, such as a dataclass; empty for anything else.
        shape: Of a table or an array; empty for anything else.
        skipped_names: Reason -> the names of the first 20 of what was left out for it.
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
        """Return what it is, as it follows the word "is"."""
        if self.shape:
            return f"a {self.type_name} of shape {self.shape}"
        made_of = f" made of an object of class {self.made_of}," if self.made_of else ""
        return f"a {self.type_name}{made_of} with {self.total_chars:,} characters in all"

    def remarks(self, *, with_names: bool = False) -> list[str]:
        """Return what is not as the user has it: what was left out, and what was replaced. One line each."""
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
    """A context in sealed memfds: one, or one for each value of a dict. It owns the descriptors, which every worker may
    be given.

    Attributes:
        info: What may be told of it.
    """

    def __init__(self, pieces: Iterable[tuple[int, ContextPiece]], info: ContextInfo) -> None:
        self.info: Final = info
        self._pieces = tuple(pieces)
        fds = [fd for fd, _ in self._pieces]
        self._close = weakref.finalize(self, close_all, fds)  # once, by `close` or by the collector

    def pieces(self) -> tuple[tuple[int, ContextPiece], ...]:
        """Return the descriptors, each with all four seals and close-on-exec, and what they hold.

        Raises:
            ContextRefused: It was closed: the numbers may be other files' by now.
        """
        if not self._close.alive:
            raise ContextRefused("this context was closed: store it again")
        return self._pieces

    @property
    def size_bytes(self) -> int:
        """Bytes that it takes as it is stored."""
        return sum(piece.form.size_bytes for _, piece in self._pieces)

    def value(self) -> Any:
        """The context itself, as a worker gets it."""
        loaded: dict[str, Any] = {}
        for fd, piece in self.pieces():
            load_into(loaded, CONTEXT, fd, piece, False, decode_context)
        return loaded[CONTEXT]

    def another(self) -> "StoredContext":
        """The same context, with descriptors of its own."""
        return StoredContext(_duplicates(self.pieces()), self.info)

    def close(self) -> None:
        """Give the descriptors back. What workers have loaded stays theirs. Closing twice is harmless."""
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
    """Counts what was replaced in the texts of a context.

    Attributes:
        bytes: Bytes in whose place U+FFFD stands.
        parts: Texts that have any.
    """

    bytes: int = 0
    parts: int = 0

    def add(self, replaced_bytes: int) -> None:
        """Count those of one text."""
        self.bytes += replaced_bytes
        self.parts += replaced_bytes > 0


def sealed(memfd: TextMemfd | JsonMemfd, form: ContextForm, info: ContextInfo) -> StoredContext:
    """Return the context of a memfd, which is written to no more."""
    return StoredContext([(memfd.seal(), ContextPiece(form))], info)


class Parts:
    """Counts the parts of a context while they are written."""

    def __init__(self) -> None:
        self.total = 0
        self._first: list[tuple[str, int]] = []
        self._chars: int | None = 0

    def add(self, name: str, length: int, is_text: bool) -> None:
        """Count one part."""
        if self.total < MAX_PARTS_TOLD:
            told = name if len(name) <= MAX_NAME_CHARS else f"{name[: MAX_NAME_CHARS - 3]}..."
            self._first.append(
                (told.encode("utf-8", "backslashreplace").decode(), length)
            )  # no message can hold lone surrogates
        self.total += 1
        self._chars = None if self._chars is None or not is_text else self._chars + length

    def info(
        self, type_name: str, length: int, skipped: LeftOut | None = None, replaced: Replaced | None = None
    ) -> ContextInfo:
        """Return it. `length` counts where not all parts are texts."""
        chars = self._chars if self.total and self._chars is not None else length
        replaced = replaced or Replaced()
        told = tuple(self._first), self.total, dict(skipped or {}), replaced.bytes, replaced.parts
        names = {reason: tuple(names) for reason, names in (skipped.names if skipped else {}).items()}
        return ContextInfo(type_name, chars, *told, skipped_names=names)
