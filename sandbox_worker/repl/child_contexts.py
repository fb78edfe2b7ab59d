"""What the children of `rlm_query` get as their contexts: in the message, in a file, or one of the REPL's own.

A small value goes in the message. A larger one is written to the scratch folder, from where the orchestrator stores it
for the child: a message of 70 MB would keep the orchestrator from all other REPLs. One of the REPL's own contexts is
named, and nothing of it is copied.
"""

import contextlib
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from types import TracebackType
from typing import Any, Self

import msgspec

from sandbox_worker.repl.classes import class_name, is_a
from sandbox_worker.wire.encoding import MAX_NESTING
from sandbox_worker.wire.messages import plain
from sandbox_worker.wire.tasks import LONG_TASK_CHARS, MAX_INLINE_BYTES, ChildContext, beginning_and_end

PREFIX = ".context-"
"""How the names of the files begin. The process that writes one is named next."""
MOST_INLINE_BYTES = 1 << 18
"""Of all values that go in one message."""
PIECE_CHARS = 1 << 20
"""Characters that are encoded at a time."""


class ContextNotGiven(Exception):
    """A child cannot get its context. The message is one sentence."""


class ChildContexts:
    """The contexts of one call's children. Leaving it removes the files that were written for them.

    Args:
        own: Returns the contexts of this REPL, by name.
        folder: The scratch folder.
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
            with contextlib.suppress(OSError):  # model code may have removed it
                os.unlink(f"{self._folder}/{name}")  # noqa: PTH108 - pathlib is not imported in a REPL

    def given(self, name: str, parts: Sequence[Any]) -> list[ChildContext]:
        """Hand over what code gives as contexts to the function `name`.

        Raises:
            TypeError: One of them is no value that JSON has.
            ContextNotGiven: There is no room for it in the scratch folder.
        """
        found = []
        for number, part in enumerate(parts):
            try:
                found.append(self._handed(part))
            except TypeError as error:
                which = "context" if name == "rlm_query" else f"contexts[{number}]"
                raise TypeError(f"{name}() argument {which!r} is no text and no plain value: {error}") from None
        return found

    def tasks(self, prompts: Sequence[str]) -> tuple[list[str], list[ChildContext | None]]:
        """Hand over long prompts as contexts. Return the prompts, of a long one its beginning and end, and these.

        Raises:
            ContextNotGiven: There is no room for one in the scratch folder.
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
        if not is_a(part, str):  # code may have changed it since it came
            return self._value(part)
        for name, value in self._own().items():
            if value is part:
                return ChildContext(own=name)
        text = str.__str__(part)  # of a class of the model's, it may say anything of itself
        made = self._texts.get(text)
        if made is None:
            made = self._texts[text] = self._text(text)
        return made

    def _text(self, text: str) -> ChildContext:
        if len(text) <= MAX_INLINE_BYTES:
            with contextlib.suppress(UnicodeEncodeError):  # a lone surrogate, which a file can hold
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
        from hashlib import blake2b  # most REPLs never need it

        digest = blake2b(data).digest()  # and not the bytes themselves, which would all be held
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
                "remove files of yours"
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
    return msgspec.json.encode(value, enc_hook=plain)


def _require_plain(value: Any, depth: int = 0) -> None:
    """Raises: TypeError, for what would not arrive as it is."""
    if is_a(value, dict):
        if not all(is_a(key, str) for key in value):
            raise TypeError("it has a key that is no text")
        inside: Iterable[Any] = dict.values(value)
    elif is_a(value, list, tuple):
        inside = value
    elif is_a(value, float):
        if not -float("inf") < value < float("inf"):
            raise TypeError(f"it has the number {float.__float__(value)}, which JSON has not")
        return
    elif value is None or is_a(value, str, int):
        return
    else:
        raise TypeError(f"it has a value of class {class_name(value)}; use str() or a dict of its fields")
    if depth >= MAX_NESTING:
        raise TypeError(f"it is nested deeper than {MAX_NESTING} levels, or contains itself")
    for each in inside:
        if type(each) is not str:  # what most of a large value is
            _require_plain(each, depth + 1)


def remove_leftovers(folder: str) -> None:
    """Remove the files of a REPL that was killed while its children had them: they would take the room of others."""
    own = f"{PREFIX}{os.getpid()}-"
    with contextlib.suppress(OSError), os.scandir(folder) as entries:
        for entry in entries:
            if entry.name.startswith(PREFIX) and not entry.name.startswith(own):
                with contextlib.suppress(OSError):
                    os.unlink(entry.path)  # noqa: PTH108 - as above
