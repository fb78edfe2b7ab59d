"""Items of `rlm-broker batch`, read from a file of JSON lines or from stdin.

A file is read twice: once to its end before a run begins, so that a wrong line costs nothing, and once line by line
while the batch goes on. Stdin and pipes are read once, and a wrong line is found when its turn comes. No more than one
line is held in memory.
"""

import asyncio
import dataclasses
import os
import stat
from array import array
from collections.abc import AsyncIterable, AsyncIterator, Iterable, Iterator
from pathlib import Path
from typing import BinaryIO

from rlm_broker.batch.feed import MOST_LINE_BYTES, items_of_lines
from rlm_broker.batch.items import BatchItem
from rlm_broker.cli.sources import STDIN
from rlm_broker.cli.terminal import say_if_typed
from rlm_broker.concurrency.threads import DaemonThreads
from rlm_broker.context.files import Root, is_glob
from rlm_broker.context.store import Encoded
from rlm_broker.context.text import Errors
from rlm_broker.errors import ConfigurationError
from rlm_broker.values.text import clip, printable

KEY_BITS = (1 << 64) - 1
"""Bits of a key of `SeenIds`. The hash of a text is seeded by this process, so that no input can choose it."""
SHOWN_CHARS = 60
"""Characters of a wrong value that an error shows."""


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
        self._line = 0
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
        self.total = sum(1 for _ in self._items(is_check=True))

    @property
    def items(self) -> Iterable[BatchItem] | AsyncIterable[BatchItem]:
        """Items for `RLM.batch`. Those of a stream come one by one, each as soon as its line is there."""
        return _Stream(self) if self.total is None else self

    def __iter__(self) -> Iterator[BatchItem]:
        return self._items(is_check=False)

    def __len__(self) -> int:
        if self.total is None:
            raise TypeError("the number of items is known at the end of the input")
        return self.total

    def _is_regular(self, path: Path) -> bool:
        try:
            return stat.S_ISREG(path.stat().st_mode)
        except (OSError, ValueError) as error:
            raise self._unreadable(error) from None

    def _unreadable(self, error: OSError | ValueError) -> ConfigurationError:
        return ConfigurationError(f"cannot read {self.name}: {getattr(error, 'strerror', None) or error}")

    def _items(self, *, is_check: bool) -> Iterator[BatchItem]:
        seen = None if self.total is not None else SeenIds()  # a file that was checked has no id twice
        has_item = False
        with self._opened() as file:
            for given in items_of_lines(self._lines(file), self.name):
                item = given
                try:
                    if seen is not None and not seen.add(item.id):
                        raise ConfigurationError(f"the id {_cut(item.id)} was given before: give each item its own")
                    if isinstance(item.context, Path):
                        item = dataclasses.replace(item, context=self._files(item.context, must_exist=is_check))
                    elif not isinstance(item.context, str | dict | list) or not item.context:
                        raise ConfigurationError("the context must be a text, an object or a list, and not be empty")
                except ConfigurationError as error:
                    raise ConfigurationError(f"line {self._line:,} of {self.name}: {error}") from None
                has_item = True
                yield item
        if not has_item:
            raise ConfigurationError(f"{self.name} has no item: give one JSON object a line")

    def _opened(self) -> BinaryIO:
        """Open the input. Stdin gets a descriptor of its own.

        A thread that still waits for a line when the process ends would hold the lock of `sys.stdin`.
        """
        if self._path is None:
            say_if_typed()
        try:
            return open(os.dup(0) if self._path is None else self._path, "rb")
        except (OSError, ValueError) as error:
            raise self._unreadable(error) from None

    def _lines(self, file: BinaryIO) -> Iterator[bytes]:
        self._line = 0
        while True:
            try:
                line = file.readline(MOST_LINE_BYTES + 1)
            except OSError as error:
                raise self._unreadable(error) from None
            if not line:
                return
            self._line += 1
            yield line

    def _files(self, given: Path, *, must_exist: bool) -> Encoded:
        (path,) = self._root.resolved([str(given)])
        if must_exist and not is_glob(path) and not os.path.lexists(path):
            raise ConfigurationError(f"{printable(str(path))} does not exist")
        return Encoded(path, self._encoding, self._errors)


def _cut(text: str) -> str:
    return ascii(clip(text, SHOWN_CHARS))


class _Stream:
    """Items of stdin or a pipe. A thread waits for each of them, so that one that is late delays no other."""

    def __init__(self, items: Iterable[BatchItem]) -> None:
        self._items = iter(items)

    async def __aiter__(self) -> AsyncIterator[BatchItem]:
        threads = DaemonThreads(1)
        try:
            while (item := await asyncio.wrap_future(threads.submit(lambda: next(self._items, None)))) is not None:
                yield item
        finally:
            threads.close(RuntimeError("the batch has ended"))


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
