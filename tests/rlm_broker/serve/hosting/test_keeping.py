"""Ended things: the old ones go, and an owner with few keeps them beside one with many."""

from rlm_broker.serve.hosting.owner import Kept, Owner, to_forget

ANN, BOB = Owner("ann"), Owner("bob")


def test_old_things_are_forgotten() -> None:
    kept = [Kept("a", ANN, 1, 10.0), Kept("b", BOB, 1, 30.0), Kept("c", ANN, 1, 20.0)]
    assert to_forget(kept, most=9, most_weight=9, oldest_at=25.0) == ["a", "c"]


def test_owner_with_the_most_loses_its_oldest() -> None:
    kept = [Kept("b", BOB, 1, 1.0), *(Kept(f"a{number}", ANN, 1, 2.0) for number in range(5))]
    assert to_forget(kept, most=3, most_weight=9, oldest_at=0.0) == ["a0", "a1", "a2"]


def test_owner_with_the_heaviest_loses_its_oldest() -> None:
    kept = [Kept("b", BOB, 1, 1.0), Kept("b2", BOB, 1, 1.5), Kept("a", ANN, 7, 2.0), Kept("a2", ANN, 3, 3.0)]
    assert to_forget(kept, most=9, most_weight=5, oldest_at=0.0) == ["a"]


def test_one_thing_beyond_the_weight_is_forgotten() -> None:
    assert to_forget([Kept("a", ANN, 7, 2.0)], most=9, most_weight=5, oldest_at=0.0) == ["a"]
    assert to_forget([Kept("a", ANN, 5, 2.0)], most=9, most_weight=5, oldest_at=0.0) == []
