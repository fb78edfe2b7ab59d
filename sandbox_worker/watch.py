"""What a REPL and everything it started use, as init sees it in /proc: where no cgroup counts, this is what holds.

Approximate by nature: memory is what is mapped privately (RssAnon), swapped out (VmSwap) or spent on page tables
(VmPTE), read every few milliseconds while a block runs, so a writer at full speed is some megabytes past its limit
when it is seen. What these numbers do not show (memfds, shared anonymous mappings) is denied by seccomp; for what
sockets and pipes hold, descriptors beyond the usual number are charged at the most that each can hold. A scratch
folder that is a file system has a size of its own; one that is a folder of the host's is looked through now and then.
CPU time of processes that live shorter than the time between two looks is missed.
"""

import os
import time
from collections.abc import Callable
from dataclasses import dataclass

from sandbox_worker.proc import Proc
from sandbox_worker.scratch import Contents, contents

FASTEST_S = 0.01
SLOWEST_S = 0.5
SCRATCH_S = 0.1
"""The scratch folder is looked through so often at most: it costs 5 microseconds a file."""
MOST_OF_A_CPU = 0.05
"""Looking takes 40 microseconds a process; with many of them the looks become rarer, not dearer."""
FREE_DESCRIPTORS = 32
"""Of each process, at no charge: ordinary programs have no more, and forked ones share theirs."""
DESCRIPTOR_BYTES = 212_992
"""What a socket can hold in the kernel's memory (net.core.wmem_default), where no number of a process shows it."""
_TICKS_PER_S = os.sysconf("SC_CLK_TCK")


@dataclass(frozen=True, slots=True)
class Usage:
    """Of all processes together. `cpu_s` counts from the start of the block; `scratch_*` only where it is watched."""

    memory_bytes: int = 0
    cpu_s: float = 0.0
    processes: int = 0
    threads: int = 0
    scratch_bytes: int = 0
    scratch_files: int = 0


class Watch:
    """Looks at a worker's processes, often while they work and rarely while they sleep.

    Args:
        proc: Where they are seen.
        pids: Those of the REPL; None where it can have no process but its own.
        scratch: The folder to look through, or None.
        max_scratch_files: It is not looked through beyond this number.
    """

    def __init__(
        self,
        proc: Proc,
        pids: Callable[[], list[int]] | None = None,
        scratch: str | None = None,
        max_scratch_files: int = 0,
    ) -> None:
        self._proc = proc
        self._pids = pids or (lambda: [self._repl_pid])
        self._scratch = scratch
        self._max_scratch_files = max_scratch_files
        self._repl_pid = 0
        self._inherited_bytes = 0
        self._cpu_ticks: dict[int, int] = {}
        self._block_ticks = 0
        self._last = Usage()
        self._interval_s = SLOWEST_S
        self._due = 0.0
        self._in_scratch = Contents(0, 0)
        self._scratch_due = 0.0

    def repl_started(self, pid: int) -> None:
        """A fresh REPL. What it shares with init from the start (a context made of objects) is not its own."""
        self._repl_pid = pid
        self._cpu_ticks.clear()
        own = self._proc.status(self._proc.own_pid)
        self._inherited_bytes = own.memory_bytes if own else 0
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
            status = self._proc.status(pid)
            if status is None:  # it ended meanwhile
                continue
            memory_bytes += max(0, status.memory_bytes - self._inherited_bytes)
            memory_bytes += max(0, self._proc.descriptors(pid) - FREE_DESCRIPTORS) * DESCRIPTOR_BYTES
            threads += status.threads
            processes += 1
            seen[pid] = self._proc.cpu_ticks(pid)
            burned += max(0, seen[pid] - self._cpu_ticks.get(pid, 0))
        self._cpu_ticks = seen
        self._block_ticks += burned
        if self._scratch is not None and started >= self._scratch_due:
            self._look_through(self._scratch)
        found = self._in_scratch
        cpu_s = self._block_ticks / _TICKS_PER_S
        usage = Usage(memory_bytes, cpu_s, processes, threads, found.size_bytes, found.files)
        sleeps = not burned and memory_bytes <= self._last.memory_bytes
        cost_s = time.monotonic() - started
        self._look_in(max(min(2 * self._interval_s, SLOWEST_S) if sleeps else FASTEST_S, cost_s / MOST_OF_A_CPU))
        self._last = usage
        return usage

    def _look_through(self, folder: str) -> None:
        started = time.monotonic()
        found = contents(folder, self._max_scratch_files)
        unlinked = sum(self._proc.unlinked_bytes(pid, folder) for pid in self._pids())
        self._in_scratch = Contents(found.size_bytes + unlinked, found.files)
        ended = time.monotonic()
        self._scratch_due = ended + max(SCRATCH_S, (ended - started) / MOST_OF_A_CPU)

    def _look_in(self, interval_s: float) -> None:
        self._interval_s = interval_s
        self._due = time.monotonic() + interval_s
