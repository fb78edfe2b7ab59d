"""A folder of the host for one zygote, and the end of those that killed orchestrators left behind."""

import asyncio
import contextlib
import fcntl
import os
import shutil
import stat
import subprocess
import tempfile
from pathlib import Path

from rlm_broker.errors import SandboxFailed

PREFIX = "rlm-broker-"
LOCK = "lock"


class PrivateFolder:
    """A new folder below the system's temporary one. A lock says that its owner lives: the kernel drops it with him.

    Attributes:
        path: Others may go through it, but not list it: workers may run as somebody else.

    Raises:
        SandboxFailed: No temporary folder can be written to.
    """

    def __init__(self) -> None:
        try:
            _sweep()
            self.path = Path(tempfile.mkdtemp(prefix=PREFIX))
        except OSError as error:
            raise SandboxFailed(
                f"no temporary folder can be written to: {error.strerror or error}; set TMPDIR to one that can, or "
                "start the container with `docker run --tmpfs /tmp`"
            ) from None
        try:
            self._lock = os.open(self.path / LOCK, os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o600)
        except OSError:
            self.path.rmdir()
            raise
        fcntl.flock(self._lock, fcntl.LOCK_SH)
        self.path.chmod(0o711)

    def remove(self) -> bool:
        """Whether it is gone now. Harmless when repeated."""
        gone = remove_tree(self.path)
        if self._lock >= 0:
            os.close(self._lock)
            self._lock = -1
        return gone


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
    for folder in Path(tempfile.gettempdir()).glob(f"{PREFIX}*"):
        with contextlib.suppress(OSError):  # somebody else's, still in use, or swept by another just now
            found = folder.lstat()
            if found.st_uid != os.geteuid() or not stat.S_ISDIR(found.st_mode):
                continue  # root could take any user's lock, and would remove what a link leads to
            lock = os.open(folder / LOCK, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                remove_tree(folder)
            finally:
                os.close(lock)
