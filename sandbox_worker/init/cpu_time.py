"""CPU time of processes: those that live, those that were waited for, and those that are never waited for.

The kernel adds the time of a process that ended to its parent's, when the parent waits for it. Below a parent that
ignores SIGCHLD it is added nowhere. Such a process is seen as long as it lives; what it used is estimated from how
often it was seen running, as a sampling profiler does.
"""

import os
import resource
from collections.abc import Callable, Collection, Sequence

from sandbox_worker.init.procfs import Seen

YOUNG_LOOKS = 5
"""How often a process is seen until what /proc says of it is precise enough: the kernel counts in 10 ms."""


SAMPLED_FOR_EACH_HEARD = 4
"""Seconds sampled for each second that the kernel added to parents, up to which the kernel's word counts alone: where
the machine is busy, a process is seen running while it waits for a CPU."""


class CpuTime:
    """Of one process and all that it starts.

    Args:
        dead_s: Returns the CPU seconds of those of them that init took leave of, and of theirs.

    Attributes:
        block_s: Used since the block started.
        runs_unheard: Processes that may end without being counted were running at the last look.
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
        """A fresh process is to be looked at. It has run no code but ours."""
        self._each = {pid: 0.0}
        self._young.clear()
        self._all_s = self._of_the_dead_s()
        self.block_started()

    def block_started(self) -> None:
        """Count from here."""
        self._living_s = self._dead_s = self._unheard_s = 0.0

    @property
    def block_s(self) -> float:
        is_heard = self._dead_s * SAMPLED_FOR_EACH_HEARD >= self._unheard_s
        return self._living_s + (self._dead_s if is_heard else self._unheard_s)

    def look(self, seen: Sequence[Seen], since_s: float) -> float:
        """Count `seen`, which are all that live.

        Args:
            since_s: Seconds since the last look.

        Returns:
            CPU seconds that the living and the dead that were waited for have used since the last look.
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
        """Count for each young process that runs the time since the last look, as far as there are CPUs for it."""
        young = [one for one in seen if one.pid in self._young or one.pid not in self._each]
        running = {one.pid: one.status.threads for one in young if one.times.runs or one.status.threads > 1}
        share_s = since_s * min(1.0, self._cpus / max(1, sum(running.values())))
        counted = {}
        for one in young:
            looks, sampled_s = self._young.pop(one.pid, (0, 0.0))
            if looks < YOUNG_LOOKS:
                counted[one.pid] = looks + 1, sampled_s + share_s * running.get(one.pid, 0)
        for pid, (_, sampled_s) in self._young.items():  # those that have ended
            self._unheard_s += max(0.0, sampled_s - self._each.get(pid, 0.0))
        self._young = counted
        self.runs_unheard = bool(running)


class CpuTimes:
    """Of a worker, counted apart: of the REPL and its block, and of each program beside it.

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
        """Init took leave of a process that has used so much, with those that it had waited for."""
        if session in self._programs:
            self._dead_s[session] += used_s
            self._dead_programs_s += used_s

    def only(self, sessions: Collection[int]) -> None:
        """Forget programs of other sessions."""
        for session in self._programs.keys() - set(sessions):
            del self._programs[session], self._dead_s[session]

    def of_program(self, session: int) -> float:
        """CPU seconds of a program, from its start to the last look."""
        return self._programs[session].block_s

    @property
    def runs_unheard(self) -> bool:
        """Whether processes that may end without being counted were running at the last look."""
        return self.block.runs_unheard or any(each.runs_unheard for each in self._programs.values())

    def look(self, seen: Sequence[Seen], since_s: float) -> float:
        """Count all that live, see `CpuTime.look`."""
        if not self._programs:
            return self.block.look(seen, since_s)
        of_block: list[Seen] = []
        of_programs: dict[int, list[Seen]] = {session: [] for session in self._programs}
        for one in seen:
            of_programs.get(self._session_of(one.pid), of_block).append(one)
        burned_s = sum(self._programs[session].look(those, since_s) for session, those in of_programs.items())
        return burned_s + self.block.look(of_block, since_s)


def _of_the_dead_s() -> float:
    """CPU seconds of the children that init took leave of, orphans among them, and of theirs."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime
