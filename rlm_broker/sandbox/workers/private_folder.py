"""A folder of the host for one zygote, and the end of those that killed orchestrators left behind."""

import asyncio
import contextlib
import fcntl
import logging
import os
import shutil
import stat
import subprocess
import tempfile
from pathlib import Path

from rlm_broker.errors import SandboxFailed

PREFIX = "rlm-broker-"
LOCK = "lock"

_log = logging.getLogger("rlm_broker")


class PrivateFolder:
    """A new folder below the system's temporary one. Its lock says that its owner lives: the kernel ends both together.

    Attributes:
        path: Other users may go through it, and not list it: workers may run as another user.

    Raises:
        SandboxFailed: No temporary folder can be written to.
        OSError: The folder cannot be locked.
    """

    def __init__(self) -> None:
        _sweep()
        self.path, self._lock = _new_folder()
        self.path.chmod(0o711)

    def remove(self) -> bool:
        """Whether it is gone now. Harmless when repeated."""
        gone = remove_tree(self.path)
        if self._lock >= 0:
            os.close(self._lock)
            self._lock = -1
        return gone


def _new_folder() -> tuple[Path, int]:
    """Make a folder, and take its lock. Another process may sweep the folder before the lock is taken: then again."""
    while True:
        try:
            folder = Path(tempfile.mkdtemp(prefix=PREFIX))
        except OSError as error:
            raise SandboxFailed(
                f"no temporary folder can be written to: {error.strerror or error}; set TMPDIR to one that can, or "
                "start the container with `docker run --tmpfs /tmp`"
            ) from None
        try:
            lock = os.open(folder / LOCK, os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o600)
        except OSError:
            folder.rmdir()
            raise
        fcntl.flock(lock, fcntl.LOCK_SH)  # waits until a sweep that was first has removed the folder
        if os.fstat(lock).st_nlink:
            return folder, lock
        os.close(lock)


def remove_tree(path: Path) -> bool:
    """Remove a folder that model code may have filled: with folders that nobody may enter, or a thousand in each other.

    Returns:
        Whether it is gone. Harmless when repeated.
    """
    try:
        shutil.rmtree(path)
    except FileNotFoundError:
        pass
    except (OSError, RecursionError):  # these two follow no link, and know no limit of depth
        for command in (["chmod", "-R", "u+rwx"], ["rm", "-rf"]):
            subprocess.run([*command, "--", path], stderr=subprocess.DEVNULL, check=False)
    return not path.exists()


async def removed(path: Path) -> bool:
    """`remove_tree` in a thread; here in the loop while the interpreter exits, which then starts no threads."""
    try:
        return await asyncio.to_thread(remove_tree, path)
    except RuntimeError:
        return remove_tree(path)


def _sweep() -> None:
    """Remove the folders of owners that do not live any more."""
    removed = 0
    with contextlib.suppress(OSError):  # no temporary folder is usable: making one says so
        for folder in Path(tempfile.gettempdir()).glob(f"{PREFIX}*"):
            with contextlib.suppress(OSError):  # of another user, still in use, or swept by another just now
                removed += _sweep_one(folder)
    if removed:
        _log.info("folders of processes that were killed were removed from %s: %d", tempfile.gettempdir(), removed)


def _sweep_one(folder: Path) -> bool:
    """Return whether it was one that was left, and is gone."""
    found = folder.lstat()
    if found.st_uid != os.geteuid() or not stat.S_ISDIR(found.st_mode):
        return False  # root could take any user's lock, and would remove what a link leads to
    lock = os.open(folder / LOCK, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        return remove_tree(folder)
    finally:
        os.close(lock)
