"""/proc, through a descriptor: which processes are a worker's, and what each of them uses."""

import contextlib
import mmap
import os
import stat
from dataclasses import dataclass

_COUNTED = (b"RssAnon:", b"VmSwap:", b"VmPTE:")
_TICKS_PER_S = os.sysconf("SC_CLK_TCK")
_GONE = (FileNotFoundError, ProcessLookupError, PermissionError)
"""The last for the descriptors and maps of a process that is ending: without memory it is nobody's to look into."""


@dataclass(frozen=True, slots=True)
class Status:
    """Of one process.

    Attributes:
        memory_bytes: What is its own: written privately, swapped out, or spent on page tables.
    """

    parent: int = 0
    threads: int = 0
    memory_bytes: int = 0


class Proc:
    """The folder as it was when this was made, even when something is mounted over it later.

    Attributes:
        own_pid: This process, as the folder names it: where it is a container's, not what os.getpid says.
    """

    def __init__(self) -> None:
        self._fd = os.open("/proc", os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        self.own_pid = int(os.readlink("self", dir_fd=self._fd))
        self._below: set[int] = set()
        self._strangers: set[int] = set()

    def close(self) -> None:
        os.close(self._fd)

    def others(self) -> list[int]:
        """Every process but this one."""
        names = os.listdir(self._fd)  # noqa: PTH208 - a hundred times a second: names are enough
        return [int(name) for name in names if name.isdigit() and int(name) != self.own_pid]

    def below(self) -> list[int]:
        """Every process below this one, in a folder that shows others, too: as pid 1 it is the parent of orphans.

        Each process is asked for its parent once, or a look would cost what the whole machine runs.
        """
        others = set(self.others())
        self._below &= others
        self._strangers &= others
        parents = {}
        for pid in others - self._below - self._strangers:
            if (status := self.status(pid)) is not None:
                parents[pid] = status.parent
        grown = True
        while grown and parents:
            below = {pid for pid, parent in parents.items() if parent == self.own_pid or parent in self._below}
            strange = {pid for pid, parent in parents.items() if parent == 0 or parent in self._strangers}
            self._below |= below
            self._strangers |= strange
            # A parent that was not in the list yet, because it is as new, is known the next time.
            parents = {pid: parent for pid, parent in parents.items() if pid not in below | strange}
            grown = bool(below or strange)
        return list(self._below)

    def status(self, pid: int) -> Status | None:
        """None if it has ended."""
        kilobytes = threads = parent = 0
        for line in self._read(f"{pid}/status").splitlines():
            if line.startswith(_COUNTED):
                kilobytes += int(line.split()[1])
            elif line.startswith(b"Threads:"):
                threads = int(line.split()[1])
            elif line.startswith(b"PPid:"):
                parent = int(line.split()[1])
        return Status(parent, threads, kilobytes * 1024) if threads else None

    def mapped_bytes(self) -> int:
        """The address space of the process that asks."""
        return int(self._read("self/statm").split()[0]) * mmap.PAGESIZE

    def cpu_s(self, pid: int) -> tuple[float, float]:
        """CPU seconds that all its threads used, and that its children did of whose end it has heard."""
        # The second field is the program's name in brackets, which may hold anything.
        fields = self._read(f"{pid}/stat").rpartition(b")")[2].split()
        if not fields:
            return 0.0, 0.0
        user, system, childrens_user, childrens_system = map(int, fields[11:15])  # in proc(5) fields 14 to 17
        return (user + system) / _TICKS_PER_S, (childrens_user + childrens_system) / _TICKS_PER_S

    def shared_out_bytes(self, pid: int) -> int:
        """Its memory, of pages that several processes share only its part of each: dear for a large process."""
        kilobytes = 0
        for line in self._read(f"{pid}/smaps_rollup").splitlines():
            if line.startswith((b"Pss_Anon:", b"SwapPss:")):
                kilobytes += int(line.split()[1])
        return kilobytes * 1024

    def descriptors(self, pid: int) -> int:
        """How many it has open; 0 if it has ended."""
        try:
            count = os.stat(f"{pid}/fd", dir_fd=self._fd).st_size
        except _GONE:
            return 0
        return count or len(self._names(f"{pid}/fd"))  # before Linux 6.2 the size says nothing

    def unlinked_bytes(self, pid: int, folder: str) -> int:
        """Of files of `folder` that have no name any more, but are still open in the process or mapped by it."""
        sizes: dict[int, int] = {}
        device = os.stat(folder).st_dev  # noqa: PTH116 - as below
        for name in self._names(f"{pid}/fd"):
            with contextlib.suppress(*_GONE):
                found = os.stat(f"{pid}/fd/{name}", dir_fd=self._fd)
                if found.st_dev == device and found.st_nlink == 0 and stat.S_ISREG(found.st_mode):
                    sizes[found.st_ino] = found.st_blocks * 512
        for line in self._read(f"{pid}/maps").splitlines():
            if line.endswith(b" (deleted)"):
                addresses, _, _, _, inode, path = line.split(maxsplit=5)
                if path.startswith(folder.encode()):
                    start, end = addresses.split(b"-")
                    sizes[int(inode)] = max(sizes.get(int(inode), 0), int(end, 16) - int(start, 16))
        return sum(sizes.values())

    def _names(self, path: str) -> list[str]:
        """Nothing if the process has ended."""
        try:
            fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC, dir_fd=self._fd)
        except _GONE:
            return []
        try:
            return os.listdir(fd)  # noqa: PTH208 - below a descriptor
        except _GONE:  # just now
            return []
        finally:
            os.close(fd)

    def _read(self, path: str) -> bytes:
        """Nothing if the process has ended."""
        try:
            fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC, dir_fd=self._fd)
        except _GONE:
            return b""
        try:
            parts = []
            while part := os.read(fd, 1 << 16):
                parts.append(part)
            return b"".join(parts)
        except _GONE:
            return b""
        finally:
            os.close(fd)
