"""What a REPL and everything it started use, as init sees it in /proc: where no cgroup counts, this is what holds.

Approximate by nature: memory (`memory`) is read every few milliseconds while a block runs, so that a writer at full
speed is some megabytes past its limit when it is seen. What these numbers do not show (memfds, shared anonymous
mappings, pages in flight to a socket) is denied by seccomp. A scratch folder that is a file system has a size of its
own; one that is a folder of the host's is looked through now and then. CPU time is in `cpu_time`.
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
"""What holds memory exactly, beside the watch, where the orchestrator has made one."""
FASTEST_S = 0.01
"""Seconds between two looks while something works."""
LEAST_OF_INTERVAL = 0.25
"""Share of an interval that is waited at least; up to all of it is drawn on top, so that no process can know when it is
not looked at."""
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
"""While there is more memory in use than ever before: then each look also waits for the kernel, and time is short. The
same after a look that had to measure, which is the REPL's time."""


@dataclass(frozen=True, slots=True)
class WorkerUsage:
    """Of all processes together. `cpu_s` counts from the start of the block; `scratch_*` only where it is watched."""

    memory_bytes: int = 0
    cpu_s: float = 0.0
    processes: int = 0
    threads: int = 0
    scratch_bytes: int = 0
    scratch_files: int = 0


NOTHING = WorkerUsage()
EMPTY = Contents(0, 0)


class Watch:
    """Looks at a worker's processes, often while they work and rarely while they sleep.

    Args:
        proc: Where they are seen.
        pids: Those of the REPL; None where it can have no process but its own.
        memory_bytes: The limit, near which it looks more closely.
        max_processes: The limit, beyond which it looks no further.
        scratch: The folder to look through, or None.
        max_scratch_files: It is not looked through beyond this number.
        is_loose: Whether one process alone is not bounded by its address space either.

    Attributes:
        pids: Lists those that it looks at.
        cpu_times: What they used.
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
        """A fresh REPL is to be looked at from here on.

        Args:
            inherited_bytes: What it shares with init from the start (a context made of objects) is not its own.
        """
        self._repl_pid = pid
        self._memory.repl_started(inherited_bytes)
        self.cpu_times.block.started(pid)

    def block_started(self) -> None:
        """Count CPU time from here, and look closely."""
        self.cpu_times.block.block_started()
        self._measuring_s = self._memory.measuring_s
        self._look_closely()

    def program_started(self, session: int) -> None:
        """Count the CPU time of a session apart, and look closely."""
        self.cpu_times.program_started(session)
        self._look_closely()

    def _look_closely(self) -> None:
        self._most_bytes = 0
        self._looked = time.monotonic()
        self._interval_s = FASTEST_S
        self._due = self._looked + FASTEST_S  # not drawn: most blocks have ended by then

    def wait_s(self) -> float:
        """Seconds until the next look."""
        return max(0.0, self._due - time.monotonic())

    def look(self) -> WorkerUsage:
        """What is used now. Of more processes than there may be, nothing is known but how many they are."""
        worked_s = time.process_time()
        pids = self.pids()
        if len(pids) > self._max_processes:  # they grow faster than they can be read about
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
        cost_s = time.process_time() - worked_s  # not the clock's: processes that keep us waiting are looked at sooner
        share = MOST_WHILE_GROWING if had_to_measure or memory_bytes > self._most_bytes else MOST_OF_A_CPU
        self._most_bytes = max(self._most_bytes, memory_bytes)
        self._look_in(max(FASTEST_S if works else min(2 * self._interval_s, slowest_s), cost_s / share))
        self._last = usage
        return usage

    def _seen(self, pid: int) -> Seen | None:
        """None if it has ended."""
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
        drawn = time.monotonic_ns() // 64 % 1024 / 1024  # what the clock says below a tenth of a millisecond
        self._due = time.monotonic() + interval_s * (LEAST_OF_INTERVAL + drawn)
