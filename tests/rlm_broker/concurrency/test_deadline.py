import asyncio
import contextlib
import gc
import time
from typing import Any

import pytest

from rlm_broker.concurrency import deadline
from rlm_broker.concurrency.deadline import Late, in_time, to_its_end, within
from tests.support.clock import Clock
from tests.support.waiting import for_ever, turns

pytestmark = pytest.mark.usefixtures("leaping_clock")


async def fails() -> None:
    raise KeyError("mine")


async def test_work_in_time_gives_its_value_or_its_error() -> None:
    assert await within(60, asyncio.sleep(0, "done")) == "done"
    assert await within(None, asyncio.sleep(0, "done")) == "done"
    for limit in (within(60, fails()), in_time(60, fails())):
        with pytest.raises(KeyError, match="mine"):
            await limit


async def test_work_that_never_waits_sets_no_timer() -> None:
    async def at_once() -> str:
        assert timers() == 0
        return "done"

    assert await in_time(60, at_once()) == "done"


async def test_work_is_cancelled_once_at_the_limit() -> None:
    """A result that comes in spite of it counts."""
    cancellations = 0

    async def tidies_up(result: str | None) -> str:
        nonlocal cancellations
        try:
            await for_ever()
        except asyncio.CancelledError:
            cancellations += 1
            await asyncio.sleep(50)
            if result is None:
                raise
        return result or ""

    with pytest.raises(TimeoutError):
        await within(10, tidies_up(None))
    assert cancellations == 1
    assert await within(10, tidies_up("saved")) == "saved"


async def test_cancellation_while_work_ends_hits_only_the_caller() -> None:
    ending, ended = asyncio.Event(), asyncio.Event()

    async def tidies_up() -> None:
        try:
            await for_ever()
        finally:
            ending.set()
            await asyncio.sleep(10)
            ended.set()

    task = asyncio.create_task(within(10, tidies_up()))
    await ending.wait()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert ended.is_set()


# -- `in_time`: in the caller's task ----------------------------------------------------------------------------------


def timers() -> int:
    """Number of timers of the running loop that are set and not cancelled."""
    return sum(not timer.cancelled() for timer in asyncio.get_running_loop()._scheduled)  # type: ignore[attr-defined]


async def test_work_that_waits_often_stays_in_its_task() -> None:
    async def waits() -> list[object]:
        before = asyncio.current_task()
        await asyncio.sleep(0)
        assert timers() == 1
        async with asyncio.timeout(60):
            told = await asyncio.sleep(1, "told")
        try:
            await asyncio.wait_for(for_ever(), 1)
        except TimeoutError:
            told += " late"
        return [told, asyncio.current_task() is before]

    assert await in_time(60, waits()) == ["told late", True]
    assert await in_time(60, asyncio.ensure_future(asyncio.sleep(1, "a future"))) == "a future"
    assert timers() == 0


async def test_waiting_work_is_cancelled_at_the_limit() -> None:
    ended: list[str] = []

    async def tidies_up(how: str) -> None:
        try:
            await for_ever()
        finally:
            await asyncio.sleep(10)
            ended.append(how)
            if how == "with another error":
                raise KeyError(how)

    for how in ("as it was told", "with another error"):
        with pytest.raises(Late):
            await in_time(10, tidies_up(how))
    assert ended == ["as it was told", "with another error"]
    await asyncio.sleep(0)  # a cancellation that was left over would be raised here


async def test_time_counts_from_the_start(clock: Clock) -> None:
    async def blocks() -> None:
        clock.forward(60)
        await for_ever()

    started = time.monotonic()
    with pytest.raises(Late):
        await in_time(50, blocks())
    assert time.monotonic() - started == pytest.approx(60)


async def test_foreign_timeout_or_cancellation_is_passed_on() -> None:
    cancelled: list[str] = []

    async def own() -> None:
        await asyncio.sleep(0)
        raise TimeoutError("its own")

    async def work() -> None:
        try:
            await for_ever()
        except asyncio.CancelledError:
            cancelled.append("once")
            raise

    with pytest.raises(TimeoutError, match="its own"):
        await in_time(60, own())
    task = asyncio.create_task(in_time(60, work()))
    await turns()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert cancelled == ["once"]


async def cleaned_up(done: list[str]) -> str:
    for step in ("one", "two", "three"):
        await turns()
        done.append(step)
    return "ended"


async def test_cleanup_finishes_despite_cancellations() -> None:
    """Work that cleans up runs to its end, however often it is cancelled."""
    done: list[str] = []
    assert await to_its_end(lambda: cleaned_up(done)) == "ended"
    done.clear()
    ending = asyncio.create_task(to_its_end(lambda: cleaned_up(done)))
    for _ in range(3):
        await asyncio.sleep(0)
        ending.cancel()
    await asyncio.wait({ending})
    assert ending.cancelled()
    assert done == ["one", "two", "three"]


def test_cleanup_outlives_the_end_of_its_loop() -> None:
    """`asyncio.run` cancels all tasks when it ends, those of a clean-up among them, and waits for its end."""
    done: list[str] = []

    async def main() -> None:
        ending = asyncio.create_task(to_its_end(lambda: cleaned_up(done)))
        await asyncio.sleep(0)
        assert not ending.done()

    asyncio.run(main())
    assert done == ["one", "two", "three"]


async def _deaf(ended: asyncio.Event) -> str:
    """Ignore every cancellation; end only once `ended` is set."""
    try:
        while True:
            with contextlib.suppress(asyncio.CancelledError):
                await asyncio.sleep(600)
    finally:
        ended.set()


@pytest.mark.parametrize("way", ["in_time", "within", "cancelled"])
async def test_work_ignoring_cancellation_is_closed_after_a_grace(way: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(deadline, "GRACE_S", 0.05)
    ended, task = asyncio.Event(), asyncio.current_task()
    assert task is not None
    if way == "cancelled":
        caller = asyncio.create_task(in_time(600, _deaf(ended)))
        await asyncio.sleep(0)
        caller.cancel()
        with pytest.raises(asyncio.CancelledError):
            await asyncio.wait_for(asyncio.shield(caller), 60)
    else:
        deaf = _deaf(ended)
        with pytest.raises(Late):
            await (in_time(0.01, deaf) if way == "in_time" else within(0.01, deadline.closed_if_deaf(deaf)))
    assert ended.is_set()
    assert task.cancelling() == 0


async def test_deaf_work_has_fifteen_seconds_after_its_limit() -> None:
    started = time.monotonic()
    with pytest.raises(Late):
        await in_time(10, _deaf(asyncio.Event()))
    assert time.monotonic() - started == pytest.approx(25)


async def test_error_after_own_cancellation_is_not_reported() -> None:
    told: list[dict[str, Any]] = []
    asyncio.get_running_loop().set_exception_handler(lambda _loop, context: told.append(context))

    async def fails_at_its_end() -> None:
        try:
            await for_ever()
        finally:
            raise KeyError("mine")

    task = asyncio.create_task(within(60, fails_at_its_end()))
    await turns()
    task.cancel()
    await asyncio.wait({task})
    assert task.cancelled()
    del task
    gc.collect()
    assert told == []
