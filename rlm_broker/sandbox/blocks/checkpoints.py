"""The checkpoints of one REPL, as the orchestrator keeps account of them: when one is worth its cost, and what it has.

A checkpoint is made before a block if more would be lost by a kill than `WORTH` times what the checkpoint costs. What
would be lost is counted in seconds of blocks, waits for replies included. Money is not counted apart: a call that costs
money takes longer than most checkpoints do. So checkpoints take a twentieth of a run's time at most, and what a kill
can lose is cheap to do again.
"""

import math

from rlm_broker.broker.transport.provisions import Provisions
from rlm_broker.broker.transport.session import Wanted
from sandbox_worker.wire.control import Checkpointed

WORTH = 20
"""Ratio of the seconds that a kill would lose to those that a checkpoint costs, above which one is made."""
LEAST_COST_S = 0.025
"""Least seconds that a checkpoint counts, and those of the first one. On a quiet machine it takes a tenth of that. So a
REPL of short blocks makes none, and a kill loses half a second of work that is cheap to do again."""
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

    Attributes:
        problem: Reason why init has refused the last one, as one clause; None if it has not.
    """

    def __init__(self, mode: str) -> None:
        self.problem: str | None = None
        self._mode = mode
        self._numbers = 0
        self._cost_s = LEAST_COST_S
        self._refused_at_s = 0.0
        self._work_s = 0.0
        self._blocks = 0
        self._asked: Point | None = None
        self._made: Point | None = None

    @property
    def is_due(self) -> bool:
        """Whether one is to be made before the next block."""
        if self._mode != "auto":
            return self._mode == "each"
        last = self._asked or self._made
        lost_s = self._work_s - (0.0 if last is None else last.work_s)
        return lost_s > max(WORTH * self._cost_s, AFTER_REFUSAL * self._refused_at_s)

    def next_number(self) -> int:
        """Return the number of the next checkpoint."""
        self._numbers += 1
        return self._numbers

    def asked(self, number: int) -> None:
        """Record that the block which begins now makes the checkpoint of that number."""
        self.problem, self._refused_at_s = None, 0.0
        self._asked = Point(number, self._work_s, self._blocks)

    def refused(self, problem: str) -> None:
        """Record that init refuses one now."""
        self.problem, self._refused_at_s = problem, self._work_s

    def made(self, said: Checkpointed) -> None:
        """Record that the REPL has made the one that it was asked for."""
        if self._asked is not None and self._asked.number == said.number:
            self._made, self._asked = self._asked, None
            self._cost_s = max(LEAST_COST_S, said.cost_s if math.isfinite(said.cost_s) else 0.0)

    def given_up(self) -> None:
        """Record that init has given up the checkpoint, since the REPL was forked."""
        self._asked = self._made = None

    def block_ended(self, wanted: Wanted, seconds: float) -> None:
        """Count a block whose variables a kill would lose. A block that reads variables makes none."""
        if wanted.names is None:
            self._work_s += seconds
            self._blocks += 1

    def provided(self, more: Provisions, context: str | None = None) -> None:
        """Record provisions, of which a checkpoint does not know."""
        for point in (self._asked, self._made):
            if point is not None:
                point.provisions.add(more)
                if context is not None:
                    point.contexts.append(context)

    def point(self, number: int | None) -> Point | None:
        """Return the checkpoint that init has under this number."""
        return self._made if self._made is not None and self._made.number == number else None

    def rolled_back(self, point: Point) -> int:
        """Record that the REPL goes on from there. Return the number of ended blocks whose variables are lost."""
        undone = self._blocks - point.blocks
        self._work_s, self._blocks = point.work_s, point.blocks
        self._asked = self._made = None
        return undone

    def all_is_lost(self) -> None:
        """Record that a fresh REPL takes the place of the last."""
        self._work_s, self._blocks, self._refused_at_s, self._cost_s = 0.0, 0, 0.0, LEAST_COST_S
        self._asked = self._made = self.problem = None
