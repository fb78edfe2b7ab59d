"""Items of `rlm-broker batch`, read from a file of JSON lines or from stdin.

A file is read twice: once to its end before a run begins, so that a wrong line costs nothing, and once line by line while
the batch goes on. Stdin and pipes are read once, and a wrong line is found when its turn comes. No more than one line is
held in memory.
"""

import os
import stat
import sys
from array import array
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO

import msgspec

from rlm_broker.batch.items import BatchItem
from rlm_broker.cli.sources import STDIN
from rlm_broker.cli.terminal import say_if_typed
from rlm_broker.context.files import is_glob
from rlm_broker.context.roots import Root
from rlm_broker.context.store import Encoded, Paths
from rlm_broker.context.text import Errors
from rlm_broker.errors import ConfigurationError
from rlm_broker.shown import printable
from rlm_broker.validation import suggestion
from sandbox_worker.wire.text_json import decode_escaped

MOST_LINE_BYTES = 256 << 20
"""Bytes of one line. A longer one is refused: a context of that size is better a file, which `path` names."""
MOST_ID_CHARS = 200
"""Characters of an id. Ids are shown, and are in each line of the journal."""
KEY_BITS = (1 << 64) - 1
"""Bits of a key of `SeenIds`. The hash of a text is seeded by this process, so that no input can choose it."""
SHOWN_CHARS = 60
"""Characters of a wrong value that an error shows."""


class _Line(msgspec.Struct, forbid_unknown_fields=True):
    """One line. `context` and `path` are two ways to give one context."""

    id: str
    question: str | None = None
    context: Any = msgspec.UNSET
    path: str | list[str] | msgspec.UnsetType = msgspec.UNSET
    metadata: dict[str, Any] = {}


FIELDS = _Line.__struct_fields__


class BatchInput:
    """Items of a file of JSON lines, or of stdin.

    Args:
        name: Path of the file; `-` is stdin.
        root: Folder of the paths in lines; None takes that of the file, and for stdin the current folder.
        encoding, errors: Encoding of the files that lines name, as for `Encoded`.

    Attributes:
        name: Name of the input in messages.
        total: Number of items; None until a check has counted them.

    Raises:
        ConfigurationError: The folder is none.
    """

    def __init__(self, name: str, root: str | None, encoding: str | None, errors: Errors) -> None:
        self._path = None if name == STDIN else Path(name)
        self.name = "stdin" if self._path is None else printable(name)
        self.total: int | None = None
        self._root = Root(root or (Path() if self._path is None else self._path.parent))
        self._encoding, self._errors = encoding, errors

    def check(self) -> None:
        """Read all lines of a file, and count its items. Has no effect on stdin or a pipe, which can be read once.

        Raises:
            ConfigurationError: The file cannot be read or has no item; or a line is wrong, or names a file that does
                not exist.
        """
        if self._path is None or not self._is_regular(self._path):
            return
        self.total = sum(1 for _ in self._items(checks_paths=True))
        if not self.total:
            raise ConfigurationError(f"{self.name} has no item: give one JSON object a line")

    def __iter__(self) -> Iterator[BatchItem]:
        return self._items(checks_paths=False)

    def _is_regular(self, path: Path) -> bool:
        try:
            return stat.S_ISREG(path.stat().st_mode)
        except (OSError, ValueError) as error:
            raise self._unreadable(error) from None

    def _unreadable(self, error: OSError | ValueError) -> ConfigurationError:
        return ConfigurationError(f"cannot read {self.name}: {getattr(error, 'strerror', None) or error}")

    def _items(self, *, checks_paths: bool) -> Iterator[BatchItem]:
        seen = SeenIds()
        with self._opened() as file:
            for number, line in enumerate(self._lines(file), 1):
                if not line.strip():
                    continue
                try:
                    item = self._item(line, checks_path=checks_paths)
                    if not seen.add(item.id):
                        raise ConfigurationError(f"the id {_cut(item.id)} was given before: give each item its own")
                except ConfigurationError as error:
                    raise ConfigurationError(f"{self.name}, line {number:,}: {error}") from None
                yield item

    @contextmanager
    def _opened(self) -> Iterator[BinaryIO]:
        if self._path is None:
            say_if_typed()
            yield sys.stdin.buffer
            return
        try:
            file = self._path.open("rb")
        except (OSError, ValueError) as error:
            raise self._unreadable(error) from None
        with file:
            yield file

    def _lines(self, file: BinaryIO) -> Iterator[bytes]:
        number = 0
        while True:
            try:
                line = file.readline(MOST_LINE_BYTES + 1)
            except OSError as error:
                raise self._unreadable(error) from None
            if not line:
                return
            number += 1
            if len(line) > MOST_LINE_BYTES:
                most = f"{MOST_LINE_BYTES:,} bytes: save its context as a file, and name that as path"
                raise ConfigurationError(f"{self.name}, line {number:,} has more than {most}")
            yield line.removeprefix(b"\xef\xbb\xbf") if number == 1 else line

    def _item(self, text: bytes, *, checks_path: bool) -> BatchItem:
        line = _decoded(text)
        if not line.id.strip() or len(line.id) > MOST_ID_CHARS:
            raise ConfigurationError(f"the id must have 1 to {MOST_ID_CHARS} characters, and be more than white space")
        if line.question is not None and not line.question.strip():
            raise ConfigurationError("the question is empty: say what you want to know, or leave it out")
        return BatchItem(line.id, self._context(line, checks_path=checks_path), line.question, line.metadata)

    def _context(self, line: _Line, *, checks_path: bool) -> object:
        if (line.context is msgspec.UNSET) == (line.path is msgspec.UNSET):
            raise ConfigurationError("give either a context or a path")
        if line.path is msgspec.UNSET:
            if not isinstance(line.context, str | dict | list) or not line.context:
                raise ConfigurationError("the context must be a text, an object or a list, and not be empty")
            return line.context
        paths = self._root.resolved([line.path] if isinstance(line.path, str) else line.path)
        for path in paths if checks_path else ():
            if not is_glob(path) and not os.path.lexists(path):
                raise ConfigurationError(f"{printable(str(path))} does not exist")
        return Encoded(Paths(paths), self._encoding, self._errors)


def _decoded(text: bytes) -> _Line:
    try:
        return decode_escaped(text, _Line)
    except msgspec.ValidationError as error:
        raise ConfigurationError(_complaint(text, str(error))) from None
    except UnicodeDecodeError:
        raise ConfigurationError("it is not UTF-8 text") from None
    except (ValueError, RecursionError) as error:
        raise ConfigurationError(f"it is not JSON: {error}") from None


def _complaint(text: bytes, said: str) -> str:
    """Return a sentence on a line that is JSON, but not an item."""
    try:
        found = decode_escaped(text, object)
    except (ValueError, RecursionError) as error:
        return f"it is not JSON: {error}"
    if not isinstance(found, dict):
        return 'it is no object: give {"id": ..., "question": ..., "context" or "path": ...}'
    for name in found:
        if name not in FIELDS:
            return f"there is no field {_cut(name)}{suggestion(name, FIELDS)}; values of your own go below metadata"
    if "id" not in found:
        return "it has no id: give a text that no other item has"
    return f"{said[:1].lower()}{said[1:]}"


def _cut(text: str) -> str:
    return ascii(text if len(text) <= SHOWN_CHARS else f"{text[:SHOWN_CHARS]}...")


class SeenIds:
    """A set of ids that keeps 64 bits of each: 16 to 32 bytes an id, where a set of texts would take 150."""

    def __init__(self) -> None:
        self._slots = array("Q", bytes(8 << 10))
        self._count = 0

    def add(self, id: str) -> bool:
        """Add an id, and return whether it is new. Two ids of a million are taken for one with odds of 1 to 10**7."""
        if 2 * self._count >= len(self._slots):
            self._grow()
        key = hash(id) & KEY_BITS or 1
        is_new = self._put(key)
        self._count += is_new
        return is_new

    def _put(self, key: int) -> bool:
        slots = self._slots
        last = len(slots) - 1
        place = key & last
        while (found := slots[place]) != key:
            if not found:
                slots[place] = key
                return True
            place = place + 1 & last
        return False

    def _grow(self) -> None:
        keys, self._slots = self._slots, array("Q", bytes(2 * self._slots.itemsize * len(self._slots)))
        for key in keys:
            if key:
                self._put(key)
