"""Counts the CPU time of processes: living ones, ended ones that were waited for, and ended ones that never are.

When a parent waits for an ended child, the kernel adds the child's time to the parent's (getrusage(2),
RUSAGE_CHILDREN). If the parent ignores SIGCHLD, the kernel discards the child, and its time is lost. So a process that
is young, and could vanish that way, is sampled: each sample that finds it running counts for the time since the sample
before, as in a sampling profiler. If it vanishes and its time arrives at no parent, the sampled time counts.
"""

import os
import resource
from collections.abc import Callable, Collection, Sequence

from sandbox_worker.init.procfs import Seen

YOUNG_LOOKS = 5
"""Samples after which the time in /proc is precise enough for a process: the kernel counts in ticks of 10 ms."""
SAMPLED_FOR_EACH_HEARD = 4
"""Largest ratio of sampled seconds to seconds that arrived at parents for which the kernel's figure alone counts. On a
busy machine samples overcount: a process that waits for a CPU is also in state R."""


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
            CPU seconds since the last sample, of living processes and of ended ones that were waited for.
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
    """CPU time of a worker: of the REPL's block, and apart from it of each program beside it.

    Args:
        session_of: Returns the session of a process.
    """

    def __init__(self, session_of: Callable[[int], int]) -> None:
        self.block = CpuTime(lambda: _of_the_dead_s() - self._dead_programs_s)
        self._session_of = session_of
        self._programs: dict[int, CpuTime] = {}
        self._dead_s: dict[int, float] = {}
        self._dead_programs_s = 0.0

    def program_started(self, session: int) -> None:
        """Count the processes of a session apart."""
        self._dead_s[session] = 0.0
        self._programs[session] = CpuTime(lambda: self._dead_s[session])
        self._programs[session].started(session)

    def process_ended(self, session: int, used_s: float) -> None:
        """Record that init has waited for a process, which used `used_s` together with its waited-for children."""
        if session in self._programs:
            self._dead_s[session] += used_s
            self._dead_programs_s += used_s

    def only(self, sessions: Collection[int]) -> None:
        """Forget all programs but those of `sessions`."""
        for session in self._programs.keys() - set(sessions):
            del self._programs[session], self._dead_s[session]

    def of_program(self, session: int) -> float:
        """Return the CPU seconds of a program, from its start to the last sample."""
        return self._programs[session].block_s

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
        for one in seen:
            of_programs.get(self._session_of(one.pid), of_block).append(one)
        burned_s = sum(self._programs[session].look(those, since_s) for session, those in of_programs.items())
        return burned_s + self.block.look(of_block, since_s)


def _of_the_dead_s() -> float:
    """Return the CPU seconds of the children that init has waited for, orphans included, and of their children."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime
