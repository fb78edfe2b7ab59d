"""Environments that were made from lists of packages. They are kept below the user's cache folder and used again.

environments/DIGEST         an environment: always complete, since it is made in another folder and renamed
environments/DIGEST.XXXX    one that is being made, or was left by a process that was killed
environments/DIGEST.lock    locked by the process that makes the environment
"""

import asyncio
import contextlib
import fcntl
import os
import stat
import tempfile
from collections.abc import AsyncIterator
from functools import partial
from pathlib import Path

from rlm_broker.concurrency.deadline import Late, to_its_end, within
from rlm_broker.errors import ConfigurationError
from rlm_broker.sandbox.packages.installer import LOCK, install
from rlm_broker.sandbox.packages.requirements import Requirements
from rlm_broker.sandbox.workers.private_folder import removed
from rlm_broker.sandbox.workers.venv import Venv, read_venv

MAKE_TIMEOUT_S = 600.0
"""Seconds to make an environment, with waiting for another process that makes the same one. Beyond it: an error."""
PAUSE_S = 0.05
"""Seconds between two attempts to take a lock that another process holds."""


async def venv_with(requirements: Requirements, timeout_s: float = MAKE_TIMEOUT_S) -> Venv:
    """Return the environment with these packages: the one that is kept, or a new one.

    Args:
        requirements: List of packages.
        timeout_s: Seconds for a new one.

    Raises:
        ConfigurationError: It cannot be made, or not in that time, or there is no folder to keep it in.
    """
    try:
        folder = _environments()
        made = folder / requirements.digest
        if not _is_there(made):
            await within(timeout_s, _made(requirements, made))
    except Late:
        raise ConfigurationError(
            f"packages: no environment could be made within {timeout_s:g} s: try again, or give python= a venv"
        ) from None
    except OSError as error:
        raise ConfigurationError(f"packages cannot be kept: {error.strerror}: {error.filename}") from None
    return read_venv(made)


async def _made(requirements: Requirements, made: Path) -> None:
    async with _alone(made):
        if _is_there(made):  # another process has made it while this one waited for the lock
            return
        for left in made.parent.glob(f"{made.name}.*"):
            if left.suffix != ".lock":
                await removed(left)
        folder = Path(tempfile.mkdtemp(prefix=f"{made.name}.", dir=made.parent))
        try:
            venv = await install(requirements, folder)
            venv.chmod(0o700)
            venv.rename(made)
        finally:
            await to_its_end(partial(removed, folder))


@contextlib.asynccontextmanager
async def _alone(made: Path) -> AsyncIterator[None]:
    """Hold the lock of an environment. The kernel releases the lock of a process that ends."""
    lock = os.open(f"{made}.lock", os.O_CREAT | os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    try:
        while True:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                await asyncio.sleep(PAUSE_S)  # polled: a thread that blocks in flock(2) could not be cancelled
        yield
        fcntl.flock(lock, fcntl.LOCK_UN)  # by hand: a forked process may have a copy of the descriptor, and so the lock
    finally:
        os.close(lock)


def _environments() -> Path:
    """Return the folder of all environments, which no other user can write to: code is imported from there.

    Raises:
        ConfigurationError: There is no such folder, and none can be made.
    """
    given = os.environ.get("XDG_CACHE_HOME", "")
    try:
        cache = Path(given) if given.startswith("/") else Path("~/.cache").expanduser()
    except RuntimeError:
        raise ConfigurationError("packages cannot be kept: this user has no home: set HOME or XDG_CACHE_HOME") from None
    folder = cache / "rlm-broker" / "environments"
    cache.mkdir(0o700, parents=True, exist_ok=True)  # where the umask is 002, its group could write to it
    found = cache.stat()
    others_may_swap = found.st_mode & 0o022 and not found.st_mode & stat.S_ISVTX
    if others_may_swap or found.st_uid not in (0, os.geteuid()):
        raise ConfigurationError(
            f"packages: another user may replace files in {cache}: set XDG_CACHE_HOME to a folder of this user's"
        )
    for each in (folder.parent, folder):
        each.mkdir(mode=0o700, exist_ok=True)
        _require_own(each)
    return folder.resolve()


def _is_there(made: Path) -> bool:
    if not os.path.lexists(made):
        return False
    _require_own(made)
    return (made / LOCK).is_file()


def _require_own(folder: Path) -> None:
    """Refuse a folder that another user may have filled.

    Raises:
        ConfigurationError: It is not a folder, or another user owns it or can write to it.
    """
    found = folder.lstat()
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.geteuid() or found.st_mode & 0o022:
        raise ConfigurationError(
            f"packages: {folder} is not a folder that this user alone can write to: remove it, or set XDG_CACHE_HOME"
        )
