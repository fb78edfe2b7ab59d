"""The results of an evaluation: a cell for each arm, task and length, and contrasts of arms."""

import math
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from rlm_broker.evaluation.intervals import Difference, Interval, difference, wilson
from rlm_broker.usage import Usage
from rlm_broker.values.text import jsonable

Ended = Literal["answered", "limited", "failed", "does_not_fit"]
"""End of an item: as in a batch; or its context is longer than the model's window."""
ALL_TASKS = "all"
"""Task of a contrast over all items."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """One item in one arm.

    Attributes:
        score: From 0 to 1. An item that failed or does not fit has 0; a limited one that of its partial answer.
        ended: End of the item.
        answer, error: Text of the answer, or why there is none.
        expected: Expected answer.
        usage: Usage of the item.
        seconds: Duration of its last attempt.
    """

    arm: str
    id: str
    task: str
    length: str
    score: float
    ended: Ended
    answer: str | None
    error: str | None
    expected: Any
    usage: Usage
    seconds: float


@dataclass(frozen=True, slots=True)
class Cell:
    """One arm on one task at one length.

    Attributes:
        items: Items that ended.
        score: Mean score with its interval.
        cost_usd: Mean cost of an item in US dollars; None if a price is not known.
        calls, input_tokens, output_tokens, seconds: Means of an item.
        limited, failed, does_not_fit: Numbers of items that ended so.
    """

    arm: str
    task: str
    length: str
    items: int
    score: Interval
    cost_usd: float | None
    calls: float
    input_tokens: float
    output_tokens: float
    seconds: float
    limited: int
    failed: int
    does_not_fit: int


@dataclass(frozen=True, slots=True)
class Contrast:
    """Two arms on the items that both have ended.

    Attributes:
        arm, than: Both arms.
        task: Task of the items, or `ALL_TASKS`.
        difference: Score of `arm` less that of `than`.
        cost_ratio: Cost of `arm` for each dollar of `than`; None if a price is not known or is 0.
    """

    arm: str
    than: str
    task: str
    difference: Difference
    cost_ratio: float | None


@dataclass(frozen=True, slots=True)
class Report:
    """Results of an evaluation.

    Attributes:
        about: Settings, by name: model, seed and the like.
        arms: Names of the arms, in order.
        cells: One for each task, length and arm that has an item.
        contrasts: Each arm against each one before it: over all tasks, and by task.
        outcomes: All items.
        unfinished: Items that have not ended, because a limit of the whole evaluation was reached.
    """

    about: dict[str, Any]
    arms: tuple[str, ...]
    cells: tuple[Cell, ...]
    contrasts: tuple[Contrast, ...]
    outcomes: tuple[Outcome, ...]
    unfinished: int

    def usage(self, arm: str) -> Usage:
        """Return the usage of an arm."""
        return _usage(each for each in self.outcomes if each.arm == arm)

    def to_dict(self) -> dict[str, Any]:
        """Return plain values for JSON, without the answers' usage by model."""
        shown: dict[str, Any] = jsonable(self)
        for contrast, given in zip(shown["contrasts"], self.contrasts, strict=True):
            contrast["difference"]["is_beyond_noise"] = given.difference.is_beyond_noise
        return shown


def report(about: dict[str, Any], arms: Sequence[str], outcomes: Iterable[Outcome], wanted: int) -> Report:
    """Return the report of items in the order of their questions.

    Args:
        wanted: Items that there are in all arms together.
    """
    ended = tuple(outcomes)
    places: dict[tuple[str, str], dict[str, list[Outcome]]] = {}
    for each in ended:
        places.setdefault((each.task, each.length), defaultdict(list))[each.arm].append(each)
    cells = [_cell(by_arm[arm]) for by_arm in places.values() for arm in arms if arm in by_arm]
    tasks = list(dict.fromkeys(each.task for each in ended))
    pairs = [(arm, than) for place, arm in enumerate(arms) for than in arms[:place]]
    contrasts = [
        contrast
        for arm, than in pairs
        for task in ([ALL_TASKS, *tasks] if len(tasks) > 1 else [ALL_TASKS])
        if (contrast := _contrast(ended, arm, than, task)) is not None
    ]
    return Report(about, tuple(arms), tuple(cells), tuple(contrasts), ended, wanted - len(ended))


def _cell(outcomes: Sequence[Outcome]) -> Cell:
    first, count, usage = outcomes[0], len(outcomes), _usage(outcomes)
    ends = [each.ended for each in outcomes]
    return Cell(
        first.arm,
        first.task,
        first.length,
        count,
        wilson([each.score for each in outcomes]),
        _cost(usage, count),
        usage.total_calls / count,
        usage.total_input_tokens / count,
        usage.total_output_tokens / count,
        math.fsum(each.seconds for each in outcomes) / count,
        ends.count("limited"),
        ends.count("failed"),
        ends.count("does_not_fit"),
    )


def _contrast(outcomes: Sequence[Outcome], arm: str, than: str, task: str) -> Contrast | None:
    """Return a contrast; None if no item has ended in both arms."""
    of_task = [each for each in outcomes if task in (ALL_TASKS, each.task)]
    first = {each.id: each for each in of_task if each.arm == arm}
    second = {each.id: each for each in of_task if each.arm == than}
    both = [(first[id], second[id]) for id in first if id in second]
    if not both:
        return None
    found = difference([(one.score, other.score) for one, other in both])
    costs = [_usage(side).total_cost for side in zip(*both, strict=True)]
    ratio = costs[0] / costs[1] if costs[0] is not None and costs[1] else None
    return Contrast(arm, than, task, found, ratio)


def _cost(usage: Usage, items: int) -> float | None:
    if usage.total_calls == 0:
        return 0.0
    return None if usage.total_cost is None else usage.total_cost / items


def _usage(outcomes: Iterable[Outcome]) -> Usage:
    return sum((each.usage for each in outcomes), Usage())
