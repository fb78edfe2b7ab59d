"""`FairSemaphore`: turns of sessions, cancelled turns, and the time that a turn takes."""

import asyncio
import gc
import random
import time
from collections import Counter

import pytest

from rlm_broker.concurrency.fair_semaphore import FairSemaphore
from tests.support.waiting import WAIT_S


async def hold(slots: FairSemaphore, session: str, served: list[str], until: asyncio.Event) -> None:
    await slots.acquire(session)
    try:
        served.append(session)
        await until.wait()
    finally:
        slots.release()


async def test_sessions_take_turns_however_many_each_of_them_wants() -> None:
    """One session queues 10,000 before the others come with 10 each: of the next 40 places, each has its share."""
    slots = FairSemaphore(2)
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


async def test_holders_never_exceed_the_places() -> None:
    """Holders never exceed the places, and all places come back."""
    slots, running, most = FairSemaphore(3), 0, 0

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
async def test_cancelled_task_takes_no_place(when: str) -> None:
    slots = FairSemaphore(1)
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
    await asyncio.wait_for(slots.acquire("next"), WAIT_S)


async def test_holder_and_waiter_cancelled_together_lose_no_place() -> None:
    slots = FairSemaphore(1)
    never = asyncio.Event()
    tasks = [asyncio.create_task(hold(slots, name, [], never)) for name in ("holder", "waiter", "waiter", "other")]
    await asyncio.sleep(0)
    for task in tasks[:3]:
        task.cancel()
    await asyncio.wait(tasks[:3])
    never.set()
    await asyncio.wait_for(tasks[3], WAIT_S)
    await asyncio.wait_for(slots.acquire("next"), WAIT_S)


async def test_all_places_come_back_whenever_tasks_are_cancelled() -> None:
    chance = random.Random(7)
    for _ in range(200):
        slots, opened = FairSemaphore(2), asyncio.Event()
        opened.set()
        tasks = [asyncio.create_task(hold(slots, str(chance.randrange(4)), [], opened)) for _ in range(12)]
        for _ in range(8):
            for task in tasks:
                if chance.random() < 0.15:
                    task.cancel()
            await asyncio.sleep(0)
        await asyncio.wait(tasks, timeout=WAIT_S)
        assert all(task.done() for task in tasks)
        assert (slots.taken, slots.waiting, len(slots._queues)) == (0, 0, 0)


async def _cancelling_s(number: int) -> float:
    """Return the CPU time in seconds of cancelling `number` turns of one session, the last one first."""
    slots = FairSemaphore(1)
    await slots.acquire("holder")
    waiting = [asyncio.create_task(slots.acquire("many")) for _ in range(number)]
    await asyncio.sleep(0)
    gc.collect()
    started = time.thread_time()
    for each in reversed(waiting):
        each.cancel()
    await asyncio.wait(waiting)
    assert slots.waiting == 0
    return time.thread_time() - started


async def test_cancelling_a_turn_takes_constant_time() -> None:
    """A queue that is searched takes up to 16 times as long for 4 times as many turns."""
    few, many = 2_000, 8_000
    growth = []
    for _ in range(3):  # measured again if another process took the processor's caches
        growth.append(await _cancelling_s(many) / await _cancelling_s(few))
        if growth[-1] < 2 * many / few:
            return
    pytest.fail(f"growth: {growth}")


async def test_without_a_bound_no_session_waits() -> None:
    slots = FairSemaphore(None)
    await asyncio.wait_for(asyncio.gather(*(slots.acquire("s") for _ in range(1000))), WAIT_S)


async def test_place_is_immediate_only_without_waiters() -> None:
    """A place is taken at once only if no turn waits for it."""
    places = FairSemaphore(1)
    assert places.take()
    assert not places.take()
    waiting = asyncio.create_task(places.acquire("a"))
    await asyncio.sleep(0)
    places.release()  # the place belongs to the waiting turn from here on, even before its task runs
    assert not places.take()
    await waiting
    places.release()
    assert places.take()
    assert all(FairSemaphore(None).take() for _ in range(3))


async def test_turns_of_a_session_keep_their_order() -> None:
    """Turns of a session keep their order, and a turn that was passed over leaves the rest alone."""
    places = FairSemaphore(1)
    assert places.take() is True
    assert places.take() is False
    first, second, third = (asyncio.create_task(places.acquire("a")) for _ in range(3))
    await asyncio.sleep(0)
    first.cancel()
    places.release()  # before the cancelled task runs: its turn is passed over, and the second turn has the place
    await asyncio.wait({first, second})
    assert first.cancelled()
    assert not second.cancelled()
    assert not third.done()
    assert (places.taken, places.waiting) == (1, 1)
    places.release()
    await third
    assert (places.taken, places.waiting) == (1, 0)
