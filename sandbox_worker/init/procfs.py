"""Reads /proc through a descriptor: which processes belong to a worker, and which resources each of them uses."""

import contextlib
import errno
import mmap
import os
import stat
from typing import NamedTuple

from sandbox_worker.isolation import syscalls

_COUNTED = (b"RssAnon:", b"VmSwap:", b"VmPTE:")
_TICKS_PER_S = os.sysconf("SC_CLK_TCK")
_GONE = (FileNotFoundError, ProcessLookupError, PermissionError)
"""Errors of reading a process that has ended. PermissionError is one: an exiting process has given up its memory map,
and the kernel then refuses its descriptors and maps (`ptrace_may_access` fails without an mm)."""
_LISTINGS = 16
"""Most listings of a process's threads until one of them lives long enough to be read. Beyond it the process counts as
hidden."""
_KCMP_VM = 1


class Status(NamedTuple):
    """Threads and memory of one process.

    Attributes:
        parent: Its parent's pid.
        threads: Number of its threads.
        memory_bytes: Its own memory: private pages, swap and page tables.
        table_bytes: Page tables alone.
        speaker: A living thread, whose files in /proc show the memory and descriptors that all threads share. The files
            of a first thread that has ended show none.
        is_hidden: Whether no thread lived long enough to be read. Ordinary programs do not do that.
    """

    parent: int = 0
    threads: int = 0
    memory_bytes: int = 0
    table_bytes: int = 0
    speaker: int = 0
    is_hidden: bool = False


class Times(NamedTuple):
    """Activity of one process since it began.

    Attributes:
        runs: Whether its first thread was running or waiting for a CPU.
        faults: Page faults. One fault copies one page at most.
        cpu_s: CPU seconds of all its threads.
        system_s: The part of `cpu_s` that was spent in the kernel.
        childrens_cpu_s: CPU seconds of the children it has waited for.
    """

    runs: bool = False
    faults: int = 0
    cpu_s: float = 0.0
    system_s: float = 0.0
    childrens_cpu_s: float = 0.0


class Seen(NamedTuple):
    """One living process in one sample."""

    pid: int
    status: Status
    times: Times


class Proc:
    """/proc as it was when this object was made, also if a file system is mounted over it later.

    Attributes:
        own_pid: This process's number in /proc. If /proc belongs to another pid namespace, `os.getpid` differs.
        is_own: Whether /proc belongs to this process's pid namespace: it shows its processes by their numbers here,
            and no others.
    """

    def __init__(self) -> None:
        self._fd = os.open("/proc", os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        self.own_pid = int(os.readlink("self", dir_fd=self._fd))
        self.is_own = self.own_pid == os.getpid() == 1
        self._below: set[int] = set()
        self._strangers: set[int] = set()
        self._aside = 0

    def set_aside(self, pid: int) -> None:
        """Leave out one child of this process, of that pid here, from now on; 0 leaves out none."""
        self._aside = 0
        if pid:
            found = (pid,) if self.is_own else (each for each in self.below() if self.number_here(each) == pid)
            self._aside = next(iter(found), 0)

    def close(self) -> None:
        os.close(self._fd)

    def others(self, *, with_aside: bool = False) -> list[int]:
        """Return the pids of all processes but this one, and the one that is set aside."""
        names = os.listdir(self._fd)  # noqa: PTH208 - 100 times a second: only names are needed
        left_out = self.own_pid, 0 if with_aside else self._aside
        return [pid for name in names if name.isdigit() and (pid := int(name)) not in left_out]

    def below(self) -> list[int]:
        """Return the pids of all descendants of this process, if /proc also shows other processes.

        Orphans stay descendants: pid 1 of a namespace becomes their parent. Each process's parent is read once and
        remembered, so that a sample does not cost a read for each process of the machine.
        """
        others = {*self.others(), *([self._aside] if self._aside else [])}  # its children are descendants, too
        self._below &= others
        self._strangers &= others
        parents = {}
        for pid in others - self._below - self._strangers:
            if (status := self._status(str(pid), pid)) is not None:
                parents[pid] = status.parent
        grown = True
        while grown and parents:
            below = {pid for pid, parent in parents.items() if parent == self.own_pid or parent in self._below}
            strange = {pid for pid, parent in parents.items() if parent == 0 or parent in self._strangers}
            self._below |= below
            self._strangers |= strange
            # A process whose parent is too new to be in this listing is placed by the next sample.
            parents = {pid: parent for pid, parent in parents.items() if pid not in below | strange}
            grown = bool(below or strange)
        return [pid for pid in self._below if pid != self._aside]

    def status(self, pid: int) -> Status | None:
        """Return threads and memory of a process, or None if it has ended."""
        status = self._status(str(pid), pid)
        if status is not None and status.threads > 1 and not status.table_bytes:  # the first thread has ended
            return self._status_from_another_thread(pid, status)
        return status

    def _status_from_another_thread(self, pid: int, status: Status) -> Status:
        known: set[str] = set()
        for _ in range(_LISTINGS):
            threads = set(self._names(f"{pid}/task"))
            for thread in threads:
                other = self._status(f"{pid}/task/{thread}", int(thread))
                if other is not None and other.table_bytes:
                    return other
            if threads <= known:  # no new threads: the process is exiting, and its memory is freed
                return status
            known = threads
        return status._replace(is_hidden=True)

    def _status(self, path: str, speaker: int) -> Status | None:
        """Read one thread's status file. It shows no memory if that thread has ended while others live."""
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
        return Status(parent, threads, kilobytes * 1024, tables * 1024, speaker) if threads else None

    def times(self, pid: int) -> Times:
        """Return the activity of a process; all zero if it has ended."""
        # The second field is the program's name in brackets. It may hold brackets and blanks: read behind the last one.
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

    def mapped_bytes(self) -> tuple[int, int, int]:
        """Return the size of this process's address space, the part of it that may become private memory, and the part
        of that one that was not written yet."""
        size, resident, shared, _, _, writable, _ = map(int, self._read("self/statm").split())
        unwritten = max(0, writable - (resident - shared))
        return size * mmap.PAGESIZE, writable * mmap.PAGESIZE, unwritten * mmap.PAGESIZE

    def shared_out_bytes(self, speaker: int) -> int | None:
        """Return the proportional set size (anonymous and swap): each of n processes counts 1/n of a shared page.

        The kernel needs 7 ms for each gigabyte. None if it cannot be read: the process has ended, or runs a program
        that init may not read.
        """
        kilobytes: list[int] = []
        for line in self._read(f"{speaker}/smaps_rollup").splitlines():
            if line.startswith((b"Pss_Anon:", b"SwapPss:")):
                kilobytes.append(int(line.split()[1]))
        return sum(kilobytes) * 1024 if kilobytes else None

    def unshared_bytes(self, speaker: int) -> int:
        """Return the private memory of a process that no other process has mapped; 0 if it has ended."""
        found = (line for line in self._read(f"{speaker}/smaps_rollup").splitlines())
        return sum(int(line.split()[1]) for line in found if line.startswith((b"Private_Dirty:", b"SwapPss:"))) * 1024

    def have_one_memory(self, pid: int, other: int) -> bool:
        """Return whether two processes share one memory map. A child of vfork uses its parent's until it execs."""
        if self.own_pid != os.getpid():  # kcmp takes pids of our namespace, and /proc shows another one's
            return False
        try:
            return syscalls.call("kcmp", pid, other, _KCMP_VM, 0, 0) == 0
        except OSError:
            return False

    def number_here(self, pid: int) -> int:
        """Return a process's pid in this process's pid namespace; 0 if it has ended."""
        if self.is_own:
            return pid
        for line in self._read(f"{pid}/status").splitlines():
            if line.startswith(b"NSpid:"):
                return int(line.split()[-1])
        return 0

    def session(self, pid: int) -> int:
        """Return the session of a process, as a pid in this process's pid namespace; 0 if it has ended."""
        number = self.number_here(pid)
        try:
            return os.getsid(number) if number else 0
        except ProcessLookupError:
            return 0

    def mappings(self, speaker: int) -> int:
        """Return the number of a process's memory mappings; 0 if it has ended."""
        return self._read(f"{speaker}/maps").count(b"\n")

    def descriptors(self, speaker: int) -> int:
        """Return the number of a process's open descriptors; 0 if it has ended."""
        try:
            count = os.stat(f"{speaker}/fd", dir_fd=self._fd).st_size
        except _GONE:
            return 0
        return count or len(self._names(f"{speaker}/fd"))  # before Linux 6.2 the size of this folder is 0

    def opened(self, speaker: int) -> list[str]:
        """Return the targets of its descriptors, for example "socket:[1234]" or a path.

        The list is empty if the process has ended or init may not read its descriptors.
        """
        found = []
        for name in self._names(f"{speaker}/fd"):
            with contextlib.suppress(OSError):
                found.append(os.readlink(f"{speaker}/fd/{name}", dir_fd=self._fd))
        return found

    def unlinked_bytes(self, speaker: int, folder: str) -> int:
        """Return the bytes of deleted files of `folder` that the process still has open or mapped.

        Args:
            speaker: A living thread of the process.
            folder: Path without links. Paths are compared, and not device numbers: on an overlay file system, the
                device of a file can differ from its folder's.
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
            # A path longer than a page. Model code can write only below the folder, so the file is there.
            return error.errno == errno.ENAMETOOLONG

    def _names(self, path: str) -> list[str]:
        """Return the names in a folder of /proc; none if the process has ended."""
        try:
            fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC, dir_fd=self._fd)
        except _GONE:
            return []
        try:
            return os.listdir(fd)  # noqa: PTH208 - below a descriptor
        except _GONE:  # since the folder was opened
            return []
        finally:
            os.close(fd)

    def _read(self, path: str) -> bytes:
        """Return a file's content; empty if the process has ended."""
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
