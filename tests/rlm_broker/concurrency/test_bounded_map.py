"""`bounded_map`: order of results, bounds on what runs at once, time limits and cancellation."""

import asyncio
import itertools

import pytest

from rlm_broker.concurrency.bounded_map import IN_A_ROW, bounded_map
from rlm_broker.concurrency.fair_semaphore import FairSemaphore
from tests.support.clock import Clock
from tests.support.waiting import WAIT_S, for_ever, turns


async def test_results_keep_order_under_the_bound() -> None:
    """Results come in the order of the work, and at most the given number of pieces is busy."""
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


@pytest.mark.parametrize("at_once", [1, 3, 16, 100, 1000])
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


async def test_late_pieces_are_cancelled_or_never_begin(leaping_clock: Clock) -> None:
    """A late piece is cancelled, and a piece that has not begun never begins."""
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


async def test_cancelled_batch_cancels_each_piece_once() -> None:
    """A cancelled batch cancels its pieces once and begins no more."""
    begun = cancelled = 0

    async def work(_: int) -> None:
        nonlocal begun, cancelled
        begun += 1
        try:
            await for_ever()
        except asyncio.CancelledError:
            cancelled += 1  # and goes on in spite of the cancellation

    crew = asyncio.create_task(bounded_map(range(50), work, 4))
    await turns()
    crew.cancel()
    with pytest.raises(asyncio.CancelledError):
        await crew
    assert (begun, cancelled) == (4, 4)


async def test_pieces_that_never_wait_run_64_in_a_row() -> None:
    done = 0

    async def work(_: int) -> None:
        nonlocal done
        done += 1

    crew = asyncio.create_task(bounded_map(range(200), work, 1))
    seen = []
    while not crew.done():
        await asyncio.sleep(0)
        seen.append(done)
    assert [later - before for before, later in itertools.pairwise([0, *seen]) if later > before] == [64, 64, 64, 8]


async def test_tasks_are_started_64_in_a_row() -> None:
    begun = 0

    async def work(_: int) -> None:
        nonlocal begun
        begun += 1
        await for_ever()

    crew = asyncio.create_task(bounded_map(range(200), work, 1000))
    seen = []
    for _ in range(6):
        await asyncio.sleep(0)
        seen.append(begun)
    assert seen == [0, 64, 128, 192, 200, 200]
    crew.cancel()
    await asyncio.wait({crew})


@pytest.mark.parametrize("at_once", [1, 2])
async def test_batches_sharing_a_place_take_turns(at_once: int) -> None:
    """Batches that share a place take turns piece by piece."""
    places = FairSemaphore(1)
    done: list[str] = []

    async def work(piece: str) -> None:
        done.append(piece)
        await turns(2)

    async with asyncio.timeout(WAIT_S):
        await asyncio.gather(
            *(bounded_map([name] * 4, work, at_once, places=places, session=name) for name in ("a", "b"))
        )
    runs = [len(list(run)) for _, run in itertools.groupby(done)]
    assert done.count("a") == done.count("b") == 4
    assert runs == [1] * 8 if at_once == 1 else max(runs) <= 2  # the first batch queues for its second worker, too
    assert (places.taken, places.waiting) == (0, 0)


async def test_batch_uses_a_task_for_each_place() -> None:
    """An undisturbed batch uses one task for each place and gives all places back."""
    places = FairSemaphore(2)
    workers = set()

    async def work(_: int) -> None:
        workers.add(asyncio.current_task())
        await turns(1)

    async with asyncio.timeout(WAIT_S):
        await bounded_map(range(20), work, 5, places=places, session="a")
    assert len(workers) == 2
    assert (places.taken, places.waiting) == (0, 0)


async def test_error_of_a_piece_is_raised() -> None:
    """The error of a piece is raised, even if it is a timeout."""

    async def work(_: int) -> None:
        raise TimeoutError("mine")

    with pytest.raises(ExceptionGroup) as raised:
        await bounded_map([1], work, 1, timeout_s=60)
    assert [str(error) for error in raised.value.exceptions] == ["mine"]
