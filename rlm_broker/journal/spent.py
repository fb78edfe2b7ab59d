"""The means that a batch has used over all its processes, so that its limits hold for all of them."""

import hashlib
import os
from collections import defaultdict
from collections.abc import Mapping
from pathlib import Path

import msgspec

from rlm_broker.errors import ConfigurationError
from rlm_broker.journal import disk
from rlm_broker.journal.lines import DIGEST_BYTES, Amount, Used, is_torn, line_of
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

    seconds: Amount | None = None
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

    Raises:
        ConfigurationError: A whole line of the file is none of a journal.
        OSError: The file cannot be read or written.
    """

    def __init__(self, folder: Path) -> None:
        self.spent = Spent()
        self._removed: set[str] = set()
        self._path = folder / NAME
        self._descriptor = disk.open_to_append(self._path)
        try:
            self._end = self._read()
            disk.cut(self._descriptor, self._end)
        except BaseException:
            self.close()
            raise

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
        removed = SpentLine(removed=line_digest(line), usage=dict(usage))
        if removed.removed not in self._removed:
            self._write(removed)
            self._take(removed)

    def has_removed(self, line: bytes) -> bool:
        """Whether the usage in a line of results was written down here, since a kill came before it was removed."""
        return bool(self._removed) and line_digest(line) in self._removed

    def sync(self) -> None:
        """Wait until the lines are on the disk."""
        disk.sync(self._descriptor)

    def close(self) -> None:
        """Close the file."""
        os.close(self._descriptor)

    def _read(self) -> int:
        """Take what the lines tell, and return where the last whole one ends. A torn line before it is passed over."""
        at = end = 0
        with open(os.dup(self._descriptor), "rb") as file:
            file.seek(0)
            for number, line in enumerate(file, 1):
                at += len(line)
                if is_torn(line):
                    continue
                try:
                    told = decode_escaped(line, SpentLine)
                except (ValueError, RecursionError):
                    raise ConfigurationError(
                        f"line {number} of {self._path} tells no usage: remove the line, or name another file for the "
                        "results"
                    ) from None
                end = at
                self._take(told)
        return end

    def _write(self, told: SpentLine) -> None:
        self._end = disk.append(self._descriptor, line_of(told), self._end)

    def _take(self, told: SpentLine) -> None:
        if told.seconds is not None:
            self.spent.seconds = max(self.spent.seconds, told.seconds)
        if told.removed is not None and told.removed not in self._removed:
            self._removed.add(told.removed)
            for model, used in told.usage.items():
                self.spent.add(model, used.usage())


def line_digest(line: bytes) -> str:
    """Return the digest by which a line of results that was removed is known."""
    return hashlib.blake2b(line, digest_size=DIGEST_BYTES).hexdigest()
