"""Storing a context: from the user's text, files or values to a sealed memfd for any number of workers.

Long texts are written once, in CPython's own form, so a worker maps them and copies no character (see
`context.memfd`). These are: one text, the texts of files, and the texts of a list or dict of long texts alone. Any
other value is written as JSON. Both are written in pieces: a context takes the machine's memory once, and never this
process's own.
"""

import codecs
import os
import re
import threading
import warnings
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Self, cast

from rlm_broker.concurrency.threads import stop_requested
from rlm_broker.context.found_files import MAX_PATH_CHARS, PIECE_BYTES, FileUnfit, FoundFile, LeftOut, printable
from rlm_broker.context.memfd import JsonMemfd, TextMemfd, pieces_of
from rlm_broker.context.objects import store_value
from rlm_broker.context.stored_context import MAX_NAME_CHARS, StoredContext, StoredParts, close_all, sealed
from rlm_broker.context.text import DecodedText, Errors, TextDecoding
from rlm_broker.errors import ContextRefused, is_shortage, refused_by_machine
from rlm_broker.results import ContextInfo
from sandbox_worker.loading.form import MAX_PIECES, ContextPiece

if TYPE_CHECKING:
    from rlm_broker.context.file_content import Reading

STREAM_BYTES: Final = 1 << 20
"""Bytes or characters of a stream read at a time."""

AS_TEXT: Final = "; if the text itself is meant, end it with a line break"
"""End of the errors about a text that is also a name."""


class Paths(tuple[Path, ...]):
    """Paths as a command line gives them: one file is a text; several files or a folder are a dict of texts by relative
    path.

    Example:
        ```python
        rlm.completion(Paths([Path("report.txt"), Path("logs")]), "Which service failed?")
        ```
    """

    __slots__ = ()

    def __new__(cls, paths: Iterable[str | os.PathLike[str]]) -> Self:
        if isinstance(paths, str | os.PathLike):
            raise ContextRefused(f"Paths takes a list of paths: write Paths([{os.fspath(paths)!r}])")
        try:
            return super().__new__(cls, map(Path, paths))
        except TypeError as error:
            raise ContextRefused(f"Paths takes a list of paths: {error}") from None

    def files(self) -> dict[str, Path]:
        """Return the files that they stand for, by their names in a context. What a context leaves out is not there.

        Example:
            ```python
            print(list(Paths([Path("logs")]).files()))
            ```

        Raises:
            ContextRefused: A path does not exist, or is likely a secret.
        """
        from rlm_broker.context.files import find_files

        return {file.name: Path(file.path) for file in find_files(self)[0]}


def refuse_a_name(text: object, what: str = "the context", remedy: str = "give Path({0!r})") -> None:
    """Raise ContextRefused for a text of one line that is an address, or the name of a file, in place of the content.

    A word that is also the name of a folder may be meant as a text: that is a warning. `store_as_it_is` does not call
    this: it stores prompts of model code, which must not learn what files there are.

    Args:
        text: The given value; one other than a text passes.
        what: Subject of the error, for example "the context".
        remedy: Expression that reads the file; `{0!r}` stands for the text.
    """
    if not isinstance(text, str) or not 0 < len(text) <= MAX_PATH_CHARS or not text.isprintable():  # several lines
        return
    if re.fullmatch(r"(https?|ftp|file)://\S+", text):
        raise ContextRefused(f"{what} {text!r} is an address, not its content: fetch the content first{AS_TEXT}")
    try:
        path = Path(text).expanduser()
        exists = path.exists()
    except (OSError, ValueError, RuntimeError):  # not a possible file name, or `~name` of an unknown user
        return
    if not exists:
        return
    told = f"{what} {text!r} is a text, and a path of that name exists: if that is meant, {remedy.format(text)}"
    if path.is_file() or "/" in text or text.startswith(("~", ".")):
        raise ContextRefused(f"{told}{AS_TEXT}")
    warnings.warn(f"{told}{AS_TEXT}", stacklevel=2)


@dataclass(frozen=True, slots=True)
class Encoded:
    """Files or a stream whose text has a certain encoding: `Encoded(Path("old.log"), "cp1252")`.

    Example:
        ```python
        rlm.completion(Encoded(Path("old.log"), "cp1252"), "What happened at 09:00?")
        ```

    Args:
        source: A path, `Paths`, or a stream of bytes.
        encoding: Encoding of all bytes without a byte order mark at their beginning, by its name in Python, such as
            `"utf-16"`. None is UTF-8.
        errors: `"replace"`: each undecodable byte becomes U+FFFD and is counted; text with more than 3 such
            bytes in 10 is refused. `"strict"`: text with any such byte is refused. If it is one of many files, a
            refused file is left out.

    Raises:
        ContextRefused: `source` is none of these.
        ConfigurationError: There is no such text encoding, or `errors` is another value.
    """

    source: object
    encoding: str | None = None
    errors: Errors = "replace"

    def __post_init__(self) -> None:
        TextDecoding(self.encoding, self.errors)
        if not isinstance(self.source, Paths | os.PathLike) and not callable(getattr(self.source, "read", None)):
            made = f"Path({self.source!r:.60})" if isinstance(self.source, str) else "a path, Paths([...]) or a stream"
            raise ContextRefused(
                f"Encoded takes a path, Paths or a stream, not {type(self.source).__name__}: give {made}"
            )


@dataclass(frozen=True, slots=True)
class OpenFile:
    """A regular file that is open, for example a memfd, and is read from its start to its end as a file of a name.

    Example:
        ```python
        with open("report.txt", "rb") as file, store_as_it_is(OpenFile(file.fileno(), "report.txt")) as context:
            RLM("offline").completion(context, "What is it about?")
        ```

    Args:
        fd: Descriptor. It stays the caller's to close, and open until the context is stored.
        name: Name of the file. Its ending distinguishes documents and archives from texts.
    """

    fd: int
    name: str


def store(value: object) -> StoredContext:
    """Put a context where workers can load it. It blocks while it reads and copies: a second for a gigabyte.

    A text that is the name of a file or an address is refused, as by `RLM.completion`.

    Example:
        ```python
        with store({"a": "first", "b": "second"}) as context:
            print(context.info.parts)  # (('a', 5), ('b', 6))
            print(rlm.completion(context, "How many texts are there?").response)  # 2
        ```

    Args:
        value: One of these.

            - A text.
            - A path object. A file is its text. A folder, an archive or a glob is a dict from relative path to text,
              see `find_files`. Compressed files, pages of HTML, notebooks, PDF and office files with the extra
              `documents`, and Parquet files with the extra `parquet`, are their text. A database of SQLite is a dict
              of its tables as CSV. A picture is a `data:` address.
            - `Paths`: several of those.
            - An `OpenFile`, as a path object.
            - A stream, such as a response or a pipe, whose `read(size)` returns bytes or text. It is read to its end,
              piece by piece, and stays the caller's to close.
            - One of the last three as `Encoded`.
            - A dict, list or other value of JSON; a tuple becomes a list. A pydantic model or a dataclass
              becomes a dict of its fields. A table or an array, and other values that cross, keep their type.
            - A dict of up to 64 values with a `StoredContext` among them. That one is shared and not copied, stays the
              caller's to close, and must not be a dict of stored contexts itself.

    Returns:
        The stored context. The caller closes it.

    Raises:
        ContextRefused: It is none of these, it cannot be read, or it is an empty file.
        SandboxFailed: There is no memory or no descriptor for it.
    """
    refuse_a_name(value)
    return store_as_it_is(value)


def store_as_it_is(value: object) -> StoredContext:
    """Store as `store` does, but take each text for itself, also one that is the name of a file.

    A server stores the texts of strangers by it: no error then tells them which files exist.

    Example:
        ```python
        with store_as_it_is("/etc/passwd") as context:
            print(context.info.total_chars)
        ```

    Args:
        value: As for `store`, or an `OpenFile`.

    Raises:
        ContextRefused: The value cannot be a context.
    """
    if isinstance(value, Encoded):
        given, how = value.source, TextDecoding(value.encoding, value.errors)
    else:
        given, how = value, TextDecoding()
    try:
        match given:
            case str():
                return _store_text(pieces_of(given))
            case OpenFile():
                found = FoundFile(given.name, printable(given.name), f"/proc/self/fd/{given.fd}", named=True)
                return _store_file(found, _reading(how))
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
        if is_shortage(error):
            raise refused_by_machine("the context cannot be stored in memory", error) from None
        raise ContextRefused(f"the context cannot be stored in memory: {error.strerror}") from error


def _reading(how: TextDecoding, skipped: LeftOut | None = None) -> "Reading":
    from rlm_broker.context.file_content import Reading  # with archives and documents: a text needs none of them

    return Reading(how, skipped)


def _store_text(pieces: Iterable[str | bytes], file: FoundFile | None = None) -> StoredContext:
    with TextMemfd() as memfd:
        length = memfd.add_text(pieces, pieces.grows if isinstance(pieces, DecodedText) else None)
        if file and not length:
            raise ContextRefused(f"{file.given} is empty: give a file that has text")
        parts = ((file.name, length),) if file else ()
        replaced = pieces.replaced if isinstance(pieces, DecodedText) else 0
        kinds = {pieces.kind: 1} if isinstance(pieces, DecodedText) and pieces.kind else {}
        info = ContextInfo("str", length, parts, len(parts), {}, replaced, int(replaced > 0), kinds=kinds)
        return sealed(memfd, memfd.form, info)


def _store_stream(stream: Any, how: TextDecoding) -> StoredContext:
    """Store the content of a stream, without ever having all of it in memory of our own."""
    pieces = _read(stream)
    first = next(pieces, b"")
    if isinstance(first, str):
        if how != TextDecoding():
            raise ContextRefused("a stream of text is decoded already: give one of bytes, or no encoding")
        return _store_text(piece for text in chain([first], pieces) for piece in pieces_of(cast("str", text)))
    given = chain([first] if first else [], cast("Iterator[bytes]", pieces))
    try:
        return _store_text(_reading(how).of_stream(given, "the stream"))
    except FileUnfit as error:
        raise ContextRefused(str(error)) from None


def _read(stream: Any) -> Iterator[str | bytes]:
    kind: type[str] | type[bytes] | None = None
    while not stop_requested():
        try:
            piece = stream.read(STREAM_BYTES)
        except Exception as error:
            raise ContextRefused(f"the stream cannot be read: {type(error).__name__}: {error}") from error
        if piece is None:
            raise ContextRefused("the stream's `read` gave None: it has no data just now, so give one that blocks")
        if not piece:
            return
        kind = kind or (str if isinstance(piece, str) else bytes)
        if not isinstance(piece, kind):
            raise ContextRefused(f"a stream's `read` must give only bytes or only text, not {type(piece).__name__}")
        yield piece
    raise ContextRefused("the stream was not read to its end")


def _store_paths(paths: Paths, how: TextDecoding) -> StoredContext:
    if not paths:
        raise ContextRefused("Paths has no path: name a file or a folder")
    from rlm_broker.context.files import find_files

    files, skipped = find_files(paths)
    reading = _reading(how, skipped)
    if len(paths) != 1 or not files or not files[0].named:
        return _store_texts((each for file in files for each in reading.texts_of(file)), reading, map(printable, paths))
    return _store_file(files[0], reading)


def _store_file(file: FoundFile, reading: "Reading") -> StoredContext:
    """Store the text of one file, or the texts in an archive."""
    try:
        with reading.opened(file) as content:
            if isinstance(content, DecodedText):
                return _store_text(content, file)
            return _store_texts(reading.texts_in(content, file.given), reading, [file.given])
    except FileUnfit as error:
        raise ContextRefused(str(error)) from None


def _store_texts(texts: Iterable[tuple[str, DecodedText]], reading: "Reading", sources: Iterable[str]) -> StoredContext:
    """Store the texts of files as a dict by their names. A name that is there already gets a number."""
    taken: dict[str, int] = {}  # name → number for its next repetition
    parts = StoredParts()
    with TextMemfd() as memfd:
        for name, text in texts:
            try:
                length = memfd.add_text(text, text.grows)
            except FileUnfit as error:
                reading.skipped.add(error.reason, printable(name))
                continue
            if name in taken:  # an archive may have several members of one name
                name = _another(name, taken)
            taken[name] = 1
            parts.add(name, length, True, text.replaced, text.kind)
        skipped = reading.skipped
        if not taken:
            left_out = ", ".join(f"{times:,} {reason}" for reason, times in sorted(skipped.items()))
            told = f"there is no text in {', '.join(sources)}"
            raise ContextRefused(f"{told}; left out: {left_out}" if left_out else f"{told}: it has no files")
        form = memfd.add_names([*taken])
        return sealed(memfd, form, parts.info("dict", form.length, skipped))


def _another(name: str, taken: dict[str, int]) -> str:
    """Return a name that is not taken yet, for a further text of the same name."""
    while (other := f"{name} ({taken[name]})") in taken:
        taken[name] += 1
    return other


def _store_several(values: Mapping[str, object]) -> StoredContext:
    """Store a dict with some values stored already. Those are not copied."""
    if len(values) > MAX_PIECES:
        raise ContextRefused(f"a dict with a StoredContext in it has {len(values):,} keys, more than {MAX_PIECES}")
    pieces: list[tuple[int, ContextPiece]] = []
    parts = StoredParts()
    try:
        for name, value in values.items():
            if not isinstance(name, str) or len(name) > MAX_NAME_CHARS or not name.isprintable():
                raise ContextRefused(
                    f"the key {name!r:.50}, beside a StoredContext, must be printable text of up to {MAX_NAME_CHARS} "
                    "characters"
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


_KINDS_OF_JSON: Final = {b"{": "dict", b"[": "list", b'"': "str", b"t": "bool", b"f": "bool", b"n": "NoneType"}
"""Type of the value by the first byte of its JSON; other bytes begin a number."""


def store_part(fd: int, is_json: bool, max_bytes: int, stop: threading.Event) -> StoredContext:
    """Store the content of a file that model code has written, and may be writing still.

    Args:
        is_json: Whether it is JSON; otherwise it is text. Both are UTF-8.
        max_bytes: Largest size as it is stored. In a text with a wide character each character takes 2 or 4 bytes.
        stop: When it is set, the rest is left out: the caller has given the context up.

    Raises:
        ContextRefused: It takes more than `max_bytes`, or is not UTF-8.
        OSError: It cannot be read, or there is no memory for it.
    """
    pieces = _pieces_of(fd, max_bytes, stop)
    return _json_part(pieces) if is_json else _text_part(pieces, max_bytes)


def _pieces_of(fd: int, max_bytes: int, stop: threading.Event) -> Iterator[bytes]:
    done = 0
    while not stop.is_set() and (piece := os.read(fd, PIECE_BYTES)):
        done += len(piece)
        if done > max_bytes:
            raise _too_large(max_bytes)
        yield piece


def _text_part(pieces: Iterator[bytes], max_bytes: int) -> StoredContext:
    def grows(size_bytes: int) -> None:
        if memfd.size_bytes + size_bytes > max_bytes:
            raise _too_large(max_bytes)

    try:
        with TextMemfd() as memfd:
            chars = memfd.add_text(codecs.iterdecode(pieces, "utf-8", "surrogatepass"), grows)
            return sealed(memfd, memfd.form, ContextInfo("str", chars))
    except UnicodeDecodeError as error:
        raise ContextRefused(f"a context is not UTF-8: {error.reason}") from None


def _too_large(max_bytes: int) -> ContextRefused:
    return ContextRefused(f"a context takes more than scratch_bytes = {max_bytes:,}: give a smaller part")


def _json_part(pieces: Iterator[bytes]) -> StoredContext:
    kind = ""
    with JsonMemfd() as memfd:
        for piece in pieces:
            kind = kind or _KINDS_OF_JSON.get(piece[:1], "number")
            memfd.write(piece)
        return sealed(memfd, memfd.form, ContextInfo(kind, memfd.form.length))
