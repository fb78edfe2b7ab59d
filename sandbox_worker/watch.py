"""What a REPL and everything it started use, as init sees it in /proc: where no cgroup counts, this is what holds.

Approximate by nature: memory is what is mapped privately (RssAnon), swapped out (VmSwap) or spent on page tables
(VmPTE), read every few milliseconds while a block runs, so a writer at full speed is some megabytes past its limit
when it is seen. What these numbers do not show (memfds, shared anonymous mappings) is denied by seccomp; the scratch
folder has a size of its own. CPU time of processes that live shorter than the time between two looks is missed.
"""

import os
import time
from dataclasses import dataclass

FASTEST_S = 0.01
SLOWEST_S = 0.5
MOST_OF_A_CPU = 0.05
"""Looking takes 40 microseconds a process; with many of them the looks become rarer, not dearer."""
_TICKS_PER_S = os.sysconf("SC_CLK_TCK")
_COUNTED = (b"RssAnon:", b"VmSwap:", b"VmPTE:")


@dataclass(frozen=True, slots=True)
class Usage:
    """Of all processes together. `cpu_s` counts from the start of the block."""

    memory_bytes: int = 0
    cpu_s: float = 0.0
    processes: int = 0
    threads: int = 0


class Watch:
    """Looks at a worker's processes, often while they work and rarely while they sleep.

    Args:
        sees_all: /proc is this worker's own, and everything in it but init belongs to the REPL. Else only the REPL's
            own process is looked at, because it can have no other.
    """

    def __init__(self, sees_all: bool) -> None:
        self._sees_all = sees_all
        self._own_pid = os.getpid()
        self._repl_pid = 0
        self._inherited_bytes = 0
        self._cpu_ticks: dict[int, int] = {}
        self._block_ticks = 0
        self._last = Usage()
        self._interval_s = SLOWEST_S
        self._due = 0.0

    def repl_started(self, pid: int) -> None:
        """A fresh REPL. What it shares with init from the start (a context made of objects) is not its own."""
        self._repl_pid = pid
        self._cpu_ticks.clear()
        self._inherited_bytes = self._memory_and_threads(pid)[0]
        self.block_started()

    def block_started(self) -> None:
        """Count CPU time from here, and look closely."""
        self._block_ticks = 0
        self._look_in(FASTEST_S)

    def wait_s(self) -> float:
        """Seconds until the next look."""
        return max(0.0, self._due - time.monotonic())

    def look(self) -> Usage:
        """What is used now."""
        started = time.monotonic()
        memory_bytes = threads = processes = burned = 0
        seen: dict[int, int] = {}
        for pid in self._pids():
            try:
                anonymous, count = self._memory_and_threads(pid)
                seen[pid] = _cpu_ticks(pid)
            except (FileNotFoundError, ProcessLookupError):  # it ended meanwhile
                continue
            memory_bytes += max(0, anonymous - self._inherited_bytes)
            threads += count
            processes += 1
            burned += max(0, seen[pid] - self._cpu_ticks.get(pid, 0))
        self._cpu_ticks = seen
        self._block_ticks += burned
        usage = Usage(memory_bytes, self._block_ticks / _TICKS_PER_S, processes, threads)
        sleeps = not burned and memory_bytes <= self._last.memory_bytes
        cost_s = time.monotonic() - started
        self._look_in(max(min(2 * self._interval_s, SLOWEST_S) if sleeps else FASTEST_S, cost_s / MOST_OF_A_CPU))
        self._last = usage
        return usage

    def _look_in(self, interval_s: float) -> None:
        self._interval_s = interval_s
        self._due = time.monotonic() + interval_s

    def _pids(self) -> list[int]:
        if not self._sees_all:
            return [self._repl_pid]
        names = os.listdir("/proc")  # noqa: PTH208 - a hundred times a second: names are enough
        return [int(name) for name in names if name.isdigit() and int(name) != self._own_pid]

    def _memory_and_threads(self, pid: int) -> tuple[int, int]:
        kilobytes = threads = 0
        for line in _read(f"/proc/{pid}/status").splitlines():
            if line.startswith(_COUNTED):
                kilobytes += int(line.split()[1])
            elif line.startswith(b"Threads:"):
                threads = int(line.split()[1])
        return kilobytes * 1024, threads


def _cpu_ticks(pid: int) -> int:
    # The second field is the program's name in brackets, which may hold anything.
    fields = _read(f"/proc/{pid}/stat").rpartition(b")")[2].split()
    return int(fields[11]) + int(fields[12])  # utime and stime, in proc(5) fields 14 and 15


def _read(path: str) -> bytes:
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        return os.read(fd, 8192)
    finally:
        os.close(fd)
