import asyncio

import pytest

from rlm_broker.deadline import within


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
