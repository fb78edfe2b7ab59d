"""The watch: how much memory, CPU time and scratch space a worker's processes use, sampled by init from /proc.

Theory of operation
-------------------
An ordinary user cannot create control groups, and RLIMIT_DATA and RLIMIT_CPU bound one process, not a family. So init
samples all processes of the worker and compares the sums with the limits. Where the orchestrator could make a memory
control group, the group is exact and the watch is the second line.

The watch is approximate. While a block runs it samples every 10 ms or so; a writer at full speed is some megabytes past
its limit when a sample notices it. Three decisions keep that gap small and the cost low:

- The interval follows the load. It starts at `FASTEST_S` with each block, stays there while CPU time or memory grows,
  and doubles while the REPL sleeps, up to `SLOWEST_S`. A single process may sleep that long unseen, because RLIMIT_DATA
  bounds what it writes, and RLIMIT_AS what it hides by write protection. Several processes are sampled at
  `SLOWEST_OF_SEVERAL_S`, because each of them could grow that much.
- The watch spends at most a share of one CPU (`MOST_OF_A_CPU`). With many processes the samples become rarer.
- The moment of a sample is random within its interval. Otherwise code could allocate right after a sample and free
  right before the next one.

Memory that /proc does not attribute to a process could be hidden from the samples: memfds, shared anonymous mappings,
pages in flight to a socket. seccomp denies all three. Processes that live shorter than an interval are counted through
their parents' accumulated CPU time (`CpuTimes`). At `strict` the scratch folder is a tmpfs with a size of its own; a
scratch folder on the host's file system is walked every `SCRATCH_S` at most.

CPU time
--------
CPU time of processes counts while they live, when they ended and were waited for, and when they never are.

When a parent waits for an ended child, the kernel adds the child's time to the parent's (getrusage(2),
RUSAGE_CHILDREN). If the parent ignores SIGCHLD, the kernel discards the child, and its time is lost. So a process that
is young, and could vanish that way, is sampled: each sample that finds it running counts for the time since the sample
before, as in a sampling profiler. If it vanishes and its time arrives at no parent, the sampled time counts.
"""

import os
import resource
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace

from sandbox_worker.init.files import Contents, contents
from sandbox_worker.init.memory import Memory
from sandbox_worker.init.procfs import Proc, Seen
from sandbox_worker.wire.level import Layer

YOUNG_LOOKS = 5
"""Samples after which the time in /proc is precise enough for a process: the kernel counts in ticks of 10 ms."""
SAMPLED_FOR_EACH_HEARD = 4
"""Largest ratio of sampled seconds to seconds that arrived at parents for which the kernel's figure alone counts. On a
busy machine samples overcount: a process waiting for a CPU is also in state R."""


class CpuTime:
    """CPU time of one process and its descendants.

    Args:
        dead_s: Returns the CPU seconds of descendants that init has waited for, and of their own children.

    Attributes:
        block_s: CPU seconds since the start of the block.
        runs_unheard: Whether young processes, which may end uncounted, were running in the last sample.
    """

    def __init__(self, dead_s: Callable[[], float]) -> None:
        self._of_the_dead_s = dead_s
        self._each: dict[int, float] = {}
        self._all_s = 0.0
        self._cpus = len(os.sched_getaffinity(0))
        self._young: dict[int, tuple[int, float]] = {}
        self._living_s = self._dead_s = self._unheard_s = 0.0
        self.runs_unheard = False

    def started(self, pid: int) -> None:
        """Count a new process, which has run no code but ours so far."""
        self._each = {pid: 0.0}
        self._young.clear()
        self._all_s = self._of_the_dead_s()
        self.block_started()

    def block_started(self) -> None:
        """Count `block_s` from here."""
        self._living_s = self._dead_s = self._unheard_s = 0.0

    @property
    def block_s(self) -> float:
        is_heard = self._dead_s * SAMPLED_FOR_EACH_HEARD >= self._unheard_s
        return self._living_s + (self._dead_s if is_heard else self._unheard_s)

    def look(self, seen: Sequence[Seen], since_s: float) -> float:
        """Count one sample.

        Args:
            seen: All living processes.
            since_s: Seconds since the last sample.

        Returns:
            CPU seconds since the last sample, of living processes and of ended ones waited for.
        """
        each = {one.pid: one.times.cpu_s for one in seen}
        all_s = self._of_the_dead_s() + sum(one.times.cpu_s + one.times.childrens_cpu_s for one in seen)
        living_s = sum(max(0.0, now_s - self._each.get(pid, 0.0)) for pid, now_s in each.items())
        dead_s = max(0.0, all_s - self._all_s - living_s)
        self._sample(seen, since_s)
        self._each, self._all_s = each, all_s
        self._living_s += living_s
        self._dead_s += dead_s
        return living_s + dead_s

    def _sample(self, seen: Sequence[Seen], since_s: float) -> None:
        """Count the time since the last sample for each young process that runs, shared out over the CPUs."""
        young = [one for one in seen if one.pid in self._young or one.pid not in self._each]
        running = {one.pid: one.status.threads for one in young if one.times.runs or one.status.threads > 1}
        share_s = since_s * min(1.0, self._cpus / max(1, sum(running.values())))
        counted = {}
        for one in young:
            looks, sampled_s = self._young.pop(one.pid, (0, 0.0))
            if looks < YOUNG_LOOKS:
                counted[one.pid] = looks + 1, sampled_s + share_s * running.get(one.pid, 0)
        for pid, (_, sampled_s) in self._young.items():  # young processes that have ended
            self._unheard_s += max(0.0, sampled_s - self._each.get(pid, 0.0))
        self._young = counted
        self.runs_unheard = bool(running)


class CpuTimes:
    """CPU time of a worker: of the REPL's block, and apart from it of each program beside it, or each REPL of a family.

    Args:
        session_of: Returns the session of a process.

    Attributes:
        owners: Returns pid → pid of its keeper, for the processes of a family. A keeper stands for a session then.
    """

    def __init__(self, session_of: Callable[[int], int]) -> None:
        self.block = CpuTime(lambda: _of_the_dead_s() - self._dead_programs_s)
        self.owners: Callable[[Sequence[Seen]], Mapping[int, int]] = lambda _seen: {}
        self._session_of = session_of
        self._programs: dict[int, CpuTime] = {}
        self._dead_s: dict[int, float] = {}
        self._dead_programs_s = 0.0

    def program_started(self, session: int) -> None:
        """Count the processes of a session apart."""
        self._dead_s[session] = 0.0
        self._programs[session] = CpuTime(lambda: self._dead_s[session])
        self._programs[session].started(session)

    def process_ended(self, session: int, used_s: float, *, is_launcher: bool = False) -> None:
        """Record that init has waited for a process, which used `used_s` together with its waited-for children.

        The children of a launcher were programs that have ended: their time counts neither for the one that runs, nor
        for the block.
        """
        if session in self._programs and not is_launcher:
            self._dead_s[session] += used_s
        if session in self._programs or is_launcher:
            self._dead_programs_s += used_s

    def only(self, sessions: Collection[int]) -> None:
        """Forget all programs outside of `sessions`."""
        for session in self._programs.keys() - set(sessions):
            del self._programs[session], self._dead_s[session]

    def of_program(self, session: int) -> float:
        """Return the CPU seconds of a program, from its start to the last sample."""
        return self._programs[session].block_s

    def block_started(self, session: int) -> None:
        """Count the CPU seconds of `of_program` from here."""
        if session in self._programs:
            self._programs[session].block_started()

    @property
    def runs_unheard(self) -> bool:
        """Whether young processes, which may end uncounted, were running in the last sample."""
        return self.block.runs_unheard or any(each.runs_unheard for each in self._programs.values())

    def look(self, seen: Sequence[Seen], since_s: float) -> float:
        """Count one sample of all living processes. See `CpuTime.look`."""
        if not self._programs:
            return self.block.look(seen, since_s)
        of_block: list[Seen] = []
        of_programs: dict[int, list[Seen]] = {session: [] for session in self._programs}
        owners = self.owners(seen)
        for one in seen:
            of_programs.get(owners.get(one.pid) or self._session_of(one.pid), of_block).append(one)
        burned_s = sum(self._programs[session].look(those, since_s) for session, those in of_programs.items())
        return burned_s + self.block.look(of_block, since_s)


def _of_the_dead_s() -> float:
    """Return the CPU seconds of the children that init has waited for, orphans included, and of their children."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


WATCH: Layer = "memory and CPU watch (approximate)"
GROUP: Layer = "memory control group"
"""Exact bound of memory, beside the watch, where the orchestrator could make a control group."""
FASTEST_S = 0.01
"""Seconds between two samples while CPU time or memory grows."""
LEAST_OF_INTERVAL = 0.25
"""Smallest share of an interval that is waited. A random part, up to a whole interval, is added, so that no process
can predict a sample."""
SLOWEST_S = 0.5
"""Seconds between two samples of a single sleeping process, which RLIMIT_DATA bounds between samples."""
SLOWEST_OF_SEVERAL_S = 0.02
"""Seconds between two samples of several sleeping processes, when each could grow up to RLIMIT_DATA."""
LITTLE_CPU_S = 0.005
"""CPU seconds between two samples below which a worker counts as sleeping: half a tick of the kernel (10 ms)."""
SCRATCH_S = 0.1
"""Least seconds between two walks through the scratch folder. A walk costs 5 microseconds a file."""
WORTH_SAYING_S = 0.5
"""CPU seconds between two reports to the orchestrator."""
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
        is_loose: Whether RLIMIT_DATA leaves a single process more room than `memory_bytes`.

    Attributes:
        pids: Lists the processes that are sampled.
        cpu_times: CPU time of the block and of each program.
        memory: Memory of all processes.
        seen, seen_before: Processes in the last sample, and in the one before.
        uncounted: Number of frozen processes, of one thread each. They count by their memory and CPU time alone.
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
        self.memory = Memory(proc, memory_bytes)
        self.seen: Sequence[Seen] = ()
        self.seen_before: Sequence[Seen] = ()
        self.cpu_times = CpuTimes(proc.session)
        self._measuring_s = 0.0
        self._most_bytes = 0
        self._looked = time.monotonic()
        self._last = NOTHING
        self._interval_s = SLOWEST_S
        self._due = 0.0
        self._in_scratch = EMPTY
        self._scratch_due = 0.0
        self.uncounted = 0

    def repl_started(self, pid: int, inherited_bytes: int) -> None:
        """Sample a new REPL from here on.

        Args:
            pid: The REPL's process.
            inherited_bytes: Memory that the REPL shares with init from the start, such as a context made of objects.
                It does not count as the REPL's own.
        """
        self._repl_pid = pid
        self.memory.repl_started(inherited_bytes)
        self.cpu_times.block.started(pid)

    def block_started(self, keeper: int = 0) -> None:
        """Count the block's CPU time from here, and sample at the fastest rate. In a family, it is that of a keeper."""
        if keeper:
            self.cpu_times.block_started(keeper)
        else:
            self.cpu_times.block.block_started()
        self._measuring_s = self.memory.measuring_s
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
        count = len(pids) - self.uncounted
        if count > self._max_processes:  # a fork bomb grows faster than its processes can be read
            return replace(self._last, processes=count, threads=count)
        self.seen_before = self.seen
        self.seen = seen = [each for pid in pids if (each := self._seen(pid)) is not None]
        now = time.monotonic()
        burned_s = self.cpu_times.look(seen, now - self._looked)
        self._looked = now
        measured_s = self.memory.measuring_s
        memory_bytes = self.memory.used_bytes(seen)
        had_to_measure = self.memory.measuring_s > measured_s
        if self._scratch is not None and time.monotonic() >= self._scratch_due:
            self._look_through(self._scratch, seen)
        usage = WorkerUsage(
            memory_bytes,
            self.cpu_times.block.block_s + self.memory.measuring_s - self._measuring_s,
            max(0, len(seen) - self.uncounted),
            max(0, sum(each.status.threads for each in seen) - self.uncounted),
            self._in_scratch.size_bytes,
            self._in_scratch.files,
        )
        works = burned_s >= LITTLE_CPU_S or self.cpu_times.runs_unheard or memory_bytes > self._last.memory_bytes
        slowest_s = self._slowest_alone_s if len(seen) - self.uncounted <= 1 else SLOWEST_OF_SEVERAL_S
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
