"""The folder of the control sockets of one user. No other user can enter, replace or fill it."""

import contextlib
import os
import re
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from rlm_broker.errors import ConfigurationError

RUNTIME_VARIABLE = "XDG_RUNTIME_DIR"
NAME = "rlm-broker"
TEMPORARY = Path("/tmp")
"""Place of the folder where there is no runtime folder of the user. `TMPDIR` may differ between two processes."""
MODE = 0o700

COMMAND = re.compile(r"[a-z]{1,20}")
"""Name of a command in the name of its socket."""
_SOCKET = re.compile(rf"({COMMAND.pattern})-([1-9]\d{{0,9}})-(\d{{1,20}})\.sock")
_START_TIME = 19
"""Index of the start time in /proc/PID/stat, among the fields behind the name of the program; see proc(5)."""


class SocketName(NamedTuple):
    """Name of a control socket. The start time tells a process from a later one with the same id.

    Attributes:
        command: Command of the process, for example "ask".
        pid: Its process id.
        started: Its start time in clock ticks since the boot.
    """

    command: str
    pid: int
    started: int

    def __str__(self) -> str:
        return f"{self.command}-{self.pid}-{self.started}.sock"

    @staticmethod
    def own(command: str) -> "SocketName":
        """Return the name of this process's socket."""
        fields = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
        return SocketName(command, os.getpid(), int(fields[_START_TIME]))

    @staticmethod
    def parsed(name: str) -> "SocketName | None":
        """Return the parts of a file's name; None for all but control sockets."""
        match = _SOCKET.fullmatch(name)
        return None if match is None else SocketName(match[1], int(match[2]), int(match[3]))


def place() -> Path:
    """Return the path of the folder: below XDG_RUNTIME_DIR if the user owns it, else below /tmp."""
    given = os.environ.get(RUNTIME_VARIABLE, "")
    with contextlib.suppress(OSError, ValueError):
        is_own = given.startswith("/") and Path(given).stat().st_uid == os.geteuid()
        if is_own and os.access(given, os.W_OK | os.X_OK):
            return Path(given, NAME)
    return TEMPORARY / f"{NAME}-{os.geteuid()}"


@contextlib.contextmanager
def opened(*, makes: bool = False) -> Iterator[int | None]:
    """Open the folder, and yield its descriptor; None if it does not exist.

    Sockets are reached through the descriptor (`address`), so no other folder can take the place of the checked one.

    Args:
        makes: Whether a missing folder is made.

    Raises:
        ConfigurationError: The folder is a link, belongs to another user, or other users may enter it.
        OSError: It cannot be made.
    """
    path = place()
    if makes:
        with contextlib.suppress(FileExistsError):
            path.mkdir(MODE)
    try:
        folder = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    except FileNotFoundError:
        yield None
        return
    except OSError as error:  # ELOOP or ENOTDIR: a link
        raise _refused(path, error.strerror or str(error)) from None
    try:
        found = os.fstat(folder)
        if found.st_uid != os.geteuid():
            raise _refused(path, f"it belongs to the user {found.st_uid}")
        if stat.S_IMODE(found.st_mode) != MODE:
            raise _refused(path, f"its mode is {stat.S_IMODE(found.st_mode):o} and not {MODE:o}")
        yield folder
    finally:
        os.close(folder)


def address(folder: int, name: object) -> str:
    """Return the address of a socket in an open folder. A path of any length becomes a short one."""
    return f"/proc/self/fd/{folder}/{name}"


def _refused(path: Path, why: str) -> ConfigurationError:
    return ConfigurationError(f"the folder of control sockets {path} cannot be trusted, remove it: {why}")
