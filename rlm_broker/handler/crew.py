"""Much work for a few workers: as many tasks as may be busy at once, however much there is to do."""

import asyncio
import math
import time
from collections import deque
from collections.abc import Awaitable, Callable, Sequence
from typing import TypeVar

T = TypeVar("T")
R = TypeVar("R")

IN_A_ROW = 64
"""Pieces of work that are done without any waiting: then it is everybody else's turn."""


async def work_off(
    todo: Sequence[T], work: Callable[[T], Awaitable[R]], at_once: int, timeout_s: float | None = None
) -> list[R | None]:
    """Await `work` for each of `todo`, `at_once` at the same time, in the order of `todo`.

    Returns:
        The results in the same order; None for what was not done within `timeout_s`. That has been cancelled.
    """
    if not todo:
        return []
    results: list[R | None] = [None] * len(todo)
    waiting = deque(enumerate(todo))
    workers = min(at_once, len(todo))
    in_a_row = max(1, IN_A_ROW // workers)

    async def work_on() -> None:
        done = 0
        while waiting:
            place, each = waiting.popleft()
            results[place] = await work(each)
            done += 1
            if done % in_a_row == 0:
                await asyncio.sleep(0)

    ends_at = math.inf if timeout_s is None else time.monotonic() + timeout_s
    async with asyncio.TaskGroup() as group:
        tasks: list[asyncio.Task[None]] = []
        try:
            while waiting and len(tasks) < workers and time.monotonic() < ends_at:
                tasks.append(group.create_task(work_on()))
                if len(tasks) % IN_A_ROW == 0:
                    await asyncio.sleep(0)
            left_s = None if timeout_s is None else max(0.0, ends_at - time.monotonic())
            _, late = await asyncio.wait(tasks, timeout=left_s)
        finally:
            waiting.clear()  # or a worker whose work does not heed that it is cancelled would go on with the next
        for task in late:
            task.cancel()
    return results
