"""What a REPL and everything it started use, as init sees it in /proc: where no cgroup counts, this is what holds.

Approximate by nature: memory is what is mapped privately (RssAnon), swapped out (VmSwap) or spent on page tables
(VmPTE), read every few milliseconds while a block runs, so a writer at full speed is some megabytes past its limit
when it is seen. What these numbers do not show (memfds, shared anonymous mappings) is denied by seccomp; for what
sockets and pipes hold, descriptors beyond the usual number are charged at the most that each can hold. A scratch
folder that is a file system has a size of its own; one that is a folder of the host's is looked through now and then.
CPU time is that of the living, and of the dead whose end somebody waited for: what is missed is who lives shorter than
the time between two looks, below a parent that wants to hear of no end.
"""

import resource
import time
from collections.abc import Callable
from dataclasses import dataclass

from sandbox_worker.proc import Proc
from sandbox_worker.scratch import Contents, contents

FASTEST_S = 0.01
SLOWEST_S = 0.5
"""While the REPL sleeps. One process alone is bounded by its address space; of several each could grow that much."""
SLOWEST_OF_SEVERAL_S = 0.02
LITTLE_CPU_S = 0.005
"""Half of what the kernel counts in."""
SCRATCH_S = 0.1
"""The scratch folder is looked through so often at most: it costs 5 microseconds a file."""
MOST_OF_A_CPU = 0.05
"""Looking takes 40 microseconds a process; with many of them the looks become rarer, not dearer."""
MOST_WHILE_GROWING = 0.5
"""While there is more memory in use than ever before: then each look also waits for the kernel, and time is short."""
FREE_DESCRIPTORS = 32
"""Of each process, at no charge: ordinary programs have no more, and forked ones share theirs."""
DESCRIPTOR_BYTES = 212_992
"""What a socket can hold in the kernel's memory (net.core.wmem_default), where no number of a process shows it."""


@dataclass(frozen=True, slots=True)
class Usage:
    """Of all processes together. `cpu_s` counts from the start of the block; `scratch_*` only where it is watched."""

    memory_bytes: int = 0
    cpu_s: float = 0.0
    processes: int = 0
    threads: int = 0
    scratch_bytes: int = 0
    scratch_files: int = 0


NOTHING = Usage()
EMPTY = Contents(0, 0)


class Watch:
    """Looks at a worker's processes, often while they work and rarely while they sleep.

    Args:
        proc: Where they are seen.
        pids: Those of the REPL; None where it can have no process but its own.
        memory_bytes: The limit, near which it looks more closely.
        scratch: The folder to look through, or None.
        max_scratch_files: It is not looked through beyond this number.
    """

    def __init__(
        self,
        proc: Proc,
        memory_bytes: int,
        pids: Callable[[], list[int]] | None = None,
        scratch: str | None = None,
        max_scratch_files: int = 0,
    ) -> None:
        self._proc = proc
        self._memory_bytes = memory_bytes
        self._pids = pids or (lambda: [self._repl_pid])
        self._scratch = scratch
        self._max_scratch_files = max_scratch_files
        self._repl_pid = 0
        self._inherited_bytes = 0
        self._cpu_s: dict[int, float] = {}
        self._all_cpu_s = 0.0
        self._block_cpu_s = 0.0
        self._most_bytes = 0
        self._last = NOTHING
        self._interval_s = SLOWEST_S
        self._due = 0.0
        self._in_scratch = EMPTY
        self._scratch_due = 0.0

    def repl_started(self, pid: int, inherited_bytes: int) -> None:
        """A fresh REPL is to be looked at from here on.

        Args:
            inherited_bytes: What it shares with init from the start (a context made of objects) is not its own.
        """
        self._repl_pid = pid
        self._cpu_s.clear()
        self._all_cpu_s = _cpu_s_of_the_dead()
        self._inherited_bytes = inherited_bytes

    def block_started(self) -> None:
        """Count CPU time from here, and look closely."""
        self._block_cpu_s = 0.0
        self._most_bytes = 0
        self._look_in(FASTEST_S)

    def wait_s(self) -> float:
        """Seconds until the next look."""
        return max(0.0, self._due - time.monotonic())

    def look(self) -> Usage:
        """What is used now."""
        worked_s = time.process_time()
        threads = processes = memory_bytes = inherited_bytes = held_bytes = 0
        cpu_s: dict[int, float] = {}
        all_cpu_s = _cpu_s_of_the_dead()
        pids = self._pids()
        for pid in pids:
            status = self._proc.status(pid)
            if status is None:  # it ended meanwhile
                continue
            processes += 1
            threads += status.threads
            memory_bytes += status.memory_bytes
            inherited_bytes += min(status.memory_bytes, self._inherited_bytes)
            held_bytes += max(0, self._proc.descriptors(pid) - FREE_DESCRIPTORS) * DESCRIPTOR_BYTES
            cpu_s[pid], childrens_s = self._proc.cpu_s(pid)
            all_cpu_s += cpu_s[pid] + childrens_s
        used_bytes = memory_bytes - inherited_bytes
        if used_bytes + held_bytes <= self._memory_bytes < memory_bytes - self._inherited_bytes + held_bytes:
            used_bytes = max(used_bytes, self._exactly(pids))
        burned_s = self._burned_s(cpu_s, all_cpu_s)
        if self._scratch is not None and time.monotonic() >= self._scratch_due:
            self._look_through(self._scratch)
        found = self._in_scratch
        usage = Usage(used_bytes + held_bytes, self._block_cpu_s, processes, threads, found.size_bytes, found.files)
        sleeps = burned_s < LITTLE_CPU_S and usage.memory_bytes <= self._last.memory_bytes
        slowest_s = SLOWEST_S if processes <= 1 else SLOWEST_OF_SEVERAL_S
        cost_s = time.process_time() - worked_s  # not the clock's: processes that keep us waiting are looked at sooner
        share = MOST_WHILE_GROWING if usage.memory_bytes > self._most_bytes else MOST_OF_A_CPU
        self._most_bytes = max(self._most_bytes, usage.memory_bytes)
        self._look_in(max(min(2 * self._interval_s, slowest_s) if sleeps else FASTEST_S, cost_s / share))
        self._last = usage
        return usage

    def _exactly(self, pids: list[int]) -> int:
        """Memory beyond what init gave, when it matters whether each process still shares that or has its own copy.

        What is still shared counts for each process no more than it does for init, which shares it with them all, and
        perhaps with other workers of a template; and for init and all processes together no more than once. Both bounds
        hold, so that the larger of what is left is used for certain.
        """
        inits = self._proc.shared_out_bytes(self._proc.own_pid)
        everyones = sum(map(self._proc.shared_out_bytes, pids))
        return max(0, everyones + inits - self._inherited_bytes, everyones - len(pids) * inits)

    def _burned_s(self, cpu_s: dict[int, float], all_cpu_s: float) -> float:
        """CPU time since the last look: of the living as they were seen, or with the dead, if that is more.

        Args:
            cpu_s: Of each process that lives now.
            all_cpu_s: Of these, and of those that ended.
        """
        of_the_living = sum(max(0.0, now - self._cpu_s.get(pid, 0.0)) for pid, now in cpu_s.items())
        burned_s = max(of_the_living, all_cpu_s - self._all_cpu_s)
        self._cpu_s, self._all_cpu_s = cpu_s, all_cpu_s
        self._block_cpu_s += burned_s
        return burned_s

    def _look_through(self, folder: str) -> None:
        worked_s = time.process_time()
        found = contents(folder, self._max_scratch_files)
        unlinked = sum(self._proc.unlinked_bytes(pid, folder) for pid in self._pids())
        self._in_scratch = Contents(found.size_bytes + unlinked, found.files)
        cost_s = time.process_time() - worked_s
        self._scratch_due = time.monotonic() + max(SCRATCH_S, cost_s / MOST_OF_A_CPU)

    def _look_in(self, interval_s: float) -> None:
        self._interval_s = interval_s
        self._due = time.monotonic() + interval_s


def _cpu_s_of_the_dead() -> float:
    """CPU seconds of the children that init took leave of, orphans among them, and of theirs."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime
