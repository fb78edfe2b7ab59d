"""What the user hands in, as a sealed memfd that any number of workers can load.

A text, and each of the many in a folder, or in a list or dict that has nothing but long ones, is written once, in the
form in which CPython keeps it, so that a worker maps it and copies nothing (see `sandbox_worker.loading`). Everything
else is written as JSON. Both are written in pieces: what is stored takes the machine's memory once, and never this
process's own.
"""

import os
import re
import warnings
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any, Final, Self, cast

from rlm_broker.context.files import find_files
from rlm_broker.context.found import FileUnfit, FoundFile, printable
from rlm_broker.context.memfd import TextMemfd, pieces_of
from rlm_broker.context.objects import store_value
from rlm_broker.context.reading import Reading
from rlm_broker.context.stored import (
    MAX_NAME_CHARS,
    ContextInfo,
    Parts,
    Replaced,
    StoredContext,
    close_all,
    sealed,
)
from rlm_broker.context.text import DecodedText, Decoding, Errors
from rlm_broker.errors import ContextRefused
from sandbox_worker.loading.form import MAX_PIECES, ContextPiece

STREAM_BYTES: Final = 1 << 20
"""Bytes or characters of a stream that are read at a time."""

MAX_PATH_CHARS: Final = 4_096
"""Characters of the longest path that Linux has."""

AS_TEXT: Final = "; if the text itself is meant, end it with a line break"


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


@dataclass(frozen=True, slots=True)
class Encoded:
    """Files or a stream whose text is encoded in a certain way: `Encoded(Path("old.log"), "cp1252")`.

    Args:
        source: A path, `Paths`, or a stream of bytes.
        encoding: Of all bytes that do not begin with a byte order mark, by its name in Python, such as `"utf-16"`.
            None: UTF-8.
        errors: `"replace"`: U+FFFD stands in the place of bytes that cannot be decoded, and they are counted. Text with
            more than 3 such bytes in 10 is refused. `"strict"`: text with any is refused. One of many files that is
            refused is left out.

    Raises:
        ContextRefused: `source` is none of these.
        ConfigurationError: There is no such encoding of text, or `errors` is something else.
    """

    source: object
    encoding: str | None = None
    errors: Errors = "replace"

    def __post_init__(self) -> None:
        Decoding(self.encoding, self.errors)
        if not isinstance(self.source, Paths | os.PathLike) and not callable(getattr(self.source, "read", None)):
            made = f"Path({self.source!r:.60})" if isinstance(self.source, str) else "a path, Paths([...]) or a stream"
            raise ContextRefused(
                f"Encoded takes a path, Paths or a stream, not {type(self.source).__name__}: give {made}"
            )


def store(value: object) -> StoredContext:
    """Put a context where workers can load it. Blocks while it reads and copies: a second for a gigabyte.

    A text that is the name of a file or an address is refused, as by `RLM.completion`.

    Args:
        value: A text; a path object of a file (its text), or of a folder, an archive or a glob (a dict from relative
            path to text, see `find_files`); `Paths`; a stream, such as a response or a pipe, whose `read(size)` gives
            bytes or text; or one of these three as `Encoded`. A stream is read to its end, piece by piece, and stays
            the caller's to close. Compressed files, and PDF and office files with the extra `documents`, are their
            text. Or a dict, list or other value that JSON can hold (a tuple becomes a list), a pydantic model or a
            dataclass (a dict of its fields), a table or an array, and what else crosses with its type. A dict of up to
            64 values may have a `StoredContext` among them that is not a dict of stored ones itself: it is shared and
            not copied, and stays the caller's to close.

    Raises:
        ContextRefused: It is none of these, it cannot be read, it is an empty file, or there is no memory for it.
    """
    refuse_a_name(value)
    return store_as_it_is(value)


def store_as_it_is(value: object) -> StoredContext:
    """Store as `store` does. A text is taken for itself: what model code gives must not tell which files there are."""
    if isinstance(value, Encoded):
        given, how = value.source, Decoding(value.encoding, value.errors)
    else:
        given, how = value, Decoding()
    try:
        match given:
            case str():
                return _store_text(pieces_of(given))
            case Paths():
                return _store_paths(given, how)
            case os.PathLike():
                return _store_paths(Paths([given]), how)
        if callable(getattr(given, "read", None)):
            return _store_stream(given, how)
        if isinstance(given, dict) and any(isinstance(each, StoredContext) for each in given.values()):
            return _store_several(given)
        return store_value(given)
    except OSError as error:
        raise ContextRefused(f"the context cannot be stored in memory: {error.strerror}") from error


def _store_text(pieces: Iterable[str | bytes], file: FoundFile | None = None) -> StoredContext:
    with TextMemfd() as memfd:
        length = memfd.add_text(pieces, pieces.grows if isinstance(pieces, DecodedText) else None)
        if file and not length:
            raise ContextRefused(f"{file.given} is empty: there is nothing in it to ask about")
        parts = ((file.name, length),) if file else ()
        replaced = Replaced()
        replaced.add(pieces.replaced if isinstance(pieces, DecodedText) else 0)
        told = ContextInfo("str", length, parts, len(parts), {}, replaced.bytes, replaced.parts)
        return sealed(memfd, memfd.form, told)


def _store_stream(stream: Any, how: Decoding) -> StoredContext:
    """Store what a stream gives, without ever having it as a whole."""
    pieces = _read(stream)
    first = next(pieces, b"")
    if isinstance(first, str):
        if how != Decoding():
            raise ContextRefused("a stream of text is decoded already: give one of bytes, or no encoding")
        return _store_text(piece for text in chain([first], pieces) for piece in pieces_of(cast("str", text)))
    given = chain([first] if first else [], cast("Iterator[bytes]", pieces))
    try:
        return _store_text(Reading(how).of_stream(given, "the stream"))
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


def _store_paths(paths: Paths, how: Decoding) -> StoredContext:
    if not paths:
        raise ContextRefused("no file or folder was named")
    files, skipped = find_files(paths)
    reading = Reading(how, skipped)
    if len(paths) != 1 or not files or not files[0].named:
        return _store_texts((each for file in files for each in reading.texts_of(file)), reading, paths)
    try:
        with reading.opened(files[0]) as content:
            if isinstance(content, DecodedText):
                return _store_text(content, files[0])
            return _store_texts(reading.texts_in(content, files[0].given), reading, paths)
    except FileUnfit as error:
        raise ContextRefused(str(error)) from error


def _store_texts(texts: Iterable[tuple[str, DecodedText]], reading: Reading, paths: Paths) -> StoredContext:
    """Store the texts of files as a dict by their names, each of which is there once."""
    taken: dict[str, int] = {}  # and the number that the next one of the name gets
    parts, replaced = Parts(), Replaced()
    with TextMemfd() as memfd:
        for name, text in texts:
            try:
                length = memfd.add_text(text, text.grows)
            except FileUnfit as error:
                reading.skipped.add(error.reason, printable(name))
                continue
            if name in taken:  # an archive may have two members of one name
                name = _another(name, taken)
            taken[name] = 1
            parts.add(name, length, is_text=True)
            replaced.add(text.replaced)
        skipped = reading.skipped
        if not taken:
            left_out = ", ".join(f"{times:,} {reason}" for reason, times in sorted(skipped.items())) or "nothing"
            raise ContextRefused(f"there is no text in {', '.join(map(printable, paths))}; left out: {left_out}")
        form = memfd.add_names([*taken])
        return sealed(memfd, form, parts.info("dict", form.length, skipped, replaced))


def _another(name: str, taken: dict[str, int]) -> str:
    """Return a name that is not taken yet, for a further text of this one."""
    while (other := f"{name} ({taken[name]})") in taken:
        taken[name] += 1
    return other


def _store_several(values: Mapping[str, object]) -> StoredContext:
    """Store a dict of which some values are stored already: those are not copied."""
    if len(values) > MAX_PIECES:
        raise ContextRefused(f"a dict with a StoredContext in it has {len(values):,} keys, more than {MAX_PIECES}")
    pieces: list[tuple[int, ContextPiece]] = []
    parts = Parts()
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
        close_all(fd for fd, _ in pieces)
        raise
    return StoredContext(pieces, parts.info("dict", sum(piece.form.length for _, piece in pieces)))
