"""The watch: how much memory, CPU time and scratch space a worker's processes use, sampled by init from /proc.

Theory of operation
-------------------
An ordinary user cannot create control groups, and RLIMIT_AS and RLIMIT_CPU bound one process, not a family. So init
samples all processes of the worker and compares the sums with the limits. Where the orchestrator could make a memory
control group, the group is exact and the watch is the second line.

The watch is approximate. While a block runs it samples every 10 ms or so; a writer at full speed is some megabytes past
its limit when a sample notices it. Three decisions keep that gap small and the cost low:

- The interval follows the load. It starts at `FASTEST_S` with each block, stays there while CPU time or memory grows,
  and doubles while the REPL sleeps, up to `SLOWEST_S`. A single process may sleep that long unseen, because RLIMIT_AS
  bounds it; several processes are sampled at `SLOWEST_OF_SEVERAL_S`, because each of them could grow that much.
- The watch spends at most a share of one CPU (`MOST_OF_A_CPU`). With many processes the samples become rarer.
- The moment of a sample is random within its interval. Otherwise code could allocate right after a sample and free
  right before the next one.

Memory that /proc does not attribute to a process could be hidden from the samples: memfds, shared anonymous mappings,
pages in flight to a socket. seccomp denies all three. Processes that live shorter than an interval are counted through
their parents' accumulated CPU time (`cpu_time`). At `strict` the scratch folder is a tmpfs with a size of its own; a
scratch folder on the host's file system is walked every `SCRATCH_S` at most.
"""

import os
import time
from collections.abc import Callable
from dataclasses import dataclass, replace

from sandbox_worker.init.cpu_time import CpuTimes
from sandbox_worker.init.memory import Memory
from sandbox_worker.init.procfs import Proc, Seen
from sandbox_worker.init.scratch import Contents, contents
from sandbox_worker.wire.layers import Layer

WATCH: Layer = "memory and CPU watch (approximate)"
GROUP: Layer = "memory control group"
"""Exact bound of memory, beside the watch, where the orchestrator could make a control group."""
FASTEST_S = 0.01
"""Seconds between two samples while CPU time or memory grows."""
LEAST_OF_INTERVAL = 0.25
"""Smallest share of an interval that is waited. A random part, up to a whole interval, is added, so that no process
can predict a sample."""
SLOWEST_S = 0.5
"""Seconds between two samples of a single sleeping process, which RLIMIT_AS bounds between samples."""
SLOWEST_OF_SEVERAL_S = 0.02
"""Seconds between two samples of several sleeping processes, each of which could grow up to RLIMIT_AS."""
LITTLE_CPU_S = 0.005
"""CPU seconds between two samples below which a worker counts as sleeping: half a tick of the kernel (10 ms)."""
SCRATCH_S = 0.1
"""Least seconds between two walks through the scratch folder. A walk costs 5 microseconds a file."""
MOST_OF_A_CPU = 0.05
"""Largest share of one CPU that sampling takes. A sample costs 40 microseconds a process."""
MOST_WHILE_GROWING = 0.5
"""The same share while memory is at a new peak, or after an exact measurement. A sample then also waits for the
kernel's lock on the memory, and a late sample would let memory grow further."""


@dataclass(frozen=True, slots=True)
class WorkerUsage:
    """Resources of all processes of a worker together.

    Attributes:
        memory_bytes: Private memory, swap and page tables.
        cpu_s: CPU seconds since the start of the block.
        processes: Number of living processes.
        threads: Number of their threads.
        scratch_bytes: Size of the scratch folder; 0 if it is not watched.
        scratch_files: Number of its files; 0 if it is not watched.
    """

    memory_bytes: int = 0
    cpu_s: float = 0.0
    processes: int = 0
    threads: int = 0
    scratch_bytes: int = 0
    scratch_files: int = 0


NOTHING = WorkerUsage()
EMPTY = Contents(0, 0)


class Watch:
    """Samples a worker's processes, often while they work and rarely while they sleep.

    Args:
        proc: The /proc in which the processes are seen.
        memory_bytes: The limit of memory. Near it, memory is measured exactly.
        max_processes: The limit of processes. If there are more, only their number is read.
        pids: Lists the processes. None if the REPL cannot start any.
        scratch: The scratch folder to walk; None if it has a size of its own.
        max_scratch_files: A walk stops at this number of files.
        is_loose: Whether RLIMIT_AS leaves a single process more room than `memory_bytes`.

    Attributes:
        pids: Lists the processes that are sampled.
        cpu_times: CPU time of the block and of each program.
    """

    def __init__(
        self,
        proc: Proc,
        memory_bytes: int,
        max_processes: int,
        pids: Callable[[], list[int]] | None = None,
        scratch: str | None = None,
        max_scratch_files: int = 0,
        is_loose: bool = False,
    ) -> None:
        self._proc = proc
        self.pids = pids or (lambda: [self._repl_pid])
        self._scratch = None if scratch is None else os.path.realpath(scratch)
        self._max_scratch_files = max_scratch_files
        self._slowest_alone_s = SLOWEST_OF_SEVERAL_S if is_loose else SLOWEST_S
        self._max_processes = max_processes
        self._repl_pid = 0
        self._memory = Memory(proc, memory_bytes)
        self.cpu_times = CpuTimes(proc.session)
        self._measuring_s = 0.0
        self._most_bytes = 0
        self._looked = time.monotonic()
        self._last = NOTHING
        self._interval_s = SLOWEST_S
        self._due = 0.0
        self._in_scratch = EMPTY
        self._scratch_due = 0.0

    def repl_started(self, pid: int, inherited_bytes: int) -> None:
        """Sample a new REPL from here on.

        Args:
            pid: The REPL's process.
            inherited_bytes: Memory that the REPL shares with init from the start, such as a context made of objects.
                It does not count as the REPL's own.
        """
        self._repl_pid = pid
        self._memory.repl_started(inherited_bytes)
        self.cpu_times.block.started(pid)

    def block_started(self) -> None:
        """Count the block's CPU time from here, and sample at the fastest rate."""
        self.cpu_times.block.block_started()
        self._measuring_s = self._memory.measuring_s
        self._look_closely()

    def program_started(self, session: int) -> None:
        """Count the CPU time of a program's session apart, and sample at the fastest rate."""
        self.cpu_times.program_started(session)
        self._look_closely()

    def _look_closely(self) -> None:
        self._most_bytes = 0
        self._looked = time.monotonic()
        self._interval_s = FASTEST_S
        self._due = self._looked + FASTEST_S  # without a random part: most blocks have ended by then

    def wait_s(self) -> float:
        """Return the seconds until the next sample is due."""
        return max(0.0, self._due - time.monotonic())

    def look(self) -> WorkerUsage:
        """Take a sample. If there are more processes than `max_processes`, only their number is new in it."""
        worked_s = time.process_time()
        pids = self.pids()
        if len(pids) > self._max_processes:  # a fork bomb grows faster than its processes can be read
            return replace(self._last, processes=len(pids), threads=len(pids))
        seen = [each for pid in pids if (each := self._seen(pid)) is not None]
        now = time.monotonic()
        burned_s = self.cpu_times.look(seen, now - self._looked)
        self._looked = now
        measured_s = self._memory.measuring_s
        memory_bytes = self._memory.used_bytes(seen)
        had_to_measure = self._memory.measuring_s > measured_s
        if self._scratch is not None and time.monotonic() >= self._scratch_due:
            self._look_through(self._scratch, seen)
        usage = WorkerUsage(
            memory_bytes,
            self.cpu_times.block.block_s + self._memory.measuring_s - self._measuring_s,
            len(seen),
            sum(each.status.threads for each in seen),
            self._in_scratch.size_bytes,
            self._in_scratch.files,
        )
        works = burned_s >= LITTLE_CPU_S or self.cpu_times.runs_unheard or memory_bytes > self._last.memory_bytes
        slowest_s = self._slowest_alone_s if len(seen) <= 1 else SLOWEST_OF_SEVERAL_S
        cost_s = time.process_time() - worked_s  # CPU time: a wait for the kernel must not delay the next sample
        share = MOST_WHILE_GROWING if had_to_measure or memory_bytes > self._most_bytes else MOST_OF_A_CPU
        self._most_bytes = max(self._most_bytes, memory_bytes)
        self._look_in(max(FASTEST_S if works else min(2 * self._interval_s, slowest_s), cost_s / share))
        self._last = usage
        return usage

    def _seen(self, pid: int) -> Seen | None:
        """Return one process as it is now, or None if it has ended."""
        status = self._proc.status(pid)
        return None if status is None else Seen(pid, status, self._proc.times(pid))

    def _look_through(self, folder: str, seen: list[Seen]) -> None:
        worked_s = time.process_time()
        found = contents(folder, self._max_scratch_files)
        unlinked = sum(self._proc.unlinked_bytes(each.status.speaker, folder) for each in seen)
        self._in_scratch = Contents(found.size_bytes + unlinked, found.files)
        cost_s = time.process_time() - worked_s
        self._scratch_due = time.monotonic() + max(SCRATCH_S, cost_s / MOST_OF_A_CPU)

    def _look_in(self, interval_s: float) -> None:
        self._interval_s = interval_s
        drawn = time.monotonic_ns() // 64 % 1024 / 1024  # random: the clock's digits below 0.1 ms
        self._due = time.monotonic() + interval_s * (LEAST_OF_INTERVAL + drawn)
