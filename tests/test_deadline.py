import asyncio
import time

import pytest

from rlm_broker.deadline import Late, in_time, to_its_end, within


async def test_work_in_time_gives_its_value_or_its_error() -> None:
    async def fails() -> None:
        raise KeyError("mine")

    assert await within(60, asyncio.sleep(0, "done")) == "done"
    assert await within(None, asyncio.sleep(0, "done")) == "done"
    with pytest.raises(KeyError, match="mine"):
        await within(60, fails())


async def test_at_the_limit_the_work_is_cancelled_once_and_its_end_awaited() -> None:
    cancellations = 0

    async def tidies_up() -> None:
        nonlocal cancellations
        try:
            await asyncio.sleep(60)
        except asyncio.CancelledError:
            cancellations += 1
            await asyncio.sleep(0.05)
            raise

    with pytest.raises(TimeoutError):
        await within(0.01, tidies_up())
    assert cancellations == 1


async def test_a_cancellation_while_it_ends_hits_only_us() -> None:
    ended = asyncio.Event()

    async def tidies_up() -> None:
        try:
            await asyncio.sleep(60)
        finally:
            await asyncio.sleep(0.1)
            ended.set()

    task = asyncio.create_task(within(0.01, tidies_up()))
    await asyncio.sleep(0.05)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert ended.is_set()


async def test_a_result_that_was_just_in_time_counts() -> None:
    async def late() -> str:
        try:
            await asyncio.sleep(60)
        except asyncio.CancelledError:
            return "saved"
        return ""

    assert await within(0.01, late()) == "saved"


# -- in the task that runs -------------------------------------------------------------------------------------------


def timers() -> int:
    """Of the loop that runs."""
    return sum(not timer.cancelled() for timer in asyncio.get_running_loop()._scheduled)  # type: ignore[attr-defined]


async def test_work_that_never_waits_gives_its_value_or_its_error_and_sets_no_timer() -> None:
    async def at_once() -> str:
        assert timers() == 0
        return "done"

    async def fails() -> None:
        raise KeyError("mine")

    assert await in_time(60, at_once()) == "done"
    with pytest.raises(KeyError, match="mine"):
        await in_time(60, fails())


async def test_work_that_waits_again_and_again_goes_on_in_its_own_task() -> None:
    async def waits() -> list[object]:
        before = asyncio.current_task()
        await asyncio.sleep(0)
        assert timers() == 1
        async with asyncio.timeout(60):
            told = await asyncio.sleep(0.001, "told")
        try:
            await asyncio.wait_for(asyncio.sleep(60), 0.001)
        except TimeoutError:
            told += " late"
        return [told, asyncio.current_task() is before]

    assert await in_time(60, waits()) == ["told late", True]
    assert await in_time(60, asyncio.ensure_future(asyncio.sleep(0.001, "a future"))) == "a future"
    assert timers() == 0


async def test_at_the_limit_work_that_waits_is_cancelled_and_its_end_awaited() -> None:
    ended: list[str] = []

    async def tidies_up(how: str) -> None:
        try:
            await asyncio.sleep(60)
        finally:
            await asyncio.sleep(0.01)
            ended.append(how)
            if how == "with another error":
                raise KeyError(how)

    for how in ("as it was told", "with another error"):
        with pytest.raises(Late):
            await in_time(0.01, tidies_up(how))
    assert ended == ["as it was told", "with another error"]
    await asyncio.sleep(0)  # no cancellation is left over


async def test_the_time_counts_from_the_start_and_not_from_the_first_wait() -> None:
    async def blocks() -> None:
        time.sleep(0.06)
        await asyncio.sleep(60)

    started = time.monotonic()
    with pytest.raises(Late):
        await in_time(0.05, blocks())
    assert time.monotonic() - started < 0.1


async def test_a_timeout_or_a_cancellation_that_is_not_ours_is_passed_on() -> None:
    async def own() -> None:
        await asyncio.sleep(0)
        raise TimeoutError("its own")

    with pytest.raises(TimeoutError, match="its own"):
        await in_time(60, own())
    cancelled: list[str] = []
    task = asyncio.create_task(in_time_of_a_minute(cancelled))
    await asyncio.sleep(0.01)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert cancelled == ["once"]


async def in_time_of_a_minute(cancelled: list[str]) -> None:
    async def work() -> None:
        try:
            await asyncio.sleep(60)
        except asyncio.CancelledError:
            cancelled.append("once")
            raise

    await in_time(60, work())


async def test_what_ends_things_goes_to_its_end_however_often_it_is_cancelled() -> None:
    done: list[str] = []

    async def end() -> str:
        for step in ("one", "two", "three"):
            await asyncio.sleep(0.01)
            done.append(step)
        return "ended"

    assert await to_its_end(end) == "ended"
    done.clear()
    ending = asyncio.create_task(to_its_end(end))
    for _ in range(3):
        await asyncio.sleep(0.005)
        ending.cancel()
    await asyncio.wait({ending})
    assert ending.cancelled()
    assert done == ["one", "two", "three"]
