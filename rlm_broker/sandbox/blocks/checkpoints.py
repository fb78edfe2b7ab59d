"""The checkpoints of one REPL, as the orchestrator keeps account of them: when one is worth its cost, and what it has.

A checkpoint is made before a block if more would be lost by a kill than `WORTH` times what the checkpoint costs. What
would be lost is counted in seconds of blocks, waits for replies included. Money is not counted apart: a call that costs
money takes longer than most checkpoints do. So checkpoints take a twentieth of a run's time at most, and what a kill
can lose is cheap to do again.
"""

import math
from collections.abc import Collection
from types import MappingProxyType
from typing import Final

from rlm_broker.broker.transport.provisions import Provisions
from rlm_broker.errors import ConfigurationError
from sandbox_worker.wire.control import IN_FAMILY, Checkpointed

WORTH = 20
"""Ratio of the seconds that a kill would lose to those that a checkpoint costs, above which one is made."""
LEAST_COST_S = 0.025
"""Least seconds that a checkpoint counts, and those of the first one. On a quiet machine it takes a tenth of that. So a
REPL of short blocks makes none, and a kill loses half a second of work that is cheap to do again."""
NONE: Final = MappingProxyType(
    {
        "auto": 'none was worth its cost yet, and checkpoint="each" makes one before each block',
        "each": "no block has made one that is left",
        "never": "its isolation or its limit `checkpoint` permits none",
    }
)
"""Reason why a REPL has no checkpoint, by `ReplLimits.checkpoint`."""
AFTER_REFUSAL = 2
"""Ratio of the seconds that a kill would lose to those at the last refusal, above which init is asked again."""


class Point:
    """One checkpoint, and what the REPL was given since.

    Attributes:
        number: Its number for init.
        work_s: Seconds of all blocks whose results it has.
        blocks: Number of these blocks.
        provisions: Provisions since.
        contexts: Names of contexts that were added since.
    """

    def __init__(self, number: int, work_s: float, blocks: int) -> None:
        self.number = number
        self.work_s = work_s
        self.blocks = blocks
        self.provisions = Provisions()
        self.contexts: list[str] = []


class Checkpoints:
    """Account of the checkpoints of one REPL.

    Args:
        mode: As `ReplLimits.checkpoint`.
        kept: As `ReplLimits.keep_checkpoints`.

    Attributes:
        problem: Reason why there is none, as one clause; None if there is one, or none was due.
        blocks: Number of ended blocks whose variables the REPL has.
    """

    def __init__(self, mode: str, kept: int = 1) -> None:
        self.problem: str | None = None
        self._mode, self._kept = mode, kept
        self._numbers = 0
        self._cost_s = LEAST_COST_S
        self._refused_at_s = 0.0
        self._work_s = 0.0
        self.blocks = 0
        self._asked: Point | None = None
        self._made: list[Point] = []  # the oldest one first

    @property
    def is_due(self) -> bool:
        """Whether one is to be made before the next block."""
        if self._mode != "auto":
            return self._mode == "each"
        last = self._asked or (self._made[-1] if self._made else None)
        lost_s = self._work_s - (0.0 if last is None else last.work_s)
        return lost_s > max(WORTH * self._cost_s, AFTER_REFUSAL * self._refused_at_s)

    def cannot_be(self) -> None:
        """Record that the sandbox can make none. Only who wants one before each block is told so after a kill."""
        if self._mode == "auto":
            self._mode = "never"

    def next_number(self) -> int:
        """Return the number of the next checkpoint."""
        self._numbers += 1
        return self._numbers

    def asked(self, number: int) -> None:
        """Record that the block which begins now makes the checkpoint of that number."""
        self.problem, self._refused_at_s = None, 0.0
        self._asked = Point(number, self._work_s, self.blocks)

    def refused(self, problem: str) -> None:
        """Record that init refuses one now."""
        self.problem, self._refused_at_s = problem, self._work_s

    def made(self, said: Checkpointed) -> None:
        """Record that the REPL has made the one that it was asked for."""
        if self._asked is not None and self._asked.number == said.number:
            self._made, self._asked = [*self._made, self._asked][-self._kept :], None
            self._cost_s = max(LEAST_COST_S, said.cost_s if math.isfinite(said.cost_s) else 0.0)

    def given_up(self) -> None:
        """Record that init gives up all, since the REPL is forked; or has none of a fork."""
        self._asked, self._made, self.problem = None, [], IN_FAMILY

    def block_ended(self, seconds: float) -> None:
        """Count a block whose variables a kill would lose."""
        self._work_s += seconds
        self.blocks += 1

    def provided(self, more: Provisions, context: str | None = None) -> None:
        """Record provisions, of which a checkpoint does not know."""
        for point in (self._asked, *self._made):
            if point is not None:
                point.provisions.add(more)
                if context is not None:
                    point.contexts.append(context)

    def spared(self, numbers: Collection[int]) -> None:
        """Record that the REPL was killed, and which checkpoints init has spared. `problem` says why one is missing."""
        living = [each for each in self._made if each.number in numbers]
        if living != self._made:
            self.problem = "it had ended before, or its memory was needed"
        elif not living and self._asked is not None:
            self.problem = "the REPL could not make it"
        self._made = living

    def point(self, back: int = 1) -> Point | None:
        """Return the checkpoint that lies so many back, if init has it."""
        return self._made[-back] if len(self._made) >= back else None

    def require(self, back: int) -> None:
        """Raise ConfigurationError unless there are so many checkpoints."""
        if type(back) is not int or back < 1:
            raise ConfigurationError(f"k = {back!r}: give a number of checkpoints, from 1 on")
        if self._made and back > len(self._made):
            advice = f": raise keep_checkpoints = {self._kept} in its limits" if back > self._kept else ""
            raise ConfigurationError(f"k = {back}, and the REPL has made {len(self._made)} checkpoints{advice}")
        if not self._made:
            raise ConfigurationError(f"there is no checkpoint to go back to: {self.problem or NONE[self._mode]}")

    def rolled_back(self, point: Point) -> None:
        """Record that the REPL goes on from there."""
        self._work_s, self.blocks = point.work_s, point.blocks
        self._asked = self.problem = None
        self._made = self._made[: self._made.index(point)]

    def all_is_lost(self) -> None:
        """Record that a fresh REPL takes the place of the last."""
        self._work_s, self.blocks, self._refused_at_s, self._cost_s = 0.0, 0, 0.0, LEAST_COST_S
        self._asked = self.problem = None
        self._made = []
