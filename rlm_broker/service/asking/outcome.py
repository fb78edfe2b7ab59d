"""The end of a run, as its client is told: the answer, whether it is whole, and what it took."""

from dataclasses import dataclass
from typing import Any

from rlm_broker.errors import LimitReached
from rlm_broker.results import Completion
from rlm_broker.service.asking.wanted import as_json
from rlm_broker.usage import Usage


@dataclass(frozen=True, slots=True)
class Outcome:
    """The end of a run that has an answer, or that a limit has ended.

    Attributes:
        text: Answer, or the best one so far; if there is none, a sentence on what ended the run.
        limit: Name of the limit that ended the run, or None.
        is_stopped: Whether the run was stopped.
        usage: Usage of the run and all below it.
        isolation: Isolation level of its REPL, or None if it had none.
        turns: Turns of the run.
        seconds: Duration of the run.
    """

    text: str
    limit: str | None
    is_stopped: bool
    usage: Usage
    isolation: str | None
    turns: int
    seconds: float

    @property
    def is_whole(self) -> bool:
        """Whether the run has ended by itself, with its answer."""
        return self.limit is None and not self.is_stopped

    def told(self, run: str) -> dict[str, Any]:
        """Return the object `rlm` of a response.

        Args:
            run: Id of the run.
        """
        return {
            "run": run,
            "cost_usd": self.usage.total_cost,
            "calls": self.usage.total_calls,
            "limit": self.limit,
            "stopped": self.is_stopped,
            "isolation": self.isolation,
            "turns": self.turns,
            "seconds": round(self.seconds, 3),
        }


def outcome_of(ended: Completion | LimitReached, *, is_typed: bool = False) -> Outcome:
    """Return the outcome of a run.

    Args:
        ended: Its completion, or the limit that ended it.
        is_typed: Whether the answer is of a type, so that it is told as JSON.
    """
    level = None if ended.isolation is None else ended.isolation.level
    usage = ended.usage_summary.total
    if isinstance(ended, LimitReached):
        reached = f"the limit {ended.limit} = {ended.allowed:,.10g} was reached before there was an answer"
        text, turns = ended.partial_answer or reached, len(ended.trajectory)
        return Outcome(text, ended.limit, False, usage, level, turns, ended.execution_time)
    if ended.is_stopped:
        text = ended.response or "the run was stopped before there was an answer"
    else:
        text = as_json(ended.parsed) if is_typed else ended.response or ""
    return Outcome(text, ended.limit, ended.is_stopped, usage, level, ended.iterations, ended.execution_time)
