"""Items of a batch in a file of JSON lines or on stdin. No more than one line is held in memory."""

import dataclasses
import glob
import os
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO, Literal

from rlm_broker.batch.feed import MOST_LINE_BYTES, items_of_lines
from rlm_broker.batch.items import BatchItem
from rlm_broker.batch.shards import Shard
from rlm_broker.broker.models.models import FilePath
from rlm_broker.context.files import Root
from rlm_broker.context.store import Encoded
from rlm_broker.errors import ConfigurationError, require_kind
from rlm_broker.values.host_files import refusal_told
from rlm_broker.values.text import printable

STDIN = "-"
"""Path that means stdin."""


class ItemsFile:
    """Items of a file of JSON lines, as `rlm-broker batch` takes them. Give it to `RLM.batch`.

    Example:
        ```python
        Path("questions.jsonl").write_text('{"id": "a", "question": "Which letter is it?", "context": "a"}\\n')
        print([result.status for result in rlm.batch(ItemsFile("questions.jsonl"))])  # ['answered']
        ```

    A file is read twice if `check` is called: to its end before a run begins, so that a wrong line costs nothing, and
    once more while the batch goes on. Stdin and pipes are read once, and a wrong line is found when its turn comes.

    Args:
        path: Path of the file; "-" is stdin.
        root: Folder of the paths in lines; None takes the folder of the file, and for stdin the current one.
        encoding, errors: Encoding of the files named in lines, as for `Encoded`.
        shard: The items to ask; None asks all.

    Attributes:
        folder: Folder of the paths in lines.

    Raises:
        ConfigurationError: The folder is none, or an argument cannot be used.
    """

    def __init__(
        self,
        path: FilePath,
        root: FilePath | None = None,
        encoding: str | None = None,
        errors: Literal["strict", "replace"] = "replace",
        shard: Shard | None = None,
    ) -> None:
        require_kind("path", path, str, os.PathLike)
        require_kind("root", root, str, os.PathLike, type(None))
        require_kind("shard", shard, Shard, type(None))
        self._path = None if os.fspath(path) == STDIN else Path(path)
        self._name = "stdin" if self._path is None else printable(str(path))
        self._total: int | None = None
        self._line = 0
        self._root = Root(root or (Path() if self._path is None else self._path.parent))
        self.folder = self._root.folder
        self._encoded, self._shard = Encoded(self.folder, encoding, errors), shard

    def check(self) -> None:
        """Read all lines of a file, and count its items. Has no effect on stdin or a pipe, which can be read once.

        Example:
            ```python
            (items := ItemsFile("questions.jsonl")).check()
            ```

        Raises:
            ConfigurationError: The file cannot be read or has no item; or a line is wrong, or names a missing file.
        """
        with refusal_told(f"cannot read {self._name}"):
            is_regular = self._path is not None and stat.S_ISREG(self._path.stat().st_mode)
        if is_regular:
            self._total = sum(1 for _ in self._items(is_check=True))

    def __iter__(self) -> Iterator[BatchItem]:
        return self._items(is_check=False)

    def __len__(self) -> int:
        if self._total is None:
            raise TypeError("the number of items is known after a check of a file")
        return self._total

    def _items(self, *, is_check: bool) -> Iterator[BatchItem]:
        seen = set[int]()  # seeded hashes: two ids of a million share one with odds of 1 to 10**7
        number = 0
        with self._opened() as file:
            for number, item in enumerate(items_of_lines(self._lines(file), self._name), 1):
                is_mine = self._shard is None or self._shard.has(number)
                try:
                    if is_check and hash(item.id) in seen:
                        raise ConfigurationError(f"the id {item.id!a:.80} was given before: give each item its own")
                    if is_check:
                        seen.add(hash(item.id))
                    if is_check or is_mine:
                        item = self._readable(item, must_exist=is_check)
                except ConfigurationError as error:
                    raise ConfigurationError(f"line {self._line:,} of {self._name}: {error}") from None
                if is_mine:
                    yield item
        if not number:
            raise ConfigurationError(f"{self._name} has no item: give one JSON object a line")

    def _readable(self, item: BatchItem, *, must_exist: bool) -> BatchItem:
        """Return an item with the files named by its path.

        Raises:
            ConfigurationError: They are outside of the folder or do not exist, or the context is no text or value.
        """
        if not isinstance(item.context, Path):
            if not isinstance(item.context, str | dict | list) or not item.context:
                raise ConfigurationError("the context must be a text, an object or a list, and not be empty")
            return item
        (path,) = self._root.resolved([str(item.context)])
        if must_exist and not glob.has_magic(str(path)) and not os.path.lexists(path):
            raise ConfigurationError(f"{printable(str(path))} does not exist")
        return dataclasses.replace(item, context=dataclasses.replace(self._encoded, source=path))

    def _opened(self) -> BinaryIO:
        """Open the input. Stdin gets a descriptor of its own.

        A thread that still waits for a line when the process ends would hold the lock of `sys.stdin`.
        """
        with refusal_told(f"cannot read {self._name}"):
            return open(os.dup(0) if self._path is None else self._path, "rb")

    def _lines(self, file: BinaryIO) -> Iterator[bytes]:
        self._line = 0
        with refusal_told(f"cannot read {self._name}"):
            while line := file.readline(MOST_LINE_BYTES + 1):
                self._line += 1
                yield line
