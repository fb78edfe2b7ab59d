"""Who gets the next place."""

import asyncio
from collections import Counter

import pytest

from rlm_broker.handler.fair import FairSlots


async def hold(slots: FairSlots, session: str, served: list[str], until: asyncio.Event) -> None:
    await slots.acquire(session)
    try:
        served.append(session)
        await until.wait()
    finally:
        slots.release()


async def test_sessions_take_turns_however_many_each_of_them_wants() -> None:
    """One session queues 10,000 before the others come with 10 each: of the next 40 places, each has its share."""
    slots = FairSlots(2)
    served: list[str] = []
    opened = asyncio.Event()
    opened.set()
    await slots.acquire("first")
    await slots.acquire("first")
    greedy = [asyncio.create_task(hold(slots, "greedy", served, opened)) for _ in range(10_000)]
    await asyncio.sleep(0)
    modest = [asyncio.create_task(hold(slots, name, served, opened)) for _ in range(10) for name in ("b", "c", "d")]
    await asyncio.sleep(0)
    assert served == []
    slots.release()
    slots.release()
    await asyncio.gather(*modest)
    assert Counter(served[:40]) == {"greedy": 10, "b": 10, "c": 10, "d": 10}
    await asyncio.gather(*greedy)
    assert len(served) == 10_030


async def test_never_more_than_the_places_hold_them_and_all_come_back() -> None:
    slots, running, most = FairSlots(3), 0, 0

    async def work(number: int) -> None:
        nonlocal running, most
        await slots.acquire(number % 7)
        running += 1
        most = max(most, running)
        await asyncio.sleep(0)
        running -= 1
        slots.release()

    for _ in range(2):
        await asyncio.gather(*map(work, range(200)))
    assert (most, running) == (3, 0)


@pytest.mark.parametrize("when", ["while it waits", "in the moment of its turn"])
async def test_whoever_is_cancelled_takes_no_place_with_it(when: str) -> None:
    slots = FairSlots(1)
    await slots.acquire("holder")
    waiting = asyncio.create_task(slots.acquire("cancelled"))
    await asyncio.sleep(0)
    if when == "in the moment of its turn":
        slots.release()
    waiting.cancel()
    await asyncio.wait({waiting})
    assert waiting.cancelled()
    if when == "while it waits":
        slots.release()
    await asyncio.wait_for(slots.acquire("next"), 5)


async def test_without_a_bound_nobody_waits() -> None:
    slots = FairSlots(None)
    await asyncio.wait_for(asyncio.gather(*(slots.acquire("s") for _ in range(1000))), 5)


async def test_a_place_is_taken_at_once_only_where_nobody_waits_for_it() -> None:
    places = FairSlots(1)
    assert places.take()
    assert not places.take()
    waiting = asyncio.create_task(places.acquire("a"))
    await asyncio.sleep(0)
    places.release()  # it is the waiting one's from here on, even before that runs
    assert not places.take()
    await waiting
    places.release()
    assert places.take()
    assert all(FairSlots(None).take() for _ in range(3))
