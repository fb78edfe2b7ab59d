"""Owners: their models, and the money of a day."""

import datetime as dt

import pytest

from rlm_broker.serve.hosting.owner import Busy, MoneySpent, NotAllowed, Owner, Purse


def test_owner_may_use_its_models_alone() -> None:
    owner = Owner("a", frozenset({"small", "large"}))
    owner.require_model("small")
    with pytest.raises(NotAllowed, match="may not use the model 'other': it has large, small"):
        owner.require_model("other")
    Owner("b").require_model("any")


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
    purse = Purse(Owner("a"))
    purse.add(1e9)
    assert purse.left_usd is None
    purse.require_some()


def test_busy_service_says_when_to_come_again() -> None:
    busy = Busy("all places are taken", 2.5)
    assert (str(busy), busy.retry_after_s) == ("all places are taken", 2.5)
