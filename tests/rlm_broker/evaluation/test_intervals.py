import random

import pytest

from rlm_broker.evaluation.intervals import difference, wilson


@pytest.mark.parametrize(
    ("right", "of", "low", "high"),
    [  # from Wilson's formula, as R's prop.test(correct=FALSE) and statsmodels give it
        (0, 10, 0.0, 0.2775),
        (5, 10, 0.2366, 0.7634),
        (10, 10, 0.7225, 1.0),
        (81, 263, 0.2553, 0.3662),
        (1, 1, 0.2065, 1.0),
    ],
)
def test_wilson_has_known_values(right: int, of: int, low: float, high: float) -> None:
    found = wilson([1.0] * right + [0.0] * (of - right))
    assert found.mean == pytest.approx(right / of)
    assert [found.low, found.high] == pytest.approx([low, high], abs=5e-5)


def test_interval_of_graded_scores_is_that_of_their_mean() -> None:
    """Scores of 0 and 1 vary most of all scores with one mean, so their interval holds for graded ones."""
    graded, binary = wilson([0.5] * 10), wilson([0.0, 1.0] * 5)
    assert graded == binary
    assert 0 < graded.low < graded.mean < graded.high < 1


def test_equal_differences_are_tested_like_coins() -> None:
    """McNemar's exact test: 1 and 9 discordant pairs have the two-sided p-value 22 of 1,024."""
    found = difference([(1, 0)] * 9 + [(0, 1)] + [(1, 1)] * 5)
    assert [found.items, found.mean] == pytest.approx([15, 8 / 15])
    assert found.p_value == pytest.approx(22 / 1024)
    assert found.is_beyond_noise


def test_few_equal_differences_are_noise() -> None:
    """Five items can at best have the p-value 1 in 16, however clear they look."""
    found = difference([(1, 0)] * 5)
    assert found.p_value == pytest.approx(1 / 16)
    assert not found.is_beyond_noise
    assert difference([(1, 1), (0, 0)]).p_value == 1


def test_graded_differences_are_tested_by_all_signs() -> None:
    """Two of the 8 sums of ±0.5 ±0.25 ±0.125 are as far from 0 as the observed 0.875."""
    assert difference([(0.5, 0), (0.25, 0), (0.125, 0)]).p_value == pytest.approx(2 / 8)
    assert difference([(0.5, 0), (0.25, 0), (0, 0.125)]).p_value == pytest.approx(4 / 8)


def test_many_differences_are_tested_as_a_normal_sum() -> None:
    """The approximation is near the share of drawn signs, and near the exact value where that can be had."""
    differences = [0.01 * place * (1 if place % 3 else -1) for place in range(1, 40)]
    found = difference([(each, 0) for each in differences])
    signs = random.Random(1)
    drawn = [abs(sum(each if signs.random() < 0.5 else -each for each in differences)) for _ in range(4_000)]
    assert found.p_value == pytest.approx(sum(each >= abs(sum(differences)) for each in drawn) / 4_000, abs=0.02)
    exact, normal = (difference([(1, 0)] * (count // 2 + 20) + [(0, 1)] * (count // 2)) for count in (960, 1_040))
    assert exact.p_value == pytest.approx(normal.p_value, abs=0.03)
