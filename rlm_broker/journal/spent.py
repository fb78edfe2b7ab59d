"""The means that a batch has used over all its processes, so that its limits hold for all of them."""

import hashlib
import os
from collections import defaultdict
from collections.abc import Mapping
from pathlib import Path

import msgspec

from rlm_broker.journal import disk
from rlm_broker.journal.lines import DIGEST_BYTES, Used, line_of
from rlm_broker.usage import Tally, Usage
from sandbox_worker.wire.text_json import decode_escaped

NAME = "spent.jsonl"


class SpentLine(msgspec.Struct, omit_defaults=True):
    """One line of the file: the seconds so far, or the usage of a result that was removed.

    Attributes:
        seconds: Seconds that all processes have worked so far.
        removed: Digest of the line of results that was removed. The same line counts once.
        usage: Usage of that result, by model.
    """

    seconds: float | None = None
    removed: str | None = None
    usage: dict[str, Used] = {}


class Spent:
    """Usage by model, and seconds.

    Attributes:
        seconds: Seconds that processes have worked.
        usage: Usage by model.
    """

    def __init__(self) -> None:
        self.seconds = 0.0
        self.usage = defaultdict[str, Tally](Tally)

    def add(self, model: str, usage: Usage) -> None:
        """Add a usage of a model."""
        self.usage[model].add(usage)


class SpentFile:
    """The file of what no other file of the journal tells.

    Args:
        folder: Folder of the journal.

    Attributes:
        spent: Means used before this process, as far as the file tells.
    """

    def __init__(self, folder: Path) -> None:
        self.spent = Spent()
        self._removed: set[str] = set()
        self._descriptor = disk.open_to_append(folder / NAME)
        self._end = 0
        with open(os.dup(self._descriptor), "rb") as file:
            file.seek(0)
            for line in file:
                try:
                    told = decode_escaped(line, SpentLine)
                except (ValueError, RecursionError):
                    break
                if not line.endswith(b"\n"):
                    break
                self._end += len(line)
                self._take(told)
        disk.cut(self._descriptor, self._end)

    def add_seconds(self, seconds: float) -> None:
        """Write down the seconds so far. A full disk is no failure: a later line has them, too."""
        try:
            self._write(SpentLine(seconds=seconds))
        except OSError:
            return

    def add_removed(self, line: bytes, usage: Mapping[str, Used]) -> None:
        """Write down the usage of a result whose line is about to be removed.

        Raises:
            OSError: The disk is full, or broken.
        """
        removed = SpentLine(removed=_digest(line), usage=dict(usage))
        if removed.removed not in self._removed:
            self._write(removed)
            self._take(removed)

    def has_removed(self, line: bytes) -> bool:
        """Whether the usage in a line of results was written down here, since a kill came before it was removed."""
        return bool(self._removed) and _digest(line) in self._removed

    def sync(self) -> None:
        """Wait until the lines are on the disk."""
        disk.sync(self._descriptor)

    def close(self) -> None:
        """Close the file."""
        os.close(self._descriptor)

    def _write(self, told: SpentLine) -> None:
        self._end = disk.append(self._descriptor, line_of(told), self._end)

    def _take(self, told: SpentLine) -> None:
        if told.seconds is not None:
            self.spent.seconds = max(self.spent.seconds, told.seconds)
        if told.removed is not None and told.removed not in self._removed:
            self._removed.add(told.removed)
            for model, used in told.usage.items():
                self.spent.add(model, used.usage())


def _digest(line: bytes) -> str:
    return hashlib.blake2b(line, digest_size=DIGEST_BYTES).hexdigest()
