"""The ledger of a tree: counts, means that are set aside, and limits, at their boundaries."""

import asyncio

import pytest

from rlm_broker.errors import ConfigurationError, LimitReached
from rlm_broker.limits import Limits
from rlm_broker.run.ledger import Ledger, Spent
from rlm_broker.usage import Usage
from tests.support.waiting import WAIT_S, turns


def test_calls_are_numbered_and_end_at_their_limit() -> None:
    ledger = Ledger(Limits(max_llm_calls=2))
    assert [ledger.charge_call(), ledger.charge_call()] == [1, 2]
    with pytest.raises(LimitReached, match="the limit max_llm_calls = 2 was reached, 2 used") as reached:
        ledger.charge_call()
    assert (reached.value.limit, reached.value.spent, reached.value.allowed) == ("max_llm_calls", 2, 2)
    assert ledger.calls == 2


def test_children_end_at_their_limit() -> None:
    ledger = Ledger(Limits(max_children_total=1, max_llm_calls=None))
    ledger.charge_child()
    with pytest.raises(LimitReached, match="max_children_total"):
        ledger.charge_child()
    assert [ledger.charge_call() for _ in range(50)][-1] == 50


async def spend(ledger: Ledger, run: str, model: str, depth: int, usage: Usage) -> None:
    ledger.settle(await ledger.hold(0, None), run, model, depth, usage, 0)


async def test_usage_is_summed_by_model_over_depths() -> None:
    ledger = Ledger(Limits())
    await spend(ledger, "1", "a", 0, Usage(1, 10, 5, 0.5))
    await spend(ledger, "1", "a", 1, Usage(1, 1, 2, 0.25))
    await spend(ledger, "1", "b", 1, Usage(1, 7, 7))
    assert ledger.summary().model_usage_summaries == {"a": Usage(2, 11, 7, 0.75), "b": Usage(1, 7, 7, None)}
    assert ledger.by_depth() == {0: Usage(1, 10, 5, 0.5), 1: Usage(2, 8, 9, None)}
    assert ledger.summary().total.total_cost is None
    assert "total_cost" not in ledger.summary().to_dict()


async def test_run_usage_includes_its_descendants() -> None:
    ledger = Ledger(Limits())
    for run in ("1.1.2", "1", "1.1", "1.10", "1.2"):
        await spend(ledger, run, "a", run.count("."), Usage(1, 1, 0))
    assert ledger.summary("1").total.total_calls == 5
    assert ledger.summary("1.1").total.total_calls == 2
    assert ledger.summary("1.10").total.total_calls == 1
    assert ledger.by_depth("1.1") == {1: Usage(1, 1, 0), 2: Usage(1, 1, 0)}
    assert list(ledger.by_depth()) == [0, 1, 2]


@pytest.mark.parametrize(
    ("limits", "usage", "overshoot"),
    [
        (Limits(max_tokens=1000), Usage(1, 40, 60), 100),
        (Limits(max_tokens=1000, max_completion_tokens=60), Usage(1, 40, 60), 100),
        (Limits(max_budget_usd=1.0), Usage(1, 1, 1, 0.07), 0.07),
    ],
    ids=["tokens", "tokens_of_known_size", "budget"],
)
async def test_concurrent_calls_overshoot_by_less_than_one(limits: Limits, usage: Usage, overshoot: float) -> None:
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
        ledger.settle(hold, "1", "m", 0, usage, 0)

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


async def test_failed_call_returns_its_reserve() -> None:
    ledger = Ledger(Limits(max_tokens=100))
    first = await ledger.hold(30, 50)
    second = asyncio.create_task(ledger.hold(30, 50))
    await asyncio.sleep(0)
    assert not second.done()
    ledger.release(first)
    ledger.release(await second)
    ledger.settle(await ledger.hold(0, 1), "1", "m", 0, Usage(1, 50, 50), 0)
    with pytest.raises(LimitReached):
        await ledger.hold(0, 1)


async def test_untrackable_budget_is_refused() -> None:
    ledger = Ledger(Limits(max_budget_usd=1.0))
    await spend(ledger, "1", "unpriced", 0, Usage(1, 1, 1, None))
    with pytest.raises(ConfigurationError, match="the price of model 'unpriced' is not known"):
        ledger.charge_call()


def test_remainder_is_told_by_limit() -> None:
    ledger = Ledger(Limits(max_llm_calls=10, max_children_total=None))
    ledger.charge_call()
    assert ledger.left() == {"max_llm_calls": 9, "max_children_total": None, "max_tokens": None, "max_budget_usd": None}


async def test_uncounted_tokens_are_estimated_for_limits_only() -> None:
    """Tokens that a client does not count are estimated for the limit and appear in no usage."""
    ledger = Ledger(Limits(max_tokens=1000))
    ledger.settle(await ledger.hold(600, None), "1", "m", 0, Usage(1), 300)
    assert ledger.left()["max_tokens"] == 700
    ledger.settle(await ledger.hold(600, None), "1", "m", 0, Usage(1, stored_calls=1), 300)
    assert ledger.left()["max_tokens"] == 700, "a stored reply takes none"
    ledger.settle(await ledger.hold(1500, None), "1", "m", 0, Usage(1), 600)
    with pytest.raises(LimitReached, match="the limit max_tokens = 1,000 was reached, 1,000 used"):
        ledger.charge_call()
    assert ledger.summary().total.total_input_tokens == 0


# -- a ledger that several trees share -------------------------------------------------------------------------------


async def test_tree_usage_counts_in_the_ledger_above() -> None:
    above = Ledger(Limits(max_llm_calls=3, max_children_total=2, max_tokens=100))
    one, other = Ledger(Limits(), above), Ledger(Limits(max_tokens=50), above)
    assert [one.charge_call(), other.charge_call(), one.charge_call()] == [1, 1, 2]
    with pytest.raises(LimitReached, match="max_llm_calls = 3 was reached, 3 used"):
        other.charge_call()
    one.charge_child()
    other.charge_child()
    with pytest.raises(LimitReached, match="max_children_total = 2 was reached, 2 used"):
        one.charge_child()
    assert (one.children, other.children, above.children) == (1, 1, 2)
    await spend(one, "1", "a", 0, Usage(1, 10, 5))
    await spend(other, "1", "a", 1, Usage(1, 1, 1))
    assert above.by_depth() == {0: Usage(1, 10, 5, None), 1: Usage(1, 1, 1, None)}
    assert one.left()["max_tokens"] == 83
    assert other.left()["max_tokens"] == 48
    assert other.left()["max_children_total"] == 0
    assert one.left()["max_budget_usd"] is None


async def test_call_reserve_is_held_above_and_returned() -> None:
    above = Ledger(Limits(max_tokens=100))
    one, other = Ledger(Limits(), above), Ledger(Limits(), above)
    await spend(one, "1", "a", 0, Usage(1, 1, 1))
    held = await one.hold(30, 60)
    waiting = asyncio.create_task(other.hold(30, 60))
    await turns()
    assert not waiting.done()
    one.release(held)
    await asyncio.wait_for(waiting, WAIT_S)


async def test_cancelled_waiting_call_holds_no_reserve_above() -> None:
    above = Ledger(Limits(max_tokens=1000))
    tree, other = Ledger(Limits(max_tokens=100), above), Ledger(Limits(), above)
    await spend(tree, "1", "a", 0, Usage(1, 1, 1))
    held = await tree.hold(30, 60)
    waiting = asyncio.create_task(tree.hold(30, 60))  # it holds means above, and waits for means of its own tree
    await turns()
    waiting.cancel()
    await asyncio.wait({waiting})
    tree.release(held)
    await asyncio.wait_for(other.hold(30, 980), WAIT_S)


async def test_spent_tree_leaves_no_reserve_above() -> None:
    above = Ledger(Limits(max_tokens=1000))
    tree, other = Ledger(Limits(max_tokens=2), above), Ledger(Limits(), above)
    await spend(tree, "1", "a", 0, Usage(1, 1, 1))
    with pytest.raises(LimitReached, match="max_tokens = 2 was reached, 2 used"):
        await tree.hold(30, 60)
    await asyncio.wait_for(other.hold(30, 980), WAIT_S)


# -- boundaries ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("output_tokens", "fits"), [(39, True), (40, True), (41, False)])
async def test_concurrent_calls_may_use_the_last_token(output_tokens: int, fits: bool) -> None:
    """100 tokens, of which 2 are spent and 10 + 38 set aside; the second call sends 10."""
    ledger = Ledger(Limits(max_tokens=100))
    await spend(ledger, "1", "a", 0, Usage(1, 1, 1))
    await ledger.hold(30, 38)
    second = asyncio.create_task(ledger.hold(30, output_tokens))
    await turns()
    assert second.done() is fits
    second.cancel()


@pytest.mark.parametrize(("budget_usd", "fits"), [(0.75, True), (0.74, False)])
async def test_concurrent_calls_may_use_the_last_cent(budget_usd: float, fits: bool) -> None:
    """The dearest call was 0.25 dollars, one is open, and the second may cost as much."""
    ledger = Ledger(Limits(max_budget_usd=budget_usd))
    await spend(ledger, "1", "a", 0, Usage(1, 1, 1, 0.25))
    await ledger.hold(0, None)
    second = asyncio.create_task(ledger.hold(0, None))
    await turns()
    assert second.done() is fits
    second.cancel()


async def test_call_may_equal_the_largest_so_far() -> None:
    ledger = Ledger(Limits(max_tokens=1000, max_budget_usd=10))
    for output_tokens, cost in ((5, 0.5), (7, 0.25), (6, 0.75)):
        await spend(ledger, "1", "a", 0, Usage(1, 1, output_tokens, cost))
    hold = await ledger.hold(30, None)
    assert (hold.tokens, hold.cost_usd, hold.input_tokens) == (10 + 7, 0.75, 10)


async def test_budget_spent_to_the_cent_is_spent() -> None:
    ledger = Ledger(Limits(max_budget_usd=0.5))
    await spend(ledger, "1", "a", 0, Usage(1, 1, 1, 0.5))
    with pytest.raises(LimitReached, match="max_budget_usd"):
        ledger.charge_call()


async def test_without_bounded_means_nothing_is_set_aside() -> None:
    tree = Ledger(Limits(max_llm_calls=1), Ledger(Limits()))
    hold = await tree.hold(1000, 1000)
    assert (hold.tokens, hold.cost_usd, hold.input_tokens, hold.above) == (0, 0, 0, None)
    tree.release(hold)
    assert tree.charge_call() == 1


async def test_uncounted_silent_call_costs_what_was_sent() -> None:
    ledger = Ledger(Limits(max_tokens=100))
    hold = await ledger.hold(30, 5)
    ledger.settle(hold, "1", "a", 0, Usage(1, 0, 0), 0)
    assert ledger.left()["max_tokens"] == 90


async def test_ended_call_holds_no_reserve_in_three_ledgers() -> None:
    top = Ledger(Limits(max_tokens=100))
    tree = Ledger(Limits(), Ledger(Limits(), top))
    await spend(tree, "1.2", "a", 0, Usage(1, 1, 1))
    assert top.summary("1.2").model_usage_summaries == {"a": Usage(1, 1, 1, None)}
    await asyncio.wait_for(tree.hold(30, 500), WAIT_S)  # more than is left: granted only while no other call is open


async def test_run_that_goes_on_begins_with_what_was_spent() -> None:
    ledger = Ledger(Limits(max_llm_calls=3, max_children_total=2, max_tokens=20, max_budget_usd=2))
    ledger.go_on(Spent(2, 1, {("a", 0): Usage(1, 5, 5, 0.5), ("b", 1): Usage(1, 2, 1, 1.0)}), "1")
    assert {name: left for name, left in ledger.left().items() if left is not None} == {
        "max_llm_calls": 1,
        "max_children_total": 1,
        "max_tokens": 7,
        "max_budget_usd": 0.5,
    }
    assert ledger.summary("1").total == Usage(2, 7, 6, 1.5)
    assert ledger.by_depth() == {0: Usage(1, 5, 5, 0.5), 1: Usage(1, 2, 1, 1.0)}


async def test_branch_counts_for_the_limits_of_its_run_and_not_for_its_usage() -> None:
    run = Ledger(Limits(max_tokens=10))
    branch = Ledger(Limits(), run, "branch/")
    await spend(run, "1", "a", 0, Usage(1, 1, 1))
    await spend(branch, "1", "a", 0, Usage(1, 2, 2))
    assert run.summary("1").total.total_tokens == 2
    assert branch.summary("1").total.total_tokens == run.left()["max_tokens"] == 4
