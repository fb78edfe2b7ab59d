"""How long a block may still compute, without a clock of its own: the caller says what time it is."""

from typing import Literal

Verdict = Literal["run", "interrupt", "kill"]


class BlockClock:
    """Decides when a block is interrupted and when its REPL is killed.

    The clock stands while the REPL waits for at least one reply, so that a slow provider does not kill a healthy REPL.
    What its other threads compute meanwhile is bounded by CPU time: as much as all CPUs could do within the limit.

    CPU time of processes that live for a moment only is not seen; so there is a limit of wall time, too.

    Args:
        limit_s: Compute time until SIGINT.
        wall_s: Wall time until SIGINT, waiting included.
        grace_s: Wall time from SIGINT to SIGKILL; queries meanwhile do not extend it.
        cpus: That the REPL's threads and processes can use at the same time.

    Attributes:
        limit: Name of the limit that was reached, once one was.
        over: The same as the rest of a sentence about the block.
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
        """The REPL asked something."""
        if self._open_queries == 0:
            self._left_s -= now - self._running_since
        self._open_queries += 1

    def query_closed(self, now: float) -> None:
        """It was answered; with the last answer the clock goes on."""
        self._open_queries -= 1
        if self._open_queries == 0:
            self._running_since = now

    def burned(self, cpu_s: float) -> None:
        """The REPL used so much CPU time, waiting or not."""
        self._left_cpu_s -= cpu_s

    def wish(self, over: str) -> None:
        """Somebody wants the block interrupted, as at a limit. `over` says so, as the rest of a sentence about it."""
        self._wish = over

    def verdict(self, now: float) -> Verdict:
        """What to do now. "interrupt" is said once."""
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
        """Seconds until the verdict can change by itself."""
        if self._interrupted_at is not None:
            return max(0.0, self._interrupted_at + self._grace_s - now)
        if self._left_cpu_s <= 0 or self._wish is not None:
            return 0.0
        until_wall_s = max(0.0, self._ends - now)
        return until_wall_s if self._open_queries else min(until_wall_s, max(0.0, self._left(now)))

    def _left(self, now: float) -> float:
        return self._left_s if self._open_queries else self._left_s - (now - self._running_since)
