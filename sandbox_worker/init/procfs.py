"""/proc, through a descriptor: which processes are a worker's, and what each of them uses."""

import contextlib
import errno
import mmap
import os
import stat
from dataclasses import dataclass, replace

from sandbox_worker.isolation import syscalls

_COUNTED = (b"RssAnon:", b"VmSwap:", b"VmPTE:")
_TICKS_PER_S = os.sysconf("SC_CLK_TCK")
_GONE = (FileNotFoundError, ProcessLookupError, PermissionError)
"""PermissionError: an ending process has no memory any more, so that its descriptors and maps are refused."""
_LISTINGS = 16
"""How often the threads of a process are listed at most until one is found that lives long enough to be read."""
_KCMP_VM = 1


@dataclass(frozen=True, slots=True)
class Status:
    """Threads and memory of one process.

    Attributes:
        memory_bytes: What is its own: written privately, swapped out, or spent on page tables.
        table_bytes: Page tables alone.
        speaker: Thread whose files in /proc show memory and descriptors, which all threads share. The first thread's
            files show none once it has ended.
        is_hidden: No thread lived long enough to be read. No ordinary program does that.
    """

    parent: int = 0
    threads: int = 0
    memory_bytes: int = 0
    table_bytes: int = 0
    speaker: int = 0
    is_hidden: bool = False


@dataclass(frozen=True, slots=True)
class Times:
    """What one process has done since it began.

    Attributes:
        runs: Its first thread was running or waiting for a CPU.
        faults: Page faults. A fault takes one page at most where a page is copied.
        cpu_s: CPU seconds of all its threads.
        system_s: The part of it that was spent in the kernel.
        childrens_cpu_s: The same of the children that it has waited for.
    """

    runs: bool = False
    faults: int = 0
    cpu_s: float = 0.0
    system_s: float = 0.0
    childrens_cpu_s: float = 0.0


@dataclass(frozen=True, slots=True)
class Seen:
    """One living process, as it was looked at."""

    pid: int
    status: Status
    times: Times


class Proc:
    """The folder as it was when this was made, even when something is mounted over it later.

    Attributes:
        own_pid: This process, as the folder names it: where it is a container's, not what os.getpid says.
        is_own: Whether it names processes as they are named here, and shows no others.
    """

    def __init__(self) -> None:
        self._fd = os.open("/proc", os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        self.own_pid = int(os.readlink("self", dir_fd=self._fd))
        self.is_own = self.own_pid == os.getpid() == 1
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
            if (status := self._status(str(pid))) is not None:
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
        status = self._status(str(pid))
        if status is not None and status.threads > 1 and not status.table_bytes:  # the first thread has ended
            return self._status_from_another_thread(pid, status)
        return None if status is None else replace(status, speaker=pid)

    def _status_from_another_thread(self, pid: int, status: Status) -> Status:
        known: set[str] = set()
        for _ in range(_LISTINGS):
            threads = set(self._names(f"{pid}/task"))
            for thread in threads:
                other = self._status(f"{pid}/task/{thread}")
                if other is not None and other.table_bytes:
                    return replace(other, speaker=int(thread))
            if threads <= known:  # no new ones: the process is ending, and has let go of its memory
                return replace(status, speaker=pid)
            known = threads
        return replace(status, speaker=pid, is_hidden=True)

    def _status(self, path: str) -> Status | None:
        """What the file of one thread says; no memory if that thread has ended and others have not."""
        kilobytes = tables = threads = parent = 0
        for line in self._read(f"{path}/status").splitlines():
            if line.startswith(_COUNTED):
                found = int(line.split()[1])
                kilobytes += found
                tables = found if line.startswith(b"VmPTE:") else tables
            elif line.startswith(b"Threads:"):
                threads = int(line.split()[1])
            elif line.startswith(b"PPid:"):
                parent = int(line.split()[1])
        return Status(parent, threads, kilobytes * 1024, tables * 1024) if threads else None

    def times(self, pid: int) -> Times:
        """All zero if it has ended."""
        # The second field is the program's name in brackets, which may hold anything.
        fields = self._read(f"{pid}/stat").rpartition(b")")[2].split()
        if not fields:
            return Times()
        user, system, childrens_user, childrens_system = map(int, fields[11:15])  # in proc(5) fields 14 to 17
        return Times(
            fields[0] == b"R",
            int(fields[7]) + int(fields[9]),  # minor and major ones: fields 10 and 12
            (user + system) / _TICKS_PER_S,
            system / _TICKS_PER_S,
            (childrens_user + childrens_system) / _TICKS_PER_S,
        )

    def mapped_bytes(self) -> tuple[int, int]:
        """The address space of the process that asks, and how much of it may still become private memory."""
        size, resident, shared, _, _, writable, _ = map(int, self._read("self/statm").split())
        return size * mmap.PAGESIZE, max(0, writable - (resident - shared)) * mmap.PAGESIZE

    def shared_out_bytes(self, speaker: int) -> int | None:
        """Proportional set size (anonymous and swap): a page that several processes share counts in parts.

        It takes the kernel 7 ms for each gigabyte. None if it cannot be read: the process has ended, or runs a program
        that init may not read.
        """
        kilobytes: list[int] = []
        for line in self._read(f"{speaker}/smaps_rollup").splitlines():
            if line.startswith((b"Pss_Anon:", b"SwapPss:")):
                kilobytes.append(int(line.split()[1]))
        return sum(kilobytes) * 1024 if kilobytes else None

    def have_one_memory(self, pid: int, other: int) -> bool:
        """Whether two processes have the same memory, as a child of vfork has its parent's until it runs a program."""
        if self.own_pid != os.getpid():  # the folder's numbers are not those of our pid namespace
            return False
        try:
            return syscalls.call("kcmp", pid, other, _KCMP_VM, 0, 0) == 0
        except OSError:
            return False

    def number_here(self, pid: int) -> int:
        """The number by which this process knows another; 0 if that has ended."""
        if self.is_own:
            return pid
        for line in self._read(f"{pid}/status").splitlines():
            if line.startswith(b"NSpid:"):
                return int(line.split()[-1])
        return 0

    def session(self, pid: int) -> int:
        """The session of a process, by the number that this process knows it by; 0 if it has ended."""
        number = self.number_here(pid)
        try:
            return os.getsid(number) if number else 0
        except ProcessLookupError:
            return 0

    def mappings(self, speaker: int) -> int:
        """How many it has; 0 if it has ended."""
        return self._read(f"{speaker}/maps").count(b"\n")

    def descriptors(self, speaker: int) -> int:
        """How many it has open; 0 if it has ended."""
        try:
            count = os.stat(f"{speaker}/fd", dir_fd=self._fd).st_size
        except _GONE:
            return 0
        return count or len(self._names(f"{speaker}/fd"))  # before Linux 6.2 the size says nothing

    def opened(self, speaker: int) -> list[str]:
        """What its descriptors lead to: "socket:[1234]", a path; nothing if it has ended or may not be looked into."""
        found = []
        for name in self._names(f"{speaker}/fd"):
            with contextlib.suppress(OSError):
                found.append(os.readlink(f"{speaker}/fd/{name}", dir_fd=self._fd))
        return found

    def unlinked_bytes(self, speaker: int, folder: str) -> int:
        """Of files of `folder` that have no name any more, but are still open in the process or mapped by it.

        Args:
            folder: Its path without links. Devices cannot tell what is in it: on an overlay of several file systems a
                file's is another one than its folder's.
        """
        sizes: dict[int, int] = {}
        for name in self._names(f"{speaker}/fd"):
            with contextlib.suppress(*_GONE):
                found = os.stat(f"{speaker}/fd/{name}", dir_fd=self._fd)
                is_unlinked = found.st_nlink == 0 and stat.S_ISREG(found.st_mode)
                if is_unlinked and self._is_below(f"{speaker}/fd/{name}", folder):
                    sizes[found.st_ino] = found.st_blocks * 512
        for line in self._read(f"{speaker}/maps").splitlines():
            if line.endswith(b" (deleted)"):
                addresses, _, _, _, inode, path = line.split(maxsplit=5)
                if path.startswith(os.fsencode(folder) + b"/"):
                    start, end = addresses.split(b"-")
                    sizes[int(inode)] = max(sizes.get(int(inode), 0), int(end, 16) - int(start, 16))
        return sum(sizes.values())

    def _is_below(self, link: str, folder: str) -> bool:
        try:
            return os.readlink(link, dir_fd=self._fd).startswith(f"{folder}/")
        except OSError as error:
            # A path of more than a page: model code can write nowhere but in the folder.
            return error.errno == errno.ENAMETOOLONG

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
