"""Files of the host that are read whole, and written whole or not at all."""

import contextlib
import os
import secrets
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import IO

from rlm_broker.errors import ConfigurationError


def open_regular(path: str | os.PathLike[str]) -> int:
    """Return a descriptor to read a regular file. Raise ConfigurationError for others: opening a named pipe would
    wait for its writer."""
    try:
        fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    except (OSError, ValueError) as error:
        raise ConfigurationError(f"{path} cannot be read: {getattr(error, 'strerror', None) or error}") from None
    if not stat.S_ISREG(os.fstat(fd).st_mode):
        os.close(fd)
        raise ConfigurationError(f"{path} is not a regular file")
    return fd


@contextlib.contextmanager
def replacing(target: Path, mode: int = 0o600) -> Iterator[IO[bytes]]:
    """Yield a file beside the target, which it replaces once it is complete. If the block fails, the target stays."""
    part = target.with_name(f".{target.name[:100]}.{secrets.token_hex(8)}")
    fd = os.open(part, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, mode)
    try:
        with open(fd, "wb") as file:
            yield file
        part.replace(target)
    finally:
        with contextlib.suppress(OSError):
            part.unlink(missing_ok=True)
