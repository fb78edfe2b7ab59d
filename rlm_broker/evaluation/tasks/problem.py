"""A generated question, and the lines that fill its context."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeVar

from rlm_broker.evaluation.scoring import Key
from rlm_broker.evaluation.tasks.draw import Draw

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Problem:
    """A question about a context, and the key of its answer. The context is in any form that `RLM.start` takes."""

    context: object
    question: str
    key: Key


Make = Callable[[Draw, int], Problem]
"""Makes a problem of draws, with a context of a given number of characters or a little fewer."""


def filling(make: Callable[[], T], written: Callable[[T], str], chars: int) -> list[T]:
    """Return made values whose lines have together, with a line break each, at most `chars` characters."""
    values: list[T] = []
    left = chars
    while left >= (needed := len(written(value := make())) + 1):
        values.append(value)
        left -= needed
    return values


def mixed(draw: Draw, filler: list[str], facts: Sequence[str]) -> str:
    """Return lines of filler with facts at drawn places among them, as one text."""
    places = sorted(draw.below(len(filler) + 1) for _ in facts)
    mixed_lines: list[str] = []
    start = 0
    for place, fact in zip(places, facts, strict=True):
        mixed_lines += [*filler[start:place], fact]
        start = place
    return "\n".join([*mixed_lines, *filler[start:]])
