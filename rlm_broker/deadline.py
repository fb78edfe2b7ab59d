"""Ending work at a time limit, with everything below it."""

import asyncio
from collections.abc import Coroutine
from typing import Any, TypeVar

T = TypeVar("T")


class Late(TimeoutError):
    """The limit of `within` was reached. (What the work itself raises may be a TimeoutError, too.)"""


async def within(limit_s: float | None, work: Coroutine[Any, Any, T]) -> T:
    """Await `work`. At the limit, or when we are cancelled, it is cancelled once, and its end is awaited.

    Not `asyncio.timeout`: its cancellation may come while another is being heeded, or be followed by one, and a second
    one would hit what is ending the processes.

    Raises:
        Late: It was cancelled at the limit.
    """
    task = asyncio.get_running_loop().create_task(work)
    cancelled: asyncio.CancelledError | None = None
    try:
        await asyncio.wait({task}, timeout=limit_s)
    except asyncio.CancelledError as ours:
        cancelled = ours
    is_late = not task.done()
    if is_late:
        task.cancel()
    while not task.done():
        try:
            await asyncio.wait({task})
        except asyncio.CancelledError as ours:
            cancelled = ours
    if cancelled is not None:
        if not task.cancelled():
            task.exception()  # nobody waits for it any more
        raise cancelled
    if is_late and task.cancelled():
        raise Late
    return task.result()
