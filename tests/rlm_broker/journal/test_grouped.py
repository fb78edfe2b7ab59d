"""Work that a thread does for many at a time."""

import asyncio
import threading
from collections.abc import Sequence

import pytest

from rlm_broker.journal.grouped import Grouped
from tests.support.waiting import until


async def test_entries_that_come_meanwhile_are_one_group() -> None:
    groups: list[list[int]] = []
    first, go_on = asyncio.Event(), threading.Event()
    loop = asyncio.get_running_loop()

    def work(entries: Sequence[int]) -> None:
        groups.append(list(entries))
        loop.call_soon_threadsafe(first.set)
        go_on.wait()

    grouped = Grouped(work, print, "test")
    tasks = [asyncio.ensure_future(grouped.done(0))]
    await first.wait()
    tasks += [asyncio.ensure_future(grouped.done(number)) for number in range(1, 4)]
    await asyncio.sleep(0)
    assert not any(task.done() for task in tasks)
    go_on.set()
    await asyncio.gather(*tasks)
    await grouped.aclose()
    assert groups == [[0], [1, 2, 3]]


async def test_close_does_the_work_that_was_handed_over() -> None:
    done: list[int] = []
    grouped = Grouped(done.extend, print, "test-close")
    for number in range(100):
        grouped.put(number)
    await grouped.aclose()
    await grouped.aclose()
    assert done == list(range(100))
    await until(lambda: "test-close" not in [thread.name for thread in threading.enumerate()])


async def test_failure_is_told_once_and_ends_the_thread() -> None:
    failures: list[BaseException] = []

    def work(_: Sequence[int]) -> None:
        raise IndexError

    grouped = Grouped(work, failures.append, "test-failure")
    waiting = [asyncio.ensure_future(grouped.done(number)) for number in range(3)]
    await until(lambda: bool(failures))
    await grouped.aclose()
    assert [type(failure) for failure in failures] == [IndexError]
    for task in waiting:
        with pytest.raises(IndexError):
            await task
    with pytest.raises(IndexError):
        await grouped.done(4)
