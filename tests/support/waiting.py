"""Waiting for what happens, however long a busy machine takes to do it.

No test compares elapsed time with a fixed number: it waits for an event, and fails at a deadline that only a defect
reaches.
"""

import asyncio
import time
from collections.abc import Callable
from typing import NoReturn, TypeVar

T = TypeVar("T")

WAIT_S = 60
"""Seconds until a test that waits for an event fails."""
LONGER_AND_LONGER = (1, 5, 25)
"""Limits in seconds to try one after the other, where something must happen within a limit that is then reached: a busy
machine that is too slow for the first is not for the last."""
_LOOK_AGAIN_S = 0.005


async def until(is_so: Callable[[], object]) -> None:
    """Let the loop run until `is_so()`.

    Raises:
        TimeoutError: It was not so within `WAIT_S`.
    """
    async with asyncio.timeout(WAIT_S):
        while not is_so():
            await asyncio.sleep(_LOOK_AGAIN_S)


def until_now(is_so: Callable[[], object]) -> None:
    """Block the calling thread until `is_so()`.

    Raises:
        TimeoutError: It was not so within `WAIT_S`.
    """
    deadline = time.monotonic() + WAIT_S
    while not is_so():
        if time.monotonic() > deadline:
            raise TimeoutError
        time.sleep(_LOOK_AGAIN_S)


def within_longer(attempt: Callable[[float], T], is_so: Callable[[T], object], first_s: float = 0.3) -> T:
    """Attempt something within longer and longer limits, and return the first outcome that is so, or the last one.

    Code that has to come to a certain point before its limit has not come there on a busy machine, however long the
    limit usually is.

    Args:
        attempt: Is called with a limit in seconds.
        is_so: Whether an outcome is that of code which had come to its point.
        first_s: First limit in seconds.
    """
    for limit_s in (first_s, *LONGER_AND_LONGER):
        outcome = attempt(limit_s)
        if is_so(outcome):
            break
    return outcome


async def turns(number: int = 5) -> None:
    """Let everything that can run on the loop do so, this many times."""
    for _ in range(number):
        await asyncio.sleep(0)


async def for_ever() -> NoReturn:
    """Wait until the task is cancelled."""
    await asyncio.get_running_loop().create_future()
    raise AssertionError("this future is never set")
