import asyncio

import pytest

from rlm_broker.errors import ConfigurationError, LimitReached
from rlm_broker.limits import Limits
from rlm_broker.results import Usage
from rlm_broker.run.ledger import Ledger
from tests.support.waiting import turns


def test_calls_are_numbered_and_end_at_their_limit() -> None:
    ledger = Ledger(Limits(max_llm_calls=2))
    assert [ledger.charge_call(), ledger.charge_call()] == [1, 2]
    with pytest.raises(LimitReached, match="the limit max_llm_calls = 2 was reached, 2 used") as reached:
        ledger.charge_call()
    assert (reached.value.limit, reached.value.spent, reached.value.allowed) == ("max_llm_calls", 2, 2)
    assert ledger.calls == 2


def test_children_end_at_their_limit_and_none_is_no_limit() -> None:
    ledger = Ledger(Limits(max_children_total=1, max_llm_calls=None))
    ledger.charge_child()
    with pytest.raises(LimitReached, match="max_children_total"):
        ledger.charge_child()
    assert [ledger.charge_call() for _ in range(50)][-1] == 50


async def spend(ledger: Ledger, run: str, model: str, depth: int, usage: Usage) -> None:
    ledger.settle(await ledger.hold(0, None), run, model, depth, usage)


async def test_usage_is_summed_by_the_model_that_served_over_all_depths() -> None:
    ledger = Ledger(Limits())
    await spend(ledger, "1", "a", 0, Usage(1, 10, 5, 0.5))
    await spend(ledger, "1", "a", 1, Usage(1, 1, 2, 0.25))
    await spend(ledger, "1", "b", 1, Usage(1, 7, 7))
    assert ledger.summary().model_usage_summaries == {"a": Usage(2, 11, 7, 0.75), "b": Usage(1, 7, 7, None)}
    assert ledger.by_depth() == {0: Usage(1, 10, 5, 0.5), 1: Usage(2, 8, 9, None)}


async def test_usage_of_a_run_is_its_own_and_that_of_all_below_it() -> None:
    ledger = Ledger(Limits())
    for run in ("1", "1.1", "1.1.2", "1.10", "1.2"):
        await spend(ledger, run, "a", run.count("."), Usage(1, 1, 0))
    assert ledger.summary("1").total.total_calls == 5
    assert ledger.summary("1.1").total.total_calls == 2
    assert ledger.summary("1.10").total.total_calls == 1
    assert ledger.by_depth("1.1") == {1: Usage(1, 1, 0), 2: Usage(1, 1, 0)}


async def test_a_cost_that_is_not_known_makes_the_sum_unknown_and_never_zero() -> None:
    ledger = Ledger(Limits())
    await spend(ledger, "1", "a", 0, Usage(1, 1, 1, 0.5))
    await spend(ledger, "1", "b", 0, Usage(1, 1, 1, None))
    assert ledger.summary().total.total_cost is None
    assert "total_cost" not in ledger.summary().to_dict()


@pytest.mark.parametrize(
    ("limits", "usage", "overshoot"),
    [
        (Limits(max_tokens=1000), Usage(1, 40, 60), 100),
        (Limits(max_tokens=1000, max_completion_tokens=60), Usage(1, 40, 60), 100),
        (Limits(max_budget_usd=1.0), Usage(1, 1, 1, 0.07), 0.07),
    ],
    ids=["tokens", "tokens_of_known_size", "budget"],
)
async def test_calls_at_the_same_time_overshoot_by_less_than_one(
    limits: Limits, usage: Usage, overshoot: float
) -> None:
    ledger = Ledger(limits)
    running = most = 0

    async def call() -> None:
        nonlocal running, most
        ledger.charge_call()
        hold = await ledger.hold(120, limits.max_completion_tokens)
        running += 1
        most = max(most, running)
        await turns(2)
        running -= 1
        ledger.settle(hold, "1", "m", 0, usage)

    outcomes = await asyncio.gather(*(call() for _ in range(200)), return_exceptions=True)
    assert all(outcome is None or isinstance(outcome, LimitReached) for outcome in outcomes)
    spent = ledger.summary().total
    if limits.max_tokens is not None:
        assert 1000 <= spent.total_input_tokens + spent.total_output_tokens < 1000 + overshoot
    else:
        assert 1.0 <= (spent.total_cost or 0) < 1.0 + overshoot
    assert most > 1
    left = ledger.left()
    assert (left["max_tokens"] == 0) or (left["max_budget_usd"] == 0)


async def test_a_call_that_failed_gives_back_what_was_set_aside() -> None:
    ledger = Ledger(Limits(max_tokens=100))
    first = await ledger.hold(30, 50)
    second = asyncio.create_task(ledger.hold(30, 50))
    await asyncio.sleep(0)
    assert not second.done()
    ledger.release(first)
    ledger.release(await second)
    ledger.settle(await ledger.hold(0, 1), "1", "m", 0, Usage(1, 50, 50))
    with pytest.raises(LimitReached):
        await ledger.hold(0, 1)


async def test_a_budget_that_cannot_be_kept_is_refused_and_not_taken_for_kept() -> None:
    ledger = Ledger(Limits(max_budget_usd=1.0))
    await spend(ledger, "1", "unpriced", 0, Usage(1, 1, 1, None))
    with pytest.raises(ConfigurationError, match="the price of model 'unpriced' is not known"):
        ledger.charge_call()


def test_what_is_left_is_told_by_limit_and_none_is_without_a_bound() -> None:
    ledger = Ledger(Limits(max_llm_calls=10, max_children_total=None))
    ledger.charge_call()
    assert ledger.left() == {"max_llm_calls": 9, "max_children_total": None, "max_tokens": None, "max_budget_usd": None}


async def test_tokens_that_a_client_does_not_count_are_estimated_for_the_limit_and_in_no_usage() -> None:
    ledger = Ledger(Limits(max_tokens=1000))
    ledger.settle(await ledger.hold(600, None), "1", "m", 0, Usage(1), 300)
    assert ledger.left()["max_tokens"] == 700
    ledger.settle(await ledger.hold(600, None), "1", "m", 0, Usage(1, stored_calls=1), 300)
    assert ledger.left()["max_tokens"] == 700, "a stored reply takes none"
    ledger.settle(await ledger.hold(1500, None), "1", "m", 0, Usage(1), 600)
    with pytest.raises(LimitReached, match="the limit max_tokens = 1,000 was reached, 1,000 used"):
        ledger.charge_call()
    assert ledger.summary().total.total_input_tokens == 0
