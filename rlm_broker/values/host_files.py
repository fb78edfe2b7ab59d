"""Files of the host: a refusal as one sentence, and a file that is whole or absent."""

import contextlib
import os
import secrets
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

from rlm_broker.errors import ConfigurationError


@contextlib.contextmanager
def refusal_told(what: str, advice: str = "") -> Iterator[None]:
    """Raise `ConfigurationError` in place of a refusal of a file.

    Args:
        what: Beginning of its sentence, for example "cannot read a.txt".
        advice: End of its sentence.
    """
    try:
        yield
    except (OSError, ValueError) as error:  # a path with a NUL is a ValueError
        raise ConfigurationError(f"{what}: {getattr(error, 'strerror', None) or error}{advice}") from None


def open_regular(path: str | os.PathLike[str]) -> int:
    """Return a descriptor to read a regular file. Raise ConfigurationError for others: opening a named pipe would
    wait for its writer."""
    with refusal_told(f"{path} cannot be read"):
        fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    if not stat.S_ISREG(os.fstat(fd).st_mode):
        os.close(fd)
        raise ConfigurationError(f"{path} is not a regular file")
    return fd


@contextlib.contextmanager
def replacement(target: Path, mode: int = 0o600) -> Iterator[BinaryIO]:
    """Give a new file, which takes the place of the target once it is written. After a failure it is gone.

    A link stays, and its file is replaced. A device or a named pipe, such as /dev/stdout, is written to in place.

    Args:
        mode: Its mode, without what the umask forbids.
    """
    if target.exists() and not target.is_file():
        fd = os.open(target, os.O_WRONLY | os.O_NONBLOCK | os.O_CLOEXEC)  # a pipe without a reader is an error
        os.set_blocking(fd, True)
        with open(fd, "wb") as file:
            yield file
        return
    target = target.resolve()  # not of a pipe: /dev/stdout leads to a name that no file has
    part = target.with_name(f".{target.name[:100]}.{secrets.token_hex(8)}")
    try:
        with open(os.open(part, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, mode), "wb") as file:
            yield file
        part.replace(target)
    except BaseException:
        with contextlib.suppress(OSError):
            part.unlink()
        raise
