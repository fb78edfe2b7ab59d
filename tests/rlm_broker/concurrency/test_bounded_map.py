"""Much work, few workers."""

import asyncio
import itertools

import pytest

from rlm_broker.concurrency.bounded_map import IN_A_ROW, bounded_map
from tests.support.clock import Clock
from tests.support.waiting import for_ever, turns


async def test_results_come_in_the_order_of_the_work_and_so_many_are_busy_at_once() -> None:
    busy = most = 0

    async def work(number: int) -> str:
        nonlocal busy, most
        busy += 1
        most = max(most, busy)
        await turns(number % 3)
        busy -= 1
        return str(number)

    assert await bounded_map(range(20), work, 3) == [str(number) for number in range(20)]
    assert most == 3
    assert await bounded_map([1], work, 99) == ["1"]
    assert await bounded_map([], work, 3) == []


@pytest.mark.parametrize("at_once", [1, 3, 16, 1000])
async def test_work_that_never_waits_lets_others_in_between(at_once: int) -> None:
    done = 0

    async def work(_: int) -> None:
        nonlocal done
        done += 1

    crew = asyncio.create_task(bounded_map(range(1000), work, at_once))
    seen = [0]
    while not crew.done():
        await asyncio.sleep(0)
        seen.append(done)
    longest = max(later - before for before, later in itertools.pairwise(seen))
    assert done == 1000
    assert longest <= max(IN_A_ROW, at_once)


async def test_what_is_late_is_cancelled_and_what_has_not_begun_never_does(leaping_clock: Clock) -> None:
    del leaping_clock
    begun: list[int] = []
    heard: list[int] = []

    async def work(number: int) -> str:
        begun.append(number)
        try:
            if number:
                await for_ever()
        except asyncio.CancelledError:
            heard.append(number)
            if number == 1:
                return "all the same"
            raise
        return "in time"

    assert await bounded_map(range(9), work, 2, timeout_s=5) == ["in time", "all the same", *[None] * 7]
    assert begun == [0, 1, 2]
    assert sorted(heard) == [1, 2]


async def test_whoever_is_cancelled_cancels_once_and_nothing_begins_after_it() -> None:
    begun = cancelled = 0

    async def work(_: int) -> None:
        nonlocal begun, cancelled
        begun += 1
        try:
            await for_ever()
        except asyncio.CancelledError:
            cancelled += 1  # and it does not heed it

    crew = asyncio.create_task(bounded_map(range(50), work, 4))
    await turns()
    crew.cancel()
    with pytest.raises(asyncio.CancelledError):
        await crew
    assert (begun, cancelled) == (4, 4)
