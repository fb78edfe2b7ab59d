"""Drawn numbers that are the same on all versions of Python and on all machines."""

import hashlib
import random
from collections.abc import Sequence
from typing import TypeVar

T = TypeVar("T")
FIRST_CODE = 1_000_000
"""Least number of a code. So there are nine million codes, more than any context has lines."""


class Draw:
    """Draws made of one seed. Only `random.Random.random` is used, whose numbers Python promises to keep.

    Args:
        seed: Parts of the seed: numbers and texts.
    """

    def __init__(self, *seed: int | str) -> None:
        digest = hashlib.sha256("\0".join(map(str, seed)).encode()).digest()
        self._next = random.Random(int.from_bytes(digest)).random

    def below(self, bound: int) -> int:
        """Return a whole number from 0 to `bound` - 1."""
        return int(self._next() * bound)

    def pick(self, values: Sequence[T]) -> T:
        """Return one of `values`."""
        return values[int(self._next() * len(values))]

    def several(self, values: Sequence[T], count: int) -> list[T]:
        """Return `count` different ones of `values`, in the order in which they were drawn."""
        left = list(values)
        for place in range(count):
            other = place + self.below(len(left) - place)
            left[place], left[other] = left[other], left[place]
        return left[:count]

    def codes(self, letter: str, count: int) -> list[str]:
        """Return `count` different codes of a letter and seven digits, such as `B-1048277`."""
        found: dict[str, None] = {}
        while len(found) < count:
            found[f"{letter}-{FIRST_CODE + self.below(9 * FIRST_CODE)}"] = None
        return list(found)
