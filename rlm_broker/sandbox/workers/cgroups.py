"""Control groups for memory: an exact limit for all processes of a worker together.

Version 1 is used if its memory hierarchy is writable, version 2 if the group of this process is delegated to it. With
neither, init limits memory by what it sees in /proc.

In version 2 a group with processes cannot have groups with limits below it (cgroups(7), "no internal processes"). So
the processes of a delegated group are moved to a group `main` in it, and workers' groups are made beside it.
"""

import contextlib
import errno
import itertools
import os
from collections.abc import Iterator, Sequence
from pathlib import Path

PREFIX = "rlm-broker-"
LIMITS = (Path("/sys/fs/cgroup/memory.max"), Path("/sys/fs/cgroup/memory/memory.limit_in_bytes"))
"""Files with the memory limit of a container, as it sees them itself: version 2, version 1."""


GROUP_REMEDY = "`systemd-run --user --scope -p Delegate=yes COMMAND` starts a command in one (as root without `--user`)"
MAIN = "main"
"""Name of the group for the processes of a delegated group."""
_DELEGATED = ("user.delegate", "trusted.delegate")
"""Extended attributes of a group that systemd leaves to its processes (`Delegate=`); their value is "1"."""
_MOVES = 100
"""Attempts to move all processes of a group: they may start others meanwhile. Beyond them, it is not used."""


def memory_bytes(limits: Sequence[Path] = LIMITS) -> int:
    """Return the memory in bytes of the machine, or of the container that this process is in."""
    found = [os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")]
    for limit in limits:
        with contextlib.suppress(OSError, ValueError):  # there is no such file; it says "max"
            found.append(int(limit.read_text()))
    return min(found)


class MemoryGroups:
    """A folder of groups, one for each worker. Made by `find`. `version` is that of control groups, 1 or 2."""

    def __init__(self, folder: Path, limit_file: str, kills_file: str) -> None:
        self.version = 2 if limit_file == "memory.max" else 1
        self._folder = folder
        self._limit_file = limit_file
        self._kills_file = kills_file
        self._numbers = itertools.count(1)

    @classmethod
    def find(cls) -> "MemoryGroups | None":
        """Return groups below this process's own; None if it may make none. Sweeps killed processes' groups."""
        for base, limit_file, kills_file in _bases():
            with contextlib.suppress(OSError):
                _sweep(base)
                folder = base / f"{PREFIX}{os.getpid()}-{os.urandom(4).hex()}"
                folder.mkdir()
                found = cls(folder, limit_file, kills_file)
                try:
                    if found.version == 2:
                        (folder / "cgroup.subtree_control").write_text("+memory")
                    found.make(1 << 30).remove()
                except OSError:
                    found.close()
                    raise
                return found
        return None

    def make(self, limit_bytes: int) -> "MemoryGroup":
        """Make a group whose processes, with the kernel's memory for them, get `limit_bytes` together."""
        folder = self._folder / str(next(self._numbers))
        folder.mkdir()
        try:
            (folder / self._limit_file).write_text(str(limit_bytes))
            if self.version == 2:
                (folder / "memory.oom.group").write_text("1")  # kills all: a REPL that lost children is not reliable
                with contextlib.suppress(FileNotFoundError):  # the kernel does not account for swap
                    (folder / "memory.swap.max").write_text("0")
            return MemoryGroup(folder, limit_bytes, folder / self._kills_file)
        except OSError:
            folder.rmdir()
            raise

    def close(self) -> None:
        """Remove the folder, once all groups in it were removed. Has no effect when repeated."""
        with contextlib.suppress(OSError):
            self._folder.rmdir()


class MemoryGroup:
    """The group of one worker: its `folder`, and its limit of memory.

    Attributes:
        join_fd: Descriptor of its cgroup.procs. A process joins by writing "0" to it, with or without rights.
    """

    def __init__(self, folder: Path, limit_bytes: int, kills: Path) -> None:
        self.limit_bytes = limit_bytes
        self.join_fd = os.open(folder / "cgroup.procs", os.O_WRONLY | os.O_CLOEXEC)
        self.folder = folder
        self._kills = kills
        self._known_kills = 0

    def new_kills(self) -> int:
        """Return how many kills there were since the last call."""
        before, self._known_kills = self._known_kills, self.kills()
        return self._known_kills - before

    def kills(self) -> int:
        """Return how often the kernel has killed a process of the group because its limit was reached."""
        for line in self._kills.read_text().splitlines():
            name, _, count = line.partition(" ")
            if name == "oom_kill":
                return int(count)
        return 0

    def remove(self) -> bool:
        """Remove the group, and return whether it is gone. Has no effect when repeated. The kernel holds it for a
        moment after its last process."""
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
    """Yield folders in which groups with a memory limit might be made, and the names of two files of such a group."""
    mounts = [line.split() for line in Path("/proc/self/mounts").read_text().splitlines()]
    for line in Path("/proc/self/cgroup").read_text().splitlines():
        _, controllers, path = line.split(":", 2)
        for _, mount_point, kind, options, *_ in mounts:
            base = Path(mount_point) / path.lstrip("/")
            if kind == "cgroup" and "memory" in controllers.split(",") and "memory" in options.split(","):
                yield base, "memory.limit_in_bytes", "memory.oom_control"
            elif kind == "cgroup2" and not controllers:
                with contextlib.suppress(OSError):
                    if (place := _place_in(base, Path(mount_point))) is not None:
                        yield place, "memory.max", "memory.events"


def _has_memory(base: Path) -> bool:
    try:
        return "memory" in (base / "cgroup.subtree_control").read_text().split()
    except OSError:
        return False


def _place_in(own: Path, root: Path) -> Path | None:
    """Return a folder for groups with a limit: the group of this process or its parent, if it is delegated; or None."""
    if _has_memory(own):
        return own
    if own != root and _is_delegated(own.parent, root) and _give_memory(own.parent):
        return own.parent  # this process is in its `main`, or in a group of systemd's DelegateSubgroup=
    return own if _is_delegated(own, root) and _make_room_in(own) else None


def _is_delegated(group: Path, root: Path) -> bool:
    """Return whether no other program manages the group: systemd delegated it, or it is the root of our container."""
    for name in _DELEGATED:
        with contextlib.suppress(OSError):
            if os.getxattr(group, name) == b"1":
                return True
    return group == root and (group / "memory.max").exists()  # the machine's own root has no such file


def _make_room_in(group: Path) -> bool:
    """Move all processes of the group to a group below it, so that others below it can have limits."""
    main = group / MAIN
    with contextlib.suppress(OSError):
        main.mkdir(exist_ok=True)
        for _ in range(_MOVES):
            for pid in (group / "cgroup.procs").read_text().split():
                with contextlib.suppress(ProcessLookupError):  # the process has ended
                    (main / "cgroup.procs").write_text(pid)
            if _give_memory(group):
                return True
    return False


def _give_memory(group: Path) -> bool:
    """Let groups below this one have limits, and return whether they can: not while it has processes itself."""
    try:
        (group / "cgroup.subtree_control").write_text("+memory")
    except OSError as error:
        if error.errno == errno.EBUSY:
            return False
        raise
    return True


def _sweep(base: Path) -> None:
    for folder in base.glob(f"{PREFIX}*"):
        pid = folder.name.removeprefix(PREFIX).partition("-")[0]
        if pid.isdigit() and not Path("/proc", pid).exists():
            with contextlib.suppress(OSError):  # another user's, or swept by another process just now
                for group in folder.iterdir():
                    if group.is_dir():
                        group.rmdir()
                folder.rmdir()
