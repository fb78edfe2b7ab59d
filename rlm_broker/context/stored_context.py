"""A stored context, and the facts about it that need no reading."""

import hashlib
import json
import mmap
import os
import weakref
from collections.abc import Iterable
from types import TracebackType
from typing import Any, Final, NamedTuple, Self

import msgspec

from rlm_broker.context.found_files import LeftOut
from rlm_broker.context.memfd import JsonMemfd, TextMemfd
from rlm_broker.errors import ContextRefused
from rlm_broker.results import ContextInfo
from rlm_broker.values.text import clip, encodable
from sandbox_worker.loading.context import index, load_into
from sandbox_worker.loading.form import ContextForm, ContextPiece
from sandbox_worker.wire.names import CONTEXT
from sandbox_worker.wire.values import decode_context

MAX_PARTS_TOLD: Final = 100
"""Most parts named by a `ContextInfo`."""

MAX_NAME_CHARS: Final = 200
"""Characters of a part's name in a `ContextInfo`. Of a longer key it has the start."""


class StoredContext:
    """A context in sealed memfds: one, or one for each value of a dict.

    It owns the descriptors, for any number of workers. It closes them in `close`, or when it is collected.

    Example:
        ```python
        with store(Path("logs")) as context:
            for question in ("Which service failed?", "When did it fail?"):
                print(rlm.completion(context, question).response)
        ```

    Attributes:
        info: Facts about the context.
    """

    def __init__(self, pieces: Iterable[tuple[int, ContextPiece]], info: ContextInfo) -> None:
        self.info: Final = info
        self._pieces = tuple(pieces)
        fds = [fd for fd, _ in self._pieces]
        self._close = weakref.finalize(self, close_all, fds)  # once, by `close` or by the collector

    def pieces(self) -> tuple[tuple[int, ContextPiece], ...]:
        """Return the descriptors, each sealed and close-on-exec, and what they hold. Raise ContextRefused after
        `close`: the descriptors' numbers may belong to other files by then."""
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
        """Return the context itself, as a worker gets it.

        Example:
            ```python
            with store({"a": 1}) as context:
                print(context.value())  # {'a': 1}
            ```
        """
        loaded: dict[str, Any] = {}
        for fd, piece in self.pieces():
            load_into(loaded, CONTEXT, fd, piece, False, decode_context)
        return loaded[CONTEXT]

    def another(self) -> "StoredContext":
        """Return the same context with descriptors of its own.

        Example:
            ```python
            with store("some text") as context:
                copy = context.another()
            print(copy.value())  # some text
            ```
        """
        return StoredContext(_duplicates(self.pieces()), self.info)

    def close(self) -> None:
        """Close the descriptors. Workers keep what they have loaded. Harmless when repeated.

        Example:
            ```python
            context = store("some text")
            context.close()
            print(context.is_open)  # False
            ```
        """
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


def sealed(memfd: TextMemfd | JsonMemfd, form: ContextForm, info: ContextInfo) -> StoredContext:
    """Seal a memfd, and return its context. No more can be written to it."""
    return StoredContext([(memfd.seal(), ContextPiece(form))], info)


class StoredParts:
    """Count of the parts of a context, while they are written."""

    def __init__(self) -> None:
        self.total = 0
        self._first: list[tuple[str, int]] = []
        self._chars: int | None = 0
        self._replaced_bytes = self._replaced_parts = 0
        self._kinds: dict[str, int] = {}

    def add(self, name: str, length: int, is_text: bool, replaced_bytes: int = 0, kind: str = "") -> None:
        """Count one part, the bytes in it that became U+FFFD, and the kind of its file if that is no text."""
        if kind:
            self._kinds[kind] = self._kinds.get(kind, 0) + 1
        if self.total < MAX_PARTS_TOLD:
            self._first.append((encodable(clip(name, MAX_NAME_CHARS - 3)), length))
        self.total += 1
        self._replaced_bytes += replaced_bytes
        self._replaced_parts += replaced_bytes > 0
        self._chars = None if self._chars is None or not is_text else self._chars + length

    def info(self, type_name: str, length: int, skipped: LeftOut | None = None) -> ContextInfo:
        """Return the facts. `length` is the total of a context whose parts are not all texts."""
        chars = self._chars if self.total and self._chars is not None else length
        told = tuple(self._first), self.total, dict(skipped or {}), self._replaced_bytes, self._replaced_parts
        names = {reason: tuple(names) for reason, names in (skipped.names if skipped else {}).items()}
        return ContextInfo(type_name, chars, *told, skipped_names=names, kinds=self._kinds)


BEGINNING_CHARS: Final = 20_000
"""Characters of a context's beginning, unless the caller wants fewer."""
_CODECS: Final = {0: "latin-1", 1: "latin-1", 2: "utf-16-le", 4: "utf-32-le"}
"""Codecs by the width of a text's characters, in bytes; 0 is ASCII."""


class ContextBeginning(NamedTuple):
    """The first characters of a context, and whether they are all that it has."""

    text: str
    is_whole: bool


def whole_text(context: StoredContext, max_bytes: int) -> str:
    """Return a context as a prompt has it: a text as it is, any other value as JSON. Raise ContextRefused if it takes
    more than `max_bytes` as it is stored, or is a table or an array."""
    if context.size_bytes > max_bytes:
        raise ContextRefused(f"a context of {context.size_bytes:,} bytes is too long for a prompt: give a smaller part")
    (fd, piece), *more = context.pieces()
    if piece.form.kind == "value":
        raise ContextRefused(f"a {context.info.type_name} cannot be part of a prompt: give text or plain values")
    if piece.form.kind == "json" and piece.name is None and not more:
        return os.pread(fd, piece.form.length, 0).decode("utf-8", "replace")
    value = context.value()
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def beginning(context: StoredContext, chars: int = BEGINNING_CHARS) -> ContextBeginning:
    """Return the first characters of a context: of a text, of the first of several texts, or of JSON."""
    (fd, piece), *more = context.pieces()
    form, is_alone = piece.form, piece.name is None and not more
    if form.kind == "value":  # tables and arrays: a model cannot read their bytes
        return ContextBeginning("", False)
    if form.kind == "json":
        data = os.pread(fd, min(4 * chars, form.length), 0)
        text = data.decode("utf-8", "replace")
        return ContextBeginning(text[:chars], is_alone and len(data) == form.length and len(text) <= chars)
    width, length = _first(fd, form)
    text = os.pread(fd, (width or 1) * min(chars, length), 0).decode(_CODECS[width], "replace")
    return ContextBeginning(text, is_alone and form.kind == "text" and length <= chars)


def _first(fd: int, form: ContextForm) -> tuple[int, int]:
    """Return the width and the length of the first text."""
    if form.kind == "text":
        return form.width, form.length
    lengths, kinds, _, _ = index(fd, form)
    return kinds[0], lengths[0]


def digest_of(context: StoredContext) -> bytes:
    """Return the SHA-256 of a context's pieces. Call it in a thread: it takes a second for each gigabyte.

    Args:
        context: Context that stays open meanwhile.

    Raises:
        OSError: There is no address space to map a piece.
    """
    digest = hashlib.sha256()
    for fd, piece in context.pieces():
        digest.update(msgspec.json.encode(piece))  # the form, too: contexts of two forms may have the same bytes
        with mmap.mmap(fd, piece.form.size_bytes, access=mmap.ACCESS_READ) as mapped:
            digest.update(mapped)
    return digest.digest()
