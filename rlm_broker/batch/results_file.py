"""The file of results: locked by one process, and changed at its end alone."""

import errno
import fcntl
import os
import stat
from collections.abc import Iterable, Iterator
from pathlib import Path

from rlm_broker.errors import ConfigurationError

PRIVATE = 0o600
"""Mode of files readable by this user alone."""


class ResultsFile:
    """A file of results, locked by this process until it is closed.

    Example:
        ```python
        file = ResultsFile(Path("results.jsonl"))
        file.append([b'{"id": "a"}\\n'])
        file.close()
        ```

    Args:
        path: Path of the file; it is made if it is missing.

    Attributes:
        size: Length of the file in bytes.

    Raises:
        ConfigurationError: Another process writes it, it is no regular file, or it cannot be written.
    """

    def __init__(self, path: Path) -> None:
        flags = os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_NOFOLLOW | os.O_NOCTTY
        try:  # without O_NONBLOCK, opening a named pipe waits for its other end
            self._descriptor = os.open(path, flags | os.O_NONBLOCK, PRIVATE)
        except OSError as error:
            if error.errno in (errno.ELOOP, errno.EISDIR, errno.ENXIO):  # a link, a folder, a socket
                raise _not_regular(path) from None
            raise ConfigurationError(f"cannot write to {path}: {error.strerror or error}") from None
        try:
            if not stat.S_ISREG(os.fstat(self._descriptor).st_mode):
                raise _not_regular(path)
            fcntl.flock(self._descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            self.close()
            raise ConfigurationError(
                f"another process writes to {path}: wait for its end, or name another file"
            ) from None
        except BaseException:
            self.close()
            raise
        self.size = os.fstat(self._descriptor).st_size

    def append(self, lines: Iterable[bytes]) -> None:
        """Write whole lines at the end.

        Raises:
            OSError: The disk is full, or broken. The file then ends with a whole line.
        """
        for line in lines:
            left = memoryview(line)
            try:
                while left:
                    left = left[os.write(self._descriptor, left) :]
            except OSError:
                self.cut(self.size)
                raise
            self.size += len(line)

    def lines(self) -> Iterator[bytes]:
        """Yield the lines, each with its end."""
        with open(os.dup(self._descriptor), "rb", buffering=1 << 20) as file:
            file.seek(0)
            yield from file

    def tail(self, start: int, size: int) -> bytes:
        """Return up to `size` bytes from a place on."""
        return os.pread(self._descriptor, size, start)

    def cut(self, size: int) -> None:
        """Cut the file to a length in bytes."""
        os.ftruncate(self._descriptor, size)
        self.size = size

    def sync(self) -> None:
        """Wait until the content is on the disk."""
        os.fdatasync(self._descriptor)

    def close(self) -> None:
        """Close the file, and unlock it. Harmless when repeated."""
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1


def _not_regular(path: Path) -> ConfigurationError:
    return ConfigurationError(f"{path} is not a regular file: remove it, or name another file for the results")
