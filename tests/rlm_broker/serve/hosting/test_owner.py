"""Owners: their models, the money of a day, places for work, what is kept of theirs, and limits of their runs."""

import asyncio
import datetime as dt
from typing import Any

import pytest

from rlm_broker import ConfigurationError, Limits, RunLimits
from rlm_broker.serve.hosting.owner import Busy, EndedThings, MoneySpent, NotAllowed, Owner, Places, Purse
from rlm_broker.serve.hosting.runs import tightened
from tests.support.waiting import turns

ALICE, BOB = Owner("alice"), Owner("bob")


def test_owner_may_use_its_models_alone() -> None:
    owner = Owner("a", frozenset({"small", "large"}))
    owner.require_model("small")
    with pytest.raises(NotAllowed, match="may not use the model 'other': it has large, small"):
        owner.require_model("other")
    ALICE.require_model("any")


def test_money_of_a_day_is_back_at_midnight_utc() -> None:
    """The days are those of the calendar, whose instants are known without the product's own constant."""
    now = dt.datetime(2026, 3, 1, 1, tzinfo=dt.UTC)
    purse = Purse(Owner("a", usd_a_day=2.0), lambda: now.timestamp())
    purse.add(0.5)
    assert purse.left_usd == 1.5
    purse.require_some()
    purse.add(1.75)
    assert purse.left_usd == 0
    with pytest.raises(MoneySpent) as refused:
        purse.require_some()
    assert str(refused.value) == "this key has spent its 2 US dollars of today (UTC)"
    assert refused.value.retry_after_s == dt.timedelta(hours=23).total_seconds()
    now = dt.datetime(2026, 3, 1, 23, 59, 59, tzinfo=dt.UTC)
    assert purse.left_usd == 0
    now = dt.datetime(2026, 3, 2, tzinfo=dt.UTC)
    assert purse.left_usd == 2.0


def test_owner_without_bound_always_has_money() -> None:
    purse = Purse(ALICE)
    purse.add(1e9)
    assert purse.left_usd is None
    purse.require_some()


# -- what is kept ----------------------------------------------------------------------------------------------------


def test_ended_things_go_by_age_number_and_weight() -> None:
    """The too old ones go; then the owner with the most, or the heaviest, loses its oldest."""
    now = 0.0
    kept = EndedThings[str](3, 10, 60.0, lambda: now)

    def add(*things: tuple[str, str, int]) -> list[str]:
        for name, owner, weight in things:
            kept.add(name, name, owner, weight)
        return list(kept)

    assert add(("b", "bob", 1), *((f"a{number}", "ann", 1) for number in range(5))) == ["b", "a3", "a4"]
    assert add(("a5", "ann", 8)) == ["b", "a4", "a5"]
    assert add(("b2", "bob", 2)) == ["a5", "b2"]
    assert add(("huge", "ann", 11)) == ["b2"]
    now = 50.0
    assert add(("late", "ann", 8)) == ["b2", "late"]
    kept.pop("late")
    kept.pop("late")
    assert add(("next", "bob", 8)) == ["b2", "next"]
    now = 60.0
    assert kept.get("b2") == "b2"
    now = 60.5
    assert kept.get("b2") is None
    assert add(("more", "ann", 2)) == ["next", "more"]
    now = 110.5
    assert list(kept) == ["more"]
    now = 232.0
    kept.add("new", "new", "bob", 1)
    assert list(kept._things) == ["new"]


# -- places ----------------------------------------------------------------------------------------------------------


async def test_owners_take_turns_and_queue_is_bounded() -> None:
    """Let an owner without a turn in a full queue wait once. A queue of no length admits no owner."""
    places, order, may_end = Places(1, 2), list[str](), asyncio.Event()

    async def work(owner: Owner) -> None:
        async with places.place(owner):
            await may_end.wait()
            order.append(owner.name)

    working = []
    for owner in (ALICE, ALICE, ALICE, BOB):
        working.append(asyncio.create_task(work(owner)))
        await turns()
    with pytest.raises(Busy) as busy:
        await work(BOB)
    said = "all places are taken, and 2 wait: try again later"
    assert (str(busy.value), busy.value.retry_after_s) == (said, 1)
    may_end.set()
    await asyncio.gather(*working)
    assert order == ["alice", "alice", "bob", "alice"]
    unqueued = Places(1, 0)
    async with unqueued.place(ALICE):
        with pytest.raises(Busy):
            await unqueued.place(BOB).__aenter__()


async def test_cancelled_work_gives_its_place_back() -> None:
    places, began = Places(1, 1), asyncio.Event()

    async def work() -> None:
        async with places.place(ALICE):
            began.set()
            await asyncio.Event().wait()

    working = asyncio.create_task(work())
    await began.wait()
    waiting = asyncio.create_task(work())
    await turns()
    for task in (waiting, working):
        task.cancel()
    await asyncio.wait({waiting, working})
    async with places.place(BOB):
        pass


# -- limits of one run -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("base", "owners", "asked", "left_usd", "held"),
    [
        ({}, None, None, None, None),
        ({}, {"max_llm_calls": 5}, None, None, {"max_llm_calls": 5}),
        ({}, {"max_llm_calls": 5}, {"max_llm_calls": 3}, None, {"max_llm_calls": 3}),
        ({}, None, {"max_budget_usd": 2}, 1.0, {"max_budget_usd": 1.0}),
        ({"max_budget_usd": 2}, None, None, 100.0, {"max_budget_usd": 2}),
        ({"max_budget_usd": 2}, {"max_budget_usd": 5}, {"max_budget_usd": 3}, None, {"max_budget_usd": 3}),
        ({"max_iterations": (9, 5)}, None, {"max_iterations": 5}, None, {"max_iterations": 5}),
        ({"max_budget_usd": 2}, None, {"max_budget_usd": 3}, None, "wider"),
        ({"max_budget_usd": 2}, None, {"max_budget_usd": None}, None, "wider"),
        ({"max_budget_usd": 9}, {"max_budget_usd": 2}, {"max_budget_usd": 3}, None, "wider"),
        ({"max_iterations": (9, 5)}, None, {"max_iterations": 6}, None, "wider"),
        ({}, None, {"run_timeout_s": 4_000}, None, "wider"),
    ],
)
def test_smaller_limit_holds_and_wider_is_refused(base: Any, owners: Any, asked: Any, left_usd: Any, held: Any) -> None:
    given = Limits(**base), owners and RunLimits(**owners), asked and RunLimits(**asked), left_usd
    if held == "wider":
        with pytest.raises(ConfigurationError, match=r"above its bound, .*: ask for less"):
            tightened(*given)
    else:
        made = tightened(*given)
        assert (made and made.given) == held
