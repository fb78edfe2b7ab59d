"""Turns: places, batches, rates and the loop."""

import asyncio
import gc
import itertools
import random
import time
from collections import Counter
from functools import partial

import pytest

from rlm_broker.concurrency.turns import SPAN_S, Apart, FairSemaphore, RateWindow, bounded_map
from tests.support.clock import Clock
from tests.support.waiting import WAIT_S, for_ever, turns


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


async def test_place_is_immediate_only_without_waiters() -> None:
    """A place is taken at once only if no turn waits for it."""
    places = FairSemaphore(1)
    assert (places.take(), places.take()) == (True, False)
    waiting = asyncio.create_task(places.acquire("a"))
    await asyncio.sleep(0)
    places.release()  # the place belongs to the waiting turn from here on, even before its task runs
    assert not places.take()
    await waiting
    places.release()
    assert places.take()
    assert all(FairSemaphore(None).take() for _ in range(3))


async def test_turns_of_a_session_keep_their_order() -> None:
    places = FairSemaphore(1)
    assert places.take()
    first, second, third = (asyncio.create_task(places.acquire("a")) for _ in range(3))
    await asyncio.sleep(0)
    first.cancel()
    places.release()  # before the cancelled task runs: its turn is passed over, and the second turn has the place
    await asyncio.wait({first, second})
    assert (first.cancelled(), second.cancelled(), third.done()) == (True, False, False)
    assert (places.taken, places.waiting) == (1, 1)
    places.release()
    await third
    assert (places.taken, places.waiting) == (1, 0)


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


async def test_late_pieces_are_cancelled_or_never_begin(leaping_clock: Clock) -> None:
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


@pytest.mark.parametrize(
    ("at_once", "waits", "expected"), [(1, False, [0, 64, 128, 192, 200]), (1000, True, [0, 64, 128, 192, 200, 200])]
)
async def test_pieces_and_tasks_begin_64_in_a_row(at_once: int, waits: bool, expected: list[int]) -> None:
    begun = 0

    async def work(_: int) -> None:
        nonlocal begun
        begun += 1
        if waits:
            await for_ever()

    crew = asyncio.create_task(bounded_map(range(200), work, at_once))
    seen = []
    for _ in expected:
        await asyncio.sleep(0)
        seen.append(begun)
    assert seen == expected
    crew.cancel()
    await asyncio.wait({crew})


@pytest.mark.parametrize("at_once", [1, 2])
async def test_batches_sharing_a_place_take_turns(at_once: int) -> None:
    places, done = FairSemaphore(1), list[str]()

    async def work(piece: str) -> None:
        done.append(piece)
        await turns(2)

    batches = (bounded_map([name] * 4, work, at_once, places=places, session=name) for name in ("a", "b"))
    await asyncio.wait_for(asyncio.gather(*batches), WAIT_S)
    runs = [len(list(run)) for _, run in itertools.groupby(done)]
    assert done.count("a") == done.count("b") == 4
    assert runs == [1] * 8 if at_once == 1 else max(runs) <= 2  # the first batch queues for its second worker, too
    assert (places.taken, places.waiting) == (0, 0)


async def test_batch_uses_a_task_for_each_place() -> None:
    places, workers = FairSemaphore(2), set()

    async def work(_: int) -> None:
        workers.add(asyncio.current_task())
        await turns(1)

    await asyncio.wait_for(bounded_map(range(20), work, 5, places=places, session="a"), WAIT_S)
    assert len(workers) == 2
    assert (places.taken, places.waiting) == (0, 0)


async def test_error_of_a_piece_is_raised() -> None:
    async def work(_: int) -> None:
        raise TimeoutError("mine")

    with pytest.raises(ExceptionGroup) as raised:
        await bounded_map([1], work, 1, timeout_s=60)
    assert [str(error) for error in raised.value.exceptions] == ["mine"]


def test_window_has_room_until_the_bound() -> None:
    """An entry above the bound passes alone."""
    window, large, unbounded = RateWindow(3), RateWindow(100), RateWindow(None)
    for now in (0.0, 10.0, 20.0):
        assert window.wait_s(1, now) == 0
        window.use(1, now)
    assert [window.wait_s(1, 20.0), window.wait_s(2, 20.0), window.wait_s(1, 60.0)] == [40, 50, 0]
    assert large.wait_s(500, 0) == 0
    large.use(500, 0)
    assert (large.wait_s(1, 1), large.wait_s(500, SPAN_S)) == (SPAN_S - 1, 0)
    for _ in range(100):
        unbounded.use(1e9, 0)
    assert unbounded.wait_s(1e9, 0) == 0


def test_estimate_is_corrected_only_in_the_window() -> None:
    """An estimate is corrected while it counts and not afterwards."""
    window = RateWindow(100)
    entry = window.use(90, 0)
    window.correct(entry, 10)
    assert window.wait_s(90, 1) == 0
    late = window.use(90, 2)
    assert window.wait_s(20, 3) == SPAN_S + 2 - 3
    assert window.wait_s(100, 70) == 0
    window.correct(late, 1_000)
    assert window.wait_s(100, 71) == 0


def test_no_minute_ever_holds_more_than_the_bound() -> None:
    rng = random.Random(7)
    window, now, passed = RateWindow(50), 0.0, list[tuple[float, float]]()
    for _ in range(2_000):
        amount = rng.choice([1, 3, 10])
        now += window.wait_s(amount, now)
        assert window.wait_s(amount, now) == 0
        window.use(amount, now)
        passed.append((now, amount))
        now += rng.choice([0, 0, 0.1, 5])
    for start, _ in passed:
        assert sum(amount for when, amount in passed if start <= when < start + SPAN_S) <= 50


async def test_no_two_pieces_share_a_turn() -> None:
    turn, apart = 0, Apart()
    done_in: list[int] = []

    async def count_turns() -> None:
        nonlocal turn
        while True:
            turn += 1
            await asyncio.sleep(0)

    counting = asyncio.create_task(count_turns())
    await asyncio.gather(*(apart.do(lambda: done_in.append(turn)) for _ in range(20)))
    counting.cancel()
    assert len(done_in) == len(set(done_in)) == 20


async def test_cancelled_piece_is_done_all_the_same() -> None:
    apart = Apart()
    done: list[int] = []
    tasks = [asyncio.create_task(apart.do(partial(done.append, number))) for number in range(3)]
    await asyncio.sleep(0)
    tasks[2].cancel()
    with pytest.raises(asyncio.CancelledError):
        await tasks[2]
    await asyncio.gather(*tasks[:2])
    assert sorted(done) == [0, 1, 2]
