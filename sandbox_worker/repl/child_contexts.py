"""Contexts of the children of code: in the message, in a file, or by the name of one of the REPL's own.

A small value goes into the message. A larger one is written to the scratch folder, from which the orchestrator stores
it for the child: a message of 70 MB would keep the orchestrator's event loop from all other REPLs. If the value is a
context of this REPL, then only its name is sent, and no byte of it is copied.
"""

import contextlib
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from types import TracebackType
from typing import Any, Self

import msgspec

from sandbox_worker.repl.objects import class_name, is_a
from sandbox_worker.wire.encoding import MAX_NESTING
from sandbox_worker.wire.messages import plain
from sandbox_worker.wire.prompts import LONG_TASK_CHARS, MAX_INLINE_BYTES, ChildContext, beginning_and_end
from sandbox_worker.wire.text_json import encode_growing

_ENCODER = msgspec.json.Encoder(enc_hook=plain)
PREFIX = ".context-"
"""Beginning of the names of the files. The number of the process that wrote the file follows."""
MOST_INLINE_BYTES = 1 << 18
"""Maximum bytes of all values inside one message; further ones go into files."""
PIECE_CHARS = 1 << 20
"""Characters of a text encoded at a time, so that no second copy of the whole text is made."""


class ContextNotGiven(Exception):
    """A child cannot get its context. The message is one sentence."""


class ChildContexts:
    """Contexts of the children of one call: a context manager that removes their files at its end.

    Args:
        own: Function that returns the contexts of this REPL, by name.
        folder: Path of the scratch folder.
    """

    def __init__(self, own: Callable[[], Mapping[str, Any]], folder: str) -> None:
        self._own = own
        self._folder = folder
        self._files: list[str] = []
        self._texts: dict[str, ChildContext] = {}
        self._values: dict[bytes, ChildContext] = {}
        self._inline_bytes = 0

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for name in self._files:
            with contextlib.suppress(OSError):  # model code may have removed the file
                os.unlink(f"{self._folder}/{name}")  # noqa: PTH108 - a REPL does not import pathlib

    def given(self, name: str, parts: Sequence[Any]) -> list[ChildContext]:
        """Return descriptions of the contexts that code gave to the function `name`. Large ones are written to files.

        Raises:
            TypeError: JSON cannot express one of them.
            ContextNotGiven: A file could not be written.
        """
        found = []
        for number, part in enumerate(parts):
            try:
                found.append(self._handed(part))
            except TypeError as error:
                which = f"contexts[{number}]" if name == "rlm_query_batched" else "context"
                raise TypeError(f"{name}() argument {which!r} is neither text nor a plain value: {error}") from None
        return found

    def tasks(self, prompts: Sequence[str]) -> tuple[list[str], list[ChildContext | None]]:
        """Turn long tasks into contexts of their children.

        Returns:
            The prompts, where a long one is replaced by its beginning and end; and one context or None for each prompt.
            The second list is empty if no prompt is long.

        Raises:
            ContextNotGiven: A file could not be written.
        """
        texts, handed = list(prompts), list[ChildContext | None]()
        for number, prompt in enumerate(texts):
            if len(prompt) <= LONG_TASK_CHARS:
                handed.append(None)
                continue
            handed.append(msgspec.structs.replace(self._handed(prompt), is_task=True))
            texts[number] = beginning_and_end(prompt)
        return texts, handed if any(handed) else []

    def _handed(self, part: Any) -> ChildContext:
        if not is_a(part, str):  # any other value is mutable: even a context of this REPL may have been changed
            return self._value(part)
        for name, value in self._own().items():
            if value is part:
                return ChildContext(own=name)
        text = str.__str__(part)  # the plain text: methods of a `str` subclass of model code could return any other
        made = self._texts.get(text)
        if made is None:
            made = self._texts[text] = self._text(text)
        return made

    def _text(self, text: str) -> ChildContext:
        if len(text) <= MAX_INLINE_BYTES:
            with contextlib.suppress(UnicodeEncodeError):  # a text with lone surrogates goes into a file
                return self._inline(_encode(text)) or self._file(_pieces(text))
        return self._file(_pieces(text))

    def _value(self, value: Any) -> ChildContext:
        _require_plain(value)
        try:
            data = _encode(value)
        except (UnicodeEncodeError, ValueError):
            raise TypeError("it has lone surrogates, or an integer of thousands of digits") from None
        if (made := self._inline(data)) is not None:
            return made
        from hashlib import blake2b  # imported here: most REPLs never need it

        digest = blake2b(data).digest()  # as the key; the bytes themselves would stay in memory
        made = self._values.get(digest)
        if made is None:
            made = self._values[digest] = self._file([data], is_json=True)
        return made

    def _inline(self, data: bytes) -> ChildContext | None:
        if len(data) > MAX_INLINE_BYTES or self._inline_bytes + len(data) > MOST_INLINE_BYTES:
            return None
        self._inline_bytes += len(data)
        return ChildContext(value=data.decode())

    def _file(self, pieces: Iterable[bytes], is_json: bool = False) -> ChildContext:
        name = f"{PREFIX}{os.getpid()}-{os.urandom(8).hex()}"
        self._files.append(name)
        try:
            with open(f"{self._folder}/{name}", "xb", buffering=0) as file:
                for piece in pieces:
                    _write_all(file.fileno(), piece)
        except OSError as error:
            raise ContextNotGiven(
                f"a context could not be written to the scratch folder: {error.strerror}; give smaller parts, or "
                "remove files there"
            ) from None
        return ChildContext(file=name, is_json=is_json)


def _pieces(text: str) -> Iterable[bytes]:
    length = str.__len__(text)
    for start in range(0, length, PIECE_CHARS):
        yield str.__getitem__(text, slice(start, start + PIECE_CHARS)).encode("utf-8", "surrogatepass")


def _write_all(fd: int, piece: bytes) -> None:
    done = 0
    with memoryview(piece) as rest:
        while done < len(rest):
            done += os.write(fd, rest[done:])


def _encode(value: Any) -> bytes:
    return encode_growing(value, _ENCODER)


def _require_plain(value: Any, depth: int = 0) -> None:
    """Check that JSON can express a value without a change.

    Raises:
        TypeError: It cannot. The message says why.
    """
    if is_a(value, dict):
        if not all(is_a(key, str) for key in value):
            raise TypeError("it has a key that is not text")
        inside: Iterable[Any] = dict.values(value)
    elif is_a(value, list, tuple):
        inside = value
    elif is_a(value, float):
        if not -float("inf") < value < float("inf"):
            raise TypeError(f"it has the number {float.__float__(value)}, which JSON cannot express")
        return
    elif value is None or is_a(value, str, int):
        return
    else:
        raise TypeError(f"it has a value of class {class_name(value)}; give text, or a list or dict of what it has")
    if depth >= MAX_NESTING:
        raise TypeError(f"it is nested deeper than {MAX_NESTING} levels, or contains itself")
    for each in inside:
        if type(each) is not str:  # saves a call for texts, the bulk of most large values
            _require_plain(each, depth + 1)


def remove_leftovers(folder: str) -> None:
    """Remove files that an earlier REPL of this worker left when it was killed. They would take up scratch space."""
    own = f"{PREFIX}{os.getpid()}-"
    with contextlib.suppress(OSError), os.scandir(folder) as entries:
        for entry in entries:
            if entry.name.startswith(PREFIX) and not entry.name.startswith(own):
                with contextlib.suppress(OSError):
                    os.unlink(entry.path)  # noqa: PTH108 - a REPL does not import pathlib
