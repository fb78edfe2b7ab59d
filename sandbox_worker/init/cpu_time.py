"""CPU time of a REPL's processes: those that live, those that were waited for, and those that are never waited for.

The kernel adds the time of a process that ended to its parent's, when the parent waits for it. Below a parent that
ignores SIGCHLD it is added nowhere. Such a process is seen as long as it lives; what it used is estimated from how
often it was seen running, as a sampling profiler does.
"""

import os
import resource
from collections.abc import Sequence

from sandbox_worker.init.procfs import Seen

YOUNG_LOOKS = 5
"""How often a process is seen until what /proc says of it is precise enough: the kernel counts in 10 ms."""


SAMPLED_FOR_EACH_HEARD = 4
"""Seconds sampled for each second that the kernel added to parents, up to which the kernel's word counts alone: where
the machine is busy, a process is seen running while it waits for a CPU."""


class CpuTime:
    """Of one REPL.

    Attributes:
        block_s: Used since the block started.
        runs_unheard: Processes that may end without being counted were running at the last look.
    """

    def __init__(self) -> None:
        self._each: dict[int, float] = {}
        self._all_s = 0.0
        self._cpus = len(os.sched_getaffinity(0))
        self._young: dict[int, tuple[int, float]] = {}
        self._living_s = self._dead_s = self._unheard_s = 0.0
        self.runs_unheard = False

    def repl_started(self, pid: int) -> None:
        """A fresh REPL is to be looked at. It has run no code but ours."""
        self._each = {pid: 0.0}
        self._young.clear()
        self._all_s = _of_the_dead_s()
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
        all_s = _of_the_dead_s() + sum(one.times.cpu_s + one.times.childrens_cpu_s for one in seen)
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


def _of_the_dead_s() -> float:
    """CPU seconds of the children that init took leave of, orphans among them, and of theirs."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime
