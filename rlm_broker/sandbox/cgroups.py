"""Control groups for memory, where this process may make some: an exact limit for all processes of a worker together.

Version 1 where its memory hierarchy is writable, version 2 where `memory` is delegated to the group that we are in.
Elsewhere there are none, and what init sees in /proc is what holds.
"""

import contextlib
import itertools
import os
from collections.abc import Iterator, Sequence
from pathlib import Path

PREFIX = "rlm-broker-"
LIMITS = (Path("/sys/fs/cgroup/memory.max"), Path("/sys/fs/cgroup/memory/memory.limit_in_bytes"))
"""Of a container as a whole, as it sees it itself: version 2, version 1."""


GROUP_REMEDY = "`systemd-run --user --scope -p Delegate=yes COMMAND` starts a command in one"


def memory_bytes(limits: Sequence[Path] = LIMITS) -> int:
    """Memory of the machine, or of the container that we are in."""
    found = [os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")]
    for limit in limits:
        with contextlib.suppress(OSError, ValueError):  # there is none; "max"
            found.append(int(limit.read_text()))
    return min(found)


class MemoryGroups:
    """A folder of groups, one for each worker. Made by `find`."""

    def __init__(self, folder: Path, limit_file: str, kills_file: str) -> None:
        self._folder = folder
        self._limit_file = limit_file
        self._kills_file = kills_file
        self._numbers = itertools.count(1)

    @classmethod
    def find(cls) -> "MemoryGroups | None":
        """Groups below the one that we are in, or None where we may not make any. Sweeps what a killed process left."""
        for base, limit_file, kills_file in _bases():
            with contextlib.suppress(OSError):
                _sweep(base)
                folder = base / f"{PREFIX}{os.getpid()}-{os.urandom(4).hex()}"
                folder.mkdir()
                found = cls(folder, limit_file, kills_file)
                try:
                    if limit_file == "memory.max":
                        (folder / "cgroup.subtree_control").write_text("+memory")
                    found.make(1 << 30).remove()
                except OSError:
                    found.close()
                    raise
                return found
        return None

    def make(self, limit_bytes: int) -> "MemoryGroup":
        """A group whose processes together, with the kernel's memory for them, get no more than that."""
        folder = self._folder / str(next(self._numbers))
        folder.mkdir()
        try:
            (folder / self._limit_file).write_text(str(limit_bytes))
            return MemoryGroup(folder, limit_bytes, folder / self._kills_file)
        except OSError:
            folder.rmdir()
            raise

    def close(self) -> None:
        """When all of its groups were removed. Harmless when repeated."""
        with contextlib.suppress(OSError):
            self._folder.rmdir()


class MemoryGroup:
    """One worker's group.

    Attributes:
        folder: Its place in the control group file system.
        join_fd: Whoever writes "0" to it is in the group from then on, whatever rights it has.
    """

    def __init__(self, folder: Path, limit_bytes: int, kills: Path) -> None:
        self.limit_bytes = limit_bytes
        self.join_fd = os.open(folder / "cgroup.procs", os.O_WRONLY | os.O_CLOEXEC)
        self.folder = folder
        self._kills = kills

    def kills(self) -> int:
        """How often the kernel killed a process in it because the limit was reached."""
        for line in self._kills.read_text().splitlines():
            name, _, count = line.partition(" ")
            if name == "oom_kill":
                return int(count)
        return 0

    def remove(self) -> bool:
        """Whether it is gone; the kernel may take a moment after its last process. Harmless when repeated."""
        if self.join_fd >= 0:
            os.close(self.join_fd)
            self.join_fd = -1
        try:
            self.folder.rmdir()
        except FileNotFoundError:
            return True
        except OSError:
            return False
        return True


def _bases() -> Iterator[tuple[Path, str, str]]:
    """Folders in which groups with a memory limit might be made, and the names of two files of such a group."""
    mounts = [line.split() for line in Path("/proc/self/mounts").read_text().splitlines()]
    for line in Path("/proc/self/cgroup").read_text().splitlines():
        _, controllers, path = line.split(":", 2)
        for _, mount_point, kind, options, *_ in mounts:
            base = Path(mount_point) / path.lstrip("/")
            if kind == "cgroup" and "memory" in controllers.split(",") and "memory" in options.split(","):
                yield base, "memory.limit_in_bytes", "memory.oom_control"
            elif kind == "cgroup2" and not controllers and _has_memory(base):
                yield base, "memory.max", "memory.events"


def _has_memory(base: Path) -> bool:
    try:
        return "memory" in (base / "cgroup.subtree_control").read_text().split()
    except OSError:
        return False


def _sweep(base: Path) -> None:
    for folder in base.glob(f"{PREFIX}*"):
        pid = folder.name.removeprefix(PREFIX).partition("-")[0]
        if pid.isdigit() and not Path("/proc", pid).exists():
            with contextlib.suppress(OSError):  # somebody else's, or swept by another just now
                for group in folder.iterdir():
                    if group.is_dir():
                        group.rmdir()
                folder.rmdir()
