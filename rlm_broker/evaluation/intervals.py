"""Intervals of mean scores, and whether two arms differ by more than chance.

An interval is Wilson's at 95 %. It holds for few scores of 0 or 1 as well, and is never empty. Graded scores get the
same interval. It is then rather too wide: of all scores from 0 to 1 with one mean, those of 0 and 1 alone vary most.

Arms are compared item by item. Under the assumption that an arm has no effect, the sign of each item's difference is a
coin's. The p-value is the share of all such signs by which the mean difference is as large as the observed one.
"""

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

Z_95: Final = 1.959963984540054
"""Standard deviations of a normal distribution that hold 95 % of it, half on each side."""
NOISE_P: Final = 0.05
"""p-value below which a difference is called beyond noise."""
ALL_SIGNS: Final = 14
"""Most differences of which all signs are tried: 16,384 sums."""
ALL_COINS: Final = 1_000
"""Most differences of equal size of which the binomial distribution is summed up."""
_EQUAL: Final = 1e-9


@dataclass(frozen=True, slots=True)
class Interval:
    """Mean of scores from 0 to 1, and its interval at 95 %."""

    mean: float
    low: float
    high: float


def wilson(scores: Sequence[float]) -> Interval:
    """Return the mean of scores and Wilson's interval of it.

    Args:
        scores: At least one score, each from 0 to 1.
    """
    count, mean = len(scores), math.fsum(scores) / len(scores)
    square = Z_95 * Z_95 / count
    centre = (mean + square / 2) / (1 + square)
    half = Z_95 / (1 + square) * math.sqrt(max(0.0, mean * (1 - mean)) / count + square / (4 * count))
    return Interval(mean, min(mean, max(0.0, centre - half)), max(mean, min(1.0, centre + half)))


@dataclass(frozen=True, slots=True)
class Difference:
    """Difference of two arms on the same items.

    Attributes:
        mean: Mean score of the first less that of the second.
        items: Items that both have scores of.
        p_value: Probability of a difference at least as large, in one direction or the other, by chance alone.
    """

    mean: float
    items: int
    p_value: float

    @property
    def is_beyond_noise(self) -> bool:
        """Whether chance alone seldom makes such a difference."""
        return self.p_value < NOISE_P


def difference(pairs: Sequence[tuple[float, float]]) -> Difference:
    """Compare two arms.

    Args:
        pairs: Both scores of each item; at least one item.
    """
    differences = [first - second for first, second in pairs]
    mean = math.fsum(differences) / len(pairs)
    return Difference(mean, len(pairs), _p_value([each for each in differences if abs(each) > _EQUAL]))


def _p_value(differences: Sequence[float]) -> float:
    """Return the p-value of differences that are not 0.

    It is exact if there are few or all are equally large. Else the sum of signed differences is taken as normal.
    """
    if not differences:
        return 1.0
    sizes = [abs(each) for each in differences]
    observed = abs(math.fsum(differences)) - _EQUAL
    if max(sizes) - min(sizes) < _EQUAL and len(sizes) <= ALL_COINS:
        return _binomial(len(sizes), sum(each > 0 for each in differences))
    if len(sizes) <= ALL_SIGNS:
        signed = itertools.product(*((size, -size) for size in sizes))
        return sum(abs(math.fsum(each)) >= observed for each in signed) / (1 << len(sizes))
    deviation = math.sqrt(math.fsum(size * size for size in sizes))
    return math.erfc(observed / deviation / math.sqrt(2))


def _binomial(count: int, positive: int) -> float:
    """Return the two-sided p-value of a coin that showed heads `positive` times: McNemar's exact test."""
    most = max(positive, count - positive)
    tail = sum(math.comb(count, each) for each in range(most, count + 1))
    return min(1.0, 2 * tail / (1 << count))
