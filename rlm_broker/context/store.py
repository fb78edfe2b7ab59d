"""What the user hands in, as a sealed memfd that any number of workers can load.

A text, and each of the many in a folder, or in a list or dict that has nothing but long ones, is written once, in the
form in which CPython keeps it, so that a worker maps it and copies nothing (see `sandbox_worker.loading`). Everything
else is written as JSON. Both are written in pieces: what is stored takes the machine's memory once, and never this
process's own.
"""

import os
import re
import warnings
import weakref
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from itertools import chain
from pathlib import Path
from types import TracebackType
from typing import Any, Final, Self, cast

from rlm_broker.context.files import FileUnfit, FoundFile, decoded, find_files, printable, text_of
from rlm_broker.context.memfd import JsonMemfd, TextMemfd, pieces_of
from rlm_broker.errors import ContextRefused
from rlm_broker.plain import problem_with
from sandbox_worker.loading.context import load_into
from sandbox_worker.loading.form import MAX_PIECES, ContextForm, ContextPiece
from sandbox_worker.wire.names import CONTEXT

MAX_PARTS_TOLD: Final = 100
"""Parts that a `ContextInfo` names."""

MAX_NAME_CHARS: Final = 200
"""Of a part's name in a `ContextInfo`; of a longer key only the start is told."""

MAPPED_CHARS: Final = 1_000
"""Texts of a dict or list that are so long on average are mapped; of shorter ones JSON is decoded sooner."""


STREAM_BYTES: Final = 1 << 20
"""Bytes or characters of a stream that are read at a time."""

MAX_PATH_CHARS: Final = 4_096
"""Characters of the longest path that Linux has."""

AS_TEXT: Final = "; if the text itself is meant, end it with a line break"


@dataclass(frozen=True, slots=True)
class ContextInfo:
    """What may be told of a context without reading it.

    Attributes:
        type_name: Of the Python value that the worker gets: `str`, `dict`, `list`, `int`, `float`, `bool`, `NoneType`.
        total_chars: Characters of a text, or of all texts in a dict or list that has nothing but texts in it;
            otherwise bytes of the context's JSON.
        parts: Name and length of the first `MAX_PARTS_TOLD` files, keys of a dict, or items of a list (by index). A
            name has at most `MAX_NAME_CHARS`. The length is in characters; of what is no text, in bytes of its JSON.
        parts_total: How many parts there are.
        skipped: How many files or folders below what was named were left out, by reason.
    """

    type_name: str
    total_chars: int
    parts: tuple[tuple[str, int], ...] = ()
    parts_total: int = 0
    skipped: Mapping[str, int] = field(default_factory=dict)


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
        self._close = weakref.finalize(self, _close_all, fds)  # once, by `close` or by the collector

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
            load_into(loaded, CONTEXT, fd, piece, mapping_works=False)
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


def _close_all(fds: Iterable[int]) -> None:
    for fd in fds:
        os.close(fd)


def _duplicates(pieces: Iterable[tuple[int, ContextPiece]]) -> list[tuple[int, ContextPiece]]:
    made: list[tuple[int, ContextPiece]] = []
    try:
        for fd, piece in pieces:
            made.append((os.dup(fd), piece))
    except OSError:
        _close_all(fd for fd, _ in made)
        raise
    return made


class Paths(tuple[Path, ...]):
    """Paths as a command line gives them: one file is a text, anything else a dict from relative path to text."""

    __slots__ = ()

    def __new__(cls, paths: Iterable[str | os.PathLike[str]]) -> Self:
        try:
            return super().__new__(cls, map(Path, paths))
        except TypeError as error:
            raise ContextRefused(f"Paths takes a list of paths: {error}") from None


def refuse_a_name(text: object, what: str = "the context", remedy: str = "give Path({0!r})") -> None:
    """Refuse a text of one line that is the name of a file or an address, given in the place of what it names.

    A word that is also the name of a folder may be meant: that is a warning. This is not a part of `store`, which also
    stores prompts of model code: that code must not learn which files there are.

    Raises:
        ContextRefused: It is a path that exists, or an address.
    """
    if not isinstance(text, str) or not 0 < len(text) <= MAX_PATH_CHARS or not text.isprintable():  # one line
        return
    if re.fullmatch(r"(https?|ftp|file)://\S+", text):
        raise ContextRefused(f"{what} {text!r} is an address and not what is there: fetch that first{AS_TEXT}")
    try:
        path = Path(text).expanduser()
        exists = path.exists()
    except (OSError, ValueError, RuntimeError):  # no possible file name, or `~name` of an unknown user
        return
    if not exists:
        return
    told = f"{what} {text!r} is a text, and a path of that name exists: if that is meant, {remedy.format(text)}"
    if path.is_file() or "/" in text or text.startswith(("~", ".")):
        raise ContextRefused(f"{told}{AS_TEXT}")
    warnings.warn(f"{told}{AS_TEXT}", stacklevel=2)


def store(value: object) -> StoredContext:
    """Put a context where workers can load it. Blocks while it reads and copies: a second for a gigabyte.

    A text that is the name of a file or an address is refused, as by `RLM.completion`.

    Args:
        value: A text; a dict, list or other value that JSON can hold (a tuple becomes a list); a path object of a file
            (its text), or of a folder or a glob (a dict from relative path to text, see `find_files`); `Paths`; or a
            stream, such as a response or a pipe, whose `read(size)` gives UTF-8 or text. It is read to its end, piece
            by piece, and stays the caller's to close. A dict of up to 64 values may have a `StoredContext` among them
            that is not a dict of stored ones itself: it is shared and not copied, and stays the caller's to close.

    Raises:
        ContextRefused: It is none of these, it cannot be read, it is an empty file, or there is no memory for it.
    """
    refuse_a_name(value)
    return store_as_it_is(value)


def store_as_it_is(value: object) -> StoredContext:
    """Store as `store` does. A text is taken for itself: what model code gives must not tell which files there are."""
    try:
        match value:
            case str():
                return _store_text(pieces_of(value))
            case Paths():
                return _store_paths(value)
            case os.PathLike():
                return _store_paths(Paths([value]))
        if callable(getattr(value, "read", None)):
            return _store_stream(value)
        if isinstance(value, dict) and any(isinstance(each, StoredContext) for each in value.values()):
            return _store_several(value)
        if problem := problem_with(value):
            raise ContextRefused(problem)
        return _store_value(value)
    except OSError as error:
        raise ContextRefused(f"the context cannot be stored in memory: {error.strerror}") from error


def _store_text(pieces: Iterable[str | bytes], file: FoundFile | None = None) -> StoredContext:
    with TextMemfd() as memfd:
        length = memfd.add_text(pieces)
        if file and not length:
            raise ContextRefused(f"{file.given} is empty: there is nothing in it to ask about")
        parts = ((file.name, length),) if file else ()
        form = memfd.form
        return _sealed(memfd, form, ContextInfo("str", length, parts, len(parts)))


def _store_stream(stream: Any) -> StoredContext:
    """Store what a stream gives, without ever having it as a whole."""
    pieces = _read(stream)
    first = next(pieces, b"")
    if isinstance(first, str):
        return _store_text(piece for text in chain([first], pieces) for piece in pieces_of(cast("str", text)))
    try:
        return _store_text(decoded(cast("Iterator[bytes]", chain([first], pieces)), "the stream"))
    except FileUnfit as error:
        raise ContextRefused(str(error)) from None


def _read(stream: Any) -> Iterator[str | bytes]:
    kind: type[str] | type[bytes] | None = None
    while True:
        try:
            piece = stream.read(STREAM_BYTES)
        except Exception as error:
            raise ContextRefused(f"the stream cannot be read: {type(error).__name__}: {error}") from error
        if piece is None:
            raise ContextRefused("the stream has nothing to read just now, and does not wait: give one that blocks")
        if not piece:
            return
        kind = kind or (str if isinstance(piece, str) else bytes)
        if not isinstance(piece, kind):
            raise ContextRefused(f"a stream gives bytes or text, and its `read` gave {type(piece).__name__}")
        yield piece


def _store_paths(paths: Paths) -> StoredContext:
    if not paths:
        raise ContextRefused("no file or folder was named")
    files, skipped = find_files(paths)
    if len(paths) == 1 and files and files[0].named:
        try:
            return _store_text(text_of(files[0]), files[0])
        except FileUnfit as error:
            raise ContextRefused(str(error)) from error
    with TextMemfd() as memfd:
        names: list[str] = []
        parts = _Parts()
        for file in files:
            try:
                length = memfd.add_text(text_of(file))
            except FileUnfit as error:
                skipped[error.reason] += 1
            else:
                names.append(file.name)
                parts.add(file.name, length, is_text=True)
        if not names:
            left_out = ", ".join(f"{times:,} {reason}" for reason, times in sorted(skipped.items())) or "nothing"
            raise ContextRefused(f"there is no text in {', '.join(map(printable, paths))}; left out: {left_out}")
        form = memfd.add_names(names)
        return _sealed(memfd, form, parts.info("dict", form.length, skipped))


def _store_value(value: object) -> StoredContext:
    if isinstance(value, dict) and _are_worth_mapping(value.values()):
        return _store_texts(list(value), value.values())
    if isinstance(value, list | tuple) and _are_worth_mapping(value):
        return _store_texts(None, value)
    parts = _Parts()
    with JsonMemfd() as memfd:
        if isinstance(value, dict):
            memfd.write(b"{")
            for key, child in value.items():
                memfd.add_key(key, first=not parts.total)
                parts.add(key, memfd.add(child), isinstance(child, str))
            memfd.write(b"}")
        elif isinstance(value, list | tuple):
            memfd.write(b"[")
            for child in value:
                memfd.write(b"," if parts.total else b"")
                parts.add(str(parts.total), memfd.add(child), isinstance(child, str))
            memfd.write(b"]")
        else:
            memfd.add(value)
        form = memfd.form
        return _sealed(memfd, form, parts.info(_loaded_type(value).__name__, form.length))


def _are_worth_mapping(values: Collection[object]) -> bool:
    """Whether they are nothing but texts, and long ones."""
    chars = 0
    for value in values:
        if not isinstance(value, str):
            return False
        chars += len(value)
    return chars >= max(1, len(values)) * MAPPED_CHARS


def _store_texts(names: list[str] | None, texts: Iterable[str]) -> StoredContext:
    with TextMemfd() as memfd:
        parts = _Parts()
        for number, text in enumerate(texts):
            length = memfd.add_text(pieces_of(text))
            parts.add(str(number) if names is None else names[number], length, is_text=True)
        form = memfd.add_names(names)
        return _sealed(memfd, form, parts.info("list" if names is None else "dict", form.length))


def _sealed(memfd: TextMemfd | JsonMemfd, form: ContextForm, info: ContextInfo) -> StoredContext:
    return StoredContext([(memfd.seal(), ContextPiece(form))], info)


def _store_several(values: Mapping[str, object]) -> StoredContext:
    """Store a dict of which some values are stored already: those are not copied."""
    if len(values) > MAX_PIECES:
        raise ContextRefused(f"a dict with a StoredContext in it has {len(values):,} keys, more than {MAX_PIECES}")
    pieces: list[tuple[int, ContextPiece]] = []
    parts = _Parts()
    try:
        for name, value in values.items():
            if not isinstance(name, str) or len(name) > MAX_NAME_CHARS or not name.isprintable():
                raise ContextRefused(
                    f"{name!r:.50}: beside a StoredContext a key is printable text of up to {MAX_NAME_CHARS} characters"
                )
            with value.another() if isinstance(value, StoredContext) else store_as_it_is(value) as stored:
                (fd, piece), *more = stored.pieces()
                if more or piece.name is not None:
                    raise ContextRefused(f"{name!r} is a dict of stored contexts itself: put them into one dict")
                pieces.append((os.dup(fd), ContextPiece(piece.form, name)))
            parts.add(name, stored.info.total_chars, stored.info.type_name == "str")
    except BaseException:
        _close_all(fd for fd, _ in pieces)
        raise
    return StoredContext(pieces, parts.info("dict", sum(piece.form.length for _, piece in pieces)))


def _loaded_type(value: object) -> type:
    """What JSON makes of `value`: a `Counter` comes out as a dict, a named tuple as a list."""
    if isinstance(value, tuple):
        return list
    return next(plain for plain in (dict, list, bool, int, float, type(None)) if isinstance(value, plain))


class _Parts:
    """Counts the parts of a context while they are written."""

    def __init__(self) -> None:
        self.total = 0
        self._first: list[tuple[str, int]] = []
        self._chars: int | None = 0

    def add(self, name: str, length: int, is_text: bool) -> None:
        if self.total < MAX_PARTS_TOLD:
            told = name if len(name) <= MAX_NAME_CHARS else f"{name[: MAX_NAME_CHARS - 3]}..."
            self._first.append(
                (told.encode("utf-8", "backslashreplace").decode(), length)
            )  # no message can hold lone surrogates
        self.total += 1
        self._chars = None if self._chars is None or not is_text else self._chars + length

    def info(self, type_name: str, length: int, skipped: Mapping[str, int] | None = None) -> ContextInfo:
        """Return it. `length` counts where not all parts are texts."""
        chars = self._chars if self.total and self._chars is not None else length
        return ContextInfo(type_name, chars, tuple(self._first), self.total, dict(skipped or {}))
