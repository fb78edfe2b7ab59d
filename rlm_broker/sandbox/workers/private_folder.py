"""A folder of the host for one zygote, and the removal of the folders of killed orchestrators."""

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
    """A new folder below the system's temporary one. A lock on it shows that its owner lives.

    The kernel takes the lock away when the owner ends, also when it is killed. The next owner removes all folders
    without a lock. Other users may enter the folder without listing it, since workers may run as another user.

    Raises:
        SandboxFailed: No temporary folder can be written to.
        OSError: The folder cannot be locked.
    """

    def __init__(self) -> None:
        _sweep()
        self.path, self._lock = _new_folder()
        self.path.chmod(0o711)

    def remove(self) -> bool:
        """Remove the folder, and return whether it is gone. Has no effect when repeated."""
        try:
            gone = remove_tree(self.path)
        finally:
            lock, self._lock = self._lock, -1
            if lock >= 0:
                os.close(lock)
        return gone or remove_tree(self.path)  # it takes a descriptor: the lock's may be the last


def _new_folder() -> tuple[Path, int]:
    """Make a folder, and lock it. If another process sweeps it before it is locked, make another."""
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
        fcntl.flock(lock, fcntl.LOCK_SH)  # waits while an earlier sweep removes the folder
        if os.fstat(lock).st_nlink:
            return folder, lock
        os.close(lock)


def remove_tree(path: Path) -> bool:
    """Remove a folder with any content of model code: folders without permissions, or a thousand in each other. Return
    whether it is gone. Has no effect when repeated."""
    try:
        shutil.rmtree(path)
    except FileNotFoundError:
        pass
    except (OSError, RecursionError):  # chmod and rm follow no link, and have no limit of depth
        for command in (["chmod", "-R", "u+rwx"], ["rm", "-rf"]):
            with contextlib.suppress(OSError):  # no process or descriptor is left for it
                subprocess.run([*command, "--", path], stderr=subprocess.DEVNULL, check=False)
    return not path.exists()


async def removed(path: Path) -> bool:
    """Remove a folder as `remove_tree` does, in a thread. At the interpreter's exit no thread can start: then here."""
    try:
        return await asyncio.to_thread(remove_tree, path)
    except RuntimeError:
        return remove_tree(path)


def _sweep() -> None:
    """Remove the folders whose owners have ended."""
    removed = 0
    with contextlib.suppress(OSError):  # no usable temporary folder: `_new_folder` reports it
        for folder in Path(tempfile.gettempdir()).glob(f"{PREFIX}*"):
            with contextlib.suppress(OSError):  # another user's, still in use, or swept by another process just now
                removed += _sweep_one(folder)
    if removed:
        _log.info("folders of processes that were killed were removed from %s: %d", tempfile.gettempdir(), removed)


def _sweep_one(folder: Path) -> bool:
    """Remove a folder if its owner has ended, and return whether it is gone."""
    found = folder.lstat()
    if found.st_uid != os.geteuid() or not stat.S_ISDIR(found.st_mode):
        return False  # root can take the lock of any user, and must not remove the target of a user's link
    lock = os.open(folder / LOCK, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        return remove_tree(folder)
    finally:
        os.close(lock)
