"""Events of one response, for many followers."""

import asyncio
import json

import pytest

from rlm_broker.serve.errors import ApiError
from rlm_broker.serve.responses.store import ResponseEvents


async def numbers(journal: ResponseEvents, after: int = -1) -> list[int]:
    lines = [event.split(b"data: ")[1] async for event in journal.follow(after)]
    return [json.loads(line)["sequence_number"] for line in lines]


async def test_journal_is_the_same_for_all_followers() -> None:
    """A follower gets all events, whether it comes before them, among them, or after the end."""
    journal = ResponseEvents()
    early = asyncio.ensure_future(numbers(journal))
    await asyncio.sleep(0)
    journal.add("a", {})
    journal.add("b", {"x": 1})
    amid = asyncio.ensure_future(numbers(journal))
    await asyncio.sleep(0)
    journal.add("c", {})
    journal.close()
    assert await early == await amid == await numbers(journal) == [0, 1, 2]
    assert await numbers(journal, after=1) == [2]
    assert await numbers(journal, after=2) == []


async def test_journal_says_which_events_were_dropped() -> None:
    journal = ResponseEvents(most_bytes=1_000)
    for number in range(100):
        journal.add("a", {"text": "x" * 50, "number": number})
    journal.close()
    assert journal.bytes <= 1_000
    with pytest.raises(ApiError, match="start after 9") as refused:
        journal.require(-1)
    assert refused.value.status == 410
    first = 100 - len(journal.events())
    assert await numbers(journal, after=first - 1) == list(range(first, 100))


async def test_journal_tells_a_slow_follower_what_it_missed() -> None:
    journal = ResponseEvents(most_bytes=1_000)
    journal.add("a", {})
    following = aiter(journal.follow())
    await anext(following)
    for _ in range(100):
        journal.add("a", {"text": "x" * 50})
    with pytest.raises(ApiError, match="were dropped"):
        await anext(following)


async def test_journal_refuses_a_number_to_come() -> None:
    journal = ResponseEvents()
    journal.add("a", {})
    journal.require(0)
    with pytest.raises(ApiError, match="no event 7 yet"):
        journal.require(7)


async def test_journal_forgets_a_follower_that_left() -> None:
    journal = ResponseEvents()
    following = asyncio.ensure_future(numbers(journal))
    await asyncio.sleep(0)
    following.cancel()
    await asyncio.wait({following})
    assert not journal._waiting
