from collections import Counter

from rlm_broker.evaluation.tasks.draw import FIRST_CODE, Draw


def test_draws_are_the_same_everywhere() -> None:
    """The numbers are pinned: another version of Python must draw the same."""
    draw = Draw("needle", 0, 1)
    assert [draw.below(1000) for _ in range(5)] == [254, 768, 228, 491, 108]
    assert draw.pick("abcdef") == "d"
    assert draw.several(range(10), 4) == [0, 7, 9, 6]
    assert draw.codes("K", 2) == ["K-5303688", "K-6552352"]


def test_parts_of_a_seed_are_apart() -> None:
    assert Draw("a", "b").below(1 << 30) != Draw("ab").below(1 << 30)
    assert Draw(1, 11).below(1 << 30) != Draw(11, 1).below(1 << 30)


def test_several_are_different_and_evenly_drawn() -> None:
    draw = Draw(7)
    counts: Counter[int] = Counter()
    for _ in range(2000):
        drawn = draw.several(range(5), 2)
        assert len(set(drawn)) == 2
        counts.update(drawn)
    assert all(700 < count < 900 for count in counts.values())


def test_codes_are_different_and_of_one_form() -> None:
    codes = Draw(3).codes("P", 50_000)
    assert len(set(codes)) == 50_000
    assert all(code[:2] == "P-" and FIRST_CODE <= int(code[2:]) < 10 * FIRST_CODE for code in codes)
