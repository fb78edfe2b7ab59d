"""Ending work at a time limit, with everything below it."""

import asyncio
import contextlib
import time
import types
from collections.abc import Awaitable, Callable, Coroutine, Generator
from typing import Any, TypeVar

T = TypeVar("T")

GRACE_S = 15.0
"""Time in seconds in which the user's code must end after its cancellation; beyond it is closed where it waits."""


class Late(TimeoutError):
    """The limit of `within` or `in_time` was reached. (What the work itself raises may be a TimeoutError, too.)"""


class StopRequested(Exception):
    """The future `stop` of `within` was resolved."""


async def within(limit_s: float | None, work: Coroutine[Any, Any, T], stop: "asyncio.Future[None] | None" = None) -> T:
    """Await `work`. At the limit, at `stop`, or when we are cancelled, it is cancelled once, and its end is awaited.

    Not `asyncio.timeout`: its cancellation may come while another is being heeded, or be followed by one, and a second
    one would hit what is ending the processes.

    Raises:
        Late: It was cancelled at the limit.
        StopRequested: It was cancelled since `stop` was resolved.
    """
    task = asyncio.get_running_loop().create_task(work)
    waits_for: set[asyncio.Future[Any]] = {task} if stop is None else {task, stop}
    cancelled: asyncio.CancelledError | None = None
    try:
        await asyncio.wait(waits_for, timeout=limit_s, return_when=asyncio.FIRST_COMPLETED)
    except asyncio.CancelledError as ours:
        cancelled = ours
    is_cut = not task.done()
    if is_cut:
        task.cancel()
    await _ended(task, cancelled)
    if is_cut and task.cancelled():
        raise StopRequested if stop is not None and stop.done() else Late
    return task.result()


async def to_its_end(work: Callable[[], Coroutine[Any, Any, T]]) -> T:
    """Await what `work` makes, which ends things: when we are cancelled meanwhile it goes on to its end all the same.

    Made in here: were this never started, nobody would close it.

    Raises:
        asyncio.CancelledError: We were.
    """
    task = asyncio.get_running_loop().create_task(work())
    await _ended(task)
    return task.result()


async def _ended(task: "asyncio.Task[Any]", cancelled: asyncio.CancelledError | None = None) -> None:
    """Wait for its end, however often we are cancelled meanwhile, and raise that afterwards."""
    while not task.done():
        try:
            await asyncio.wait({task})
        except asyncio.CancelledError as ours:
            cancelled = ours
    if cancelled is not None:
        if not task.cancelled():
            task.exception()  # nobody waits for it any more
        raise cancelled


@types.coroutine
def in_time(limit_s: float, work: Awaitable[T]) -> Generator[Any, Any, T]:
    """Await `work` in the task that runs. At the limit it is cancelled.

    There is a timer only from where `work` first waits: to work that never does, it would add half its cost again.

    Raises:
        Late: The limit was reached, whatever `work` then raised.
    """
    started = time.monotonic()
    steps = work.__await__()
    try:
        waits_for = next(steps)
    except StopIteration as done:
        result: T = done.value
        return result
    left_s = limit_s - (time.monotonic() - started)
    return (yield from _in_time(left_s, steps, waits_for).__await__())


async def _in_time(limit_s: float, steps: Generator[Any, Any, T], waits_for: object) -> T:
    deadline = asyncio.timeout(limit_s)
    try:
        async with deadline:
            return await _rest(steps, waits_for)
    except Exception as error:
        if deadline.expired():
            raise Late from error
        raise


async def closed_if_deaf(work: Awaitable[T]) -> T:
    """Await `work`, which is the user's code. Once cancelled it has `GRACE_S` to end; then it is closed."""
    return await _all_of(work)


@types.coroutine
def _all_of(work: Awaitable[T]) -> Generator[Any, Any, T]:
    steps = work.__await__()
    try:
        waits_for = next(steps)
    except StopIteration as done:
        result: T = done.value
        return result
    return (yield from _rest(steps, waits_for))


@types.coroutine
def _rest(steps: Generator[Any, Any, T], waits_for: object) -> Generator[Any, Any, T]:
    """Go on with what waits already: what `yield from` does, which begins with a step.

    Once cancelled, it has `GRACE_S` to end. Then it is closed where it waits, and the cancellation goes on: code that
    catches CancelledError would otherwise hold its caller for as long as it likes.
    """
    closing: asyncio.TimerHandle | None = None
    try:
        while True:
            try:
                sent = yield waits_for
            except asyncio.CancelledError as error:
                task, loop = asyncio.current_task(), asyncio.get_running_loop()
                assert task is not None
                if closing is None:
                    closing = loop.call_later(GRACE_S, task.cancel)
                elif closing.when() <= loop.time():
                    task.uncancel()  # that was the timer's
                    with contextlib.suppress(Exception, SystemExit, KeyboardInterrupt, GeneratorExit):
                        steps.close()
                    raise
                waits_for = steps.throw(error)
            except BaseException as error:  # noqa: BLE001 - it is for `steps`
                waits_for = steps.throw(error)
            else:
                waits_for = steps.send(sent)
    except StopIteration as done:
        result: T = done.value
        return result
    finally:
        if closing is not None:
            closing.cancel()
