"""The means of a batch: calls are held against them before they are sent."""

import asyncio

import pytest

from rlm_broker.batch.budget import Spending
from rlm_broker.batch.item_calls import ItemCalls
from rlm_broker.errors import ConfigurationError, LimitReached, ModelFailed
from rlm_broker.limits import BatchLimits
from rlm_broker.results import Call
from rlm_broker.usage import Usage
from tests.support.paying import CLIENT, Provider, request
from tests.support.waiting import turns, until


def begun(metered: ItemCalls, *texts: str) -> list["asyncio.Task[Call]"]:
    return [asyncio.ensure_future(metered.complete(CLIENT, request(text))) for text in texts]


async def test_earlier_usage_does_not_slow_calls_down() -> None:
    """The cost of all earlier calls together says nothing of a single call."""
    ends: list[BaseException] = []
    provider = Provider()
    spending = Spending(BatchLimits(max_tokens=10_000), {"m": Usage(500, 5_000, 2_000, 1.0)}, ends.append)
    metered = ItemCalls(spending=spending).before(provider)
    provider.answers.set()
    assert metered.routing is provider.routing
    (call,) = await asyncio.gather(*begun(metered, "first"))
    assert call.response == "first 1"
    await spending.drained(3_600)  # no call is under way
    provider.answers.clear()
    calls = begun(metered, *"abcd")
    await until(lambda: len(provider.asked) == 5)
    provider.answers.set()
    await asyncio.gather(*calls)
    assert spending.usage.total_input_tokens == 5_050
    assert ends == []


@pytest.mark.parametrize(
    ("earlier", "error"),
    [
        (Usage(5, 90, 10, 1.0), LimitReached),
        (Usage(5, 1, 1, 2.0), LimitReached),
        (Usage(5, 1, 1, None), ConfigurationError),
    ],
)
async def test_spent_means_are_refused_at_the_beginning(earlier: Usage, error: type[Exception]) -> None:
    spending = Spending(BatchLimits(max_tokens=100, max_budget_usd=2), {"m": earlier}, print)
    with pytest.raises(error):
        spending.require_means()


async def test_call_beyond_a_limit_waits_and_never_fails() -> None:
    """The batch ends by the first of them; the run of each is cancelled with it."""
    ends: list[BaseException] = []
    provider = Provider()
    provider.answers.set()
    metered = ItemCalls(spending=Spending(BatchLimits(max_budget_usd=1), {}, ends.append)).before(provider)
    calls = begun(metered, *"abcde")
    await until(lambda: ends)
    await turns()
    assert provider.asked == ["a", "b"]
    assert {type(end) for end in ends} == {LimitReached}
    assert [call.done() for call in calls] == [True, True, False, False, False]
    for call in calls:
        call.cancel()
    await asyncio.wait(calls)


@pytest.mark.parametrize(
    ("answers", "cause", "asked_for", "ends_at"),
    [(0, True, None, 1), (1, True, None, 10), (1, False, None, 0), (0, False, None, 0), (0, True, "named by code", 0)],
)
async def test_failures_that_every_call_would_meet_end_it(
    answers: int, cause: bool, asked_for: str | None, ends_at: int
) -> None:
    """At once before any answer, else after ten in a row. The call that shows it waits, so its item does not fail."""
    ends: list[BaseException] = []
    provider = Provider()
    provider.answers.set()
    metered = ItemCalls(spending=Spending(BatchLimits(max_tokens=100_000), {}, ends.append)).before(provider)
    failed = 0
    for is_answered in [*[True] * answers, *[False] * 3, *[True] * answers, *[False] * 12]:
        provider.error = None if is_answered else ModelFailed("wrong key", is_lasting=cause)
        call = asyncio.ensure_future(metered.complete(CLIENT, request("a", model=asked_for)))
        await until(lambda call=call: call.done() or ends)  # type: ignore[misc]
        failed = 0 if is_answered else failed + 1
        if ends:
            break
    assert bool(ends) == (not call.done()) == bool(ends_at)
    if ends_at:
        assert failed == ends_at
        assert str(ends[0]) == "every call would fail: wrong key"
        assert getattr(ends[0], "is_lasting", False)
        call.cancel()
    await asyncio.wait({call})


async def test_calls_under_way_are_waited_for_and_no_other_is_sent() -> None:
    provider = Provider()
    spending = Spending(BatchLimits(), {}, print)
    metered = ItemCalls(spending=spending).before(provider)
    first, second = begun(metered, "a", "b")
    await until(lambda: len(provider.asked) == 2)
    spending.stop()
    (late,) = begun(metered, "late")
    drained = asyncio.ensure_future(spending.drained(3_600))
    await turns()
    assert not drained.done()
    provider.answers.set()
    await drained
    assert (first.done(), second.done(), late.done()) == (True, True, False)
    assert provider.asked == ["a", "b"]
    late.cancel()
    await asyncio.wait({late})


@pytest.mark.parametrize("hurries", [False, True])
async def test_wait_for_calls_ends(hurries: bool) -> None:
    provider = Provider()
    spending = Spending(BatchLimits(), {}, print)
    (call,) = begun(ItemCalls(spending=spending).before(provider), "a")
    await until(lambda: provider.asked)
    drained = asyncio.ensure_future(spending.drained(3_600 if hurries else 0.001))
    await turns()
    if hurries:
        spending.hurry()
    await drained
    assert not call.done()
    call.cancel()
    await asyncio.wait({call})
