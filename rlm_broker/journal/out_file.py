"""The file of results: locked, read for what is finished, and appended to in whole lines."""

import os
import stat
from collections.abc import Callable, Iterator
from pathlib import Path

from rlm_broker.errors import ConfigurationError
from rlm_broker.journal import disk
from rlm_broker.journal.lines import Finished, is_torn
from sandbox_worker.wire.text_json import decode_escaped


class OutFile:
    """A file of results, locked by this process until it is closed.

    Args:
        path: Path of the file; it is made if it is missing.

    Raises:
        ConfigurationError: Another process writes it, it is no regular file, or it cannot be written.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            self._descriptor = self._opened()
            self._end = os.fstat(self._descriptor).st_size
        except OSError as error:
            raise ConfigurationError(f"cannot write to {path}: {error.strerror or error}") from None

    @property
    def is_empty(self) -> bool:
        """Whether the file has no byte."""
        return not self._end

    def read(self, each: Callable[[Finished, bytes], None]) -> None:
        """Call a function with each result in the file and its line, and cut off the end that is torn.

        Raises:
            ConfigurationError: A whole line is no result, or a torn line is followed by results.
        """
        end = torn = 0
        for number, line in enumerate(self._lines(), 1):
            finished = _finished(line)
            if finished is None and is_torn(line):
                torn = torn or number
                continue
            if finished is None or torn:
                raise ConfigurationError(
                    f"line {torn or number} of {self.path} is not a result of a batch: remove the line, or name "
                    "another file"
                )
            end += len(line)
            each(finished, line)
        if end < self._end:
            disk.cut(self._descriptor, end)
            self._end = end

    def append(self, lines: bytes) -> None:
        """Write whole lines, and wait until they are on the disk.

        Raises:
            OSError: The disk is full, or broken. The file is as long as before.
        """
        self._end = disk.append(self._descriptor, lines, self._end)
        disk.sync(self._descriptor)

    def keep_only(self, is_wanted: Callable[[Finished], bool]) -> None:
        """Replace the file by one that has only the results that are wanted. A kill leaves one of both, whole.

        Raises:
            OSError: The disk is full, or broken. The file is as it was.
        """
        written = self.path.with_name(f"{self.path.name}.new")
        disk.remove(written)
        descriptor = disk.open_to_append(written)
        try:
            os.fchmod(descriptor, stat.S_IMODE(os.fstat(self._descriptor).st_mode))
            disk.lock(descriptor)
            end = 0
            for line in self._lines():
                finished = _finished(line)
                if finished is not None and is_wanted(finished):
                    end = disk.append(descriptor, line, end)
            disk.sync(descriptor)
            disk.put_in_place(written, self.path)
        except BaseException:
            os.close(descriptor)
            disk.remove(written)
            raise
        os.close(self._descriptor)
        self._descriptor, self._end = descriptor, end

    def close(self) -> None:
        """Close the file, and unlock it. Harmless when repeated."""
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1

    def _opened(self) -> int:
        while True:
            if self.path.exists() and not self.path.is_file():
                raise ConfigurationError(f"{self.path} is not a regular file: name a file for the results")
            descriptor = disk.open_to_append(self.path)
            try:
                if not disk.lock(descriptor):
                    raise ConfigurationError(
                        f"another process writes to {self.path}: wait for its end, or name another file"
                    )
                if os.path.samestat(os.fstat(descriptor), self.path.stat()):
                    return descriptor
            except BaseException:
                os.close(descriptor)
                raise
            os.close(descriptor)  # a process that removed lines has put another file in its place meanwhile

    def _lines(self) -> Iterator[bytes]:
        with open(os.dup(self._descriptor), "rb", buffering=disk.READ_BYTES) as file:
            file.seek(0)
            yield from file


def _finished(line: bytes) -> Finished | None:
    """Return the result in a line; None if the line is torn, or none of a batch."""
    if is_torn(line):
        return None
    try:
        return decode_escaped(line, Finished)
    except (ValueError, RecursionError):
        return None
