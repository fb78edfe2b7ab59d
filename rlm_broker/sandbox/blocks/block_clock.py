"""The time left to a block. Callers pass the present time in: the clock has none of its own."""

from typing import Literal

Verdict = Literal["run", "interrupt", "kill"]


class BlockClock:
    """Decides when a block is interrupted and when its REPL is killed.

    Compute time stands still while the REPL waits for at least one reply: a slow provider must not kill a healthy REPL.
    Other threads of the REPL may compute meanwhile. They are bounded by CPU time: as much as all CPUs have within the
    limit. CPU time is sampled, and misses processes that live for a moment only. So wall time has a limit, too.

    Args:
        limit_s: Compute time in seconds until the interrupt.
        wall_s: Wall time in seconds until the interrupt, waiting for replies included.
        grace_s: Wall time in seconds from the interrupt to the kill. Queries do not extend it.
        now: Present time in seconds of a monotonic clock, as in all methods. The block begins now.
        cpus: CPUs for all threads and processes of the REPL.

    Attributes:
        limit: Name of the limit that was reached; None before.
        over: The reason of the interrupt, as the rest of a sentence about the block; None before.
    """

    def __init__(self, limit_s: float, wall_s: float, grace_s: float, now: float, cpus: int) -> None:
        self.limit: str | None = None
        self.over: str | None = None
        self._limit_s = limit_s
        self._wall_s = wall_s
        self._ends = now + wall_s
        self._left_s = limit_s
        self._left_cpu_s = limit_s * cpus
        self._grace_s = grace_s
        self._running_since = now
        self._open_queries = 0
        self._interrupted_at: float | None = None
        self._wish: str | None = None

    def query_opened(self, now: float) -> None:
        """Note that the REPL waits for one more reply. With the first, compute time stands still."""
        if self._open_queries == 0:
            self._left_s -= now - self._running_since
        self._open_queries += 1

    def query_closed(self, now: float) -> None:
        """Note that a query was answered. With the last answer, compute time goes on."""
        self._open_queries -= 1
        if self._open_queries == 0:
            self._running_since = now

    def used_s(self, now: float) -> float:
        """Return the seconds that the REPL computed, while it waited for no reply."""
        running_s = 0.0 if self._open_queries else now - self._running_since
        return self._limit_s - self._left_s + running_s

    def burned(self, cpu_s: float) -> None:
        """Note that the REPL used `cpu_s` more seconds of CPU time, waiting or not."""
        self._left_cpu_s -= cpu_s

    def wish(self, over: str) -> None:
        """Have the block interrupted with the next verdict. `over` is the reason, as the rest of a sentence about the
        block."""
        self._wish = over

    def verdict(self, now: float) -> Verdict:
        """Return what to do now. "interrupt" is returned once."""
        if self._interrupted_at is not None:
            return "kill" if now - self._interrupted_at >= self._grace_s else "run"
        if self._wish is not None:
            self.over = self._wish
        elif now >= self._ends:
            self.limit = "block_wall_timeout_s"
            self.over = f"took longer than block_wall_timeout_s = {self._wall_s:g} s, waiting for replies included"
        elif self._left(now) <= 0:
            self.limit = "block_timeout_s"
            self.over = f"ran longer than block_timeout_s = {self._limit_s:g} s, waiting for replies not counted"
        elif self._left_cpu_s <= 0:
            self.limit = "block_timeout_s"
            self.over = f"used more CPU time than all CPUs have within block_timeout_s = {self._limit_s:g} s"
        else:
            return "run"
        self._interrupted_at = now
        return "interrupt"

    def wait_s(self, now: float) -> float:
        """Return the seconds until time alone can change the verdict."""
        if self._interrupted_at is not None:
            return max(0.0, self._interrupted_at + self._grace_s - now)
        if self._left_cpu_s <= 0 or self._wish is not None:
            return 0.0
        until_wall_s = max(0.0, self._ends - now)
        return until_wall_s if self._open_queries else min(until_wall_s, max(0.0, self._left(now)))

    def _left(self, now: float) -> float:
        return self._left_s if self._open_queries else self._left_s - (now - self._running_since)
