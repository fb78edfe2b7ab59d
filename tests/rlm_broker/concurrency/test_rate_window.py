"""`RateWindow`: the wait until an amount fits into the last minute."""

import random

from rlm_broker.concurrency.rate_window import SPAN_S, RateWindow


def test_window_has_room_until_the_bound() -> None:
    """The window has room until the bound, and again when the first entry has left."""
    window = RateWindow(3)
    for now in (0.0, 10.0, 20.0):
        assert window.wait_s(1, now) == 0
        window.use(1, now)
    assert window.wait_s(1, 20.0) == 40
    assert window.wait_s(2, 20.0) == 50
    assert window.wait_s(1, 60.0) == 0


def test_entry_above_the_bound_passes_alone() -> None:
    window = RateWindow(100)
    assert window.wait_s(500, 0) == 0
    window.use(500, 0)
    assert window.wait_s(1, 1) == SPAN_S - 1
    assert window.wait_s(500, SPAN_S) == 0


def test_estimate_is_corrected_only_in_the_window() -> None:
    """An estimate is corrected while it counts and not afterwards."""
    window = RateWindow(100)
    entry = window.use(90, 0)
    window.correct(entry, 10)
    assert window.wait_s(90, 1) == 0
    late = window.use(90, 2)
    assert window.wait_s(20, 3) == SPAN_S + 2 - 3
    assert window.wait_s(100, 70) == 0
    window.correct(late, 1_000)
    assert window.wait_s(100, 71) == 0


def test_no_minute_ever_holds_more_than_the_bound() -> None:
    rng = random.Random(7)
    window, now, passed = RateWindow(50), 0.0, list[tuple[float, float]]()
    for _ in range(2_000):
        amount = rng.choice([1, 3, 10])
        now += window.wait_s(amount, now)
        assert window.wait_s(amount, now) == 0
        window.use(amount, now)
        passed.append((now, amount))
        now += rng.choice([0, 0, 0.1, 5])
    for start, _ in passed:
        assert sum(amount for when, amount in passed if start <= when < start + SPAN_S) <= 50


def test_without_a_bound_there_is_always_room() -> None:
    window = RateWindow(None)
    for _ in range(100):
        window.use(1e9, 0)
    assert window.wait_s(1e9, 0) == 0
