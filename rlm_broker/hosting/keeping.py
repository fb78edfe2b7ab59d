"""Which ended things are kept no longer: those that are too old, and the oldest of the owner that has the most."""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

from rlm_broker.hosting.owner import Owner

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Kept(Generic[T]):
    """An ended thing that is kept for its owner.

    Attributes:
        item: The thing.
        owner: Its owner.
        weight: Its size, in any unit.
        ended_at: Unix time in seconds of its end.
    """

    item: T
    owner: Owner
    weight: float
    ended_at: float


def to_forget(kept: Sequence[Kept[T]], *, most: int, most_weight: float, oldest_at: float) -> list[T]:
    """Return the things to forget. An owner with few things loses none because another one has many.

    Args:
        kept: Ended things, the oldest first.
        most: Number of things that may be kept.
        most_weight: Weight of all of them together.
        oldest_at: Unix time in seconds; what ended before is forgotten.
    """
    gone = [each.item for each in kept if each.ended_at < oldest_at]
    left: dict[Owner, deque[Kept[T]]] = {}
    for each in kept:
        if each.ended_at >= oldest_at:
            left.setdefault(each.owner, deque()).append(each)
    number = len(kept) - len(gone)
    weights = {owner: sum(each.weight for each in things) for owner, things in left.items()}
    while number > most or sum(weights.values()) > most_weight:
        if number > most:
            owner = max(left, key=lambda each: len(left[each]))
        else:
            owner = max(weights, key=lambda each: weights[each])
        if not left[owner]:  # rounding of weights
            break
        oldest = left[owner].popleft()
        weights[owner] -= oldest.weight
        number -= 1
        gone.append(oldest.item)
    return gone
