"""Time limits that end work together with everything that the work started.

Theory of operation
-------------------
A run ends processes, sockets and temporary files in `finally` blocks. A time limit is correct only if these blocks run
to their end exactly once. `asyncio.timeout` alone does not guarantee that, for three reasons:

1. It cancels the task it is used in. The caller may cancel the same task a moment before or after. The second
   CancelledError is then raised inside a `finally` block, at its next `await`, and processes stay alive.
2. It waits for work of any kind. Code of the user's (a tool, a model client) may catch CancelledError and go on, and so
   hold its caller without limit.
3. It turns CancelledError into TimeoutError, and no other exception. Client libraries catch the cancellation and raise
   errors of their own, and the caller would see these and no time limit. A TimeoutError of the work's own looks like
   the limit.

The functions here, by what is awaited after a cancel:

- `within` gives the work a task of its own, cancels that task at most once, and awaits its end without limit.
  `asyncio.wait` cancels nothing, so a cancellation of the caller reaches the caller alone. It is remembered, and raised
  once the task has ended. Used for work with processes below it.
- `to_its_end` does the same for clean-up, and never cancels it.
- Both make an `unlisted` task. `asyncio.run` cancels all listed tasks of its loop when it ends, as it does after a
  second Ctrl+C.
- `in_time` stays in the caller's task and sets one timer: a request takes 25 to 35 microseconds in all, too few to add
  a task of its own. It uses `asyncio.timeout`, and answers points 2 and 3.
- `closed_if_deaf` answers point 2 alone, for code of the user's inside `within`.

Races:

- If work ends in the loop iteration in which the limit fires, it was in time: its result or error counts (`within`).
- If work returns a result after its cancellation, the result counts, since it was paid for. Only work that ends
  cancelled is `Late` (`within`); an error after the limit is `Late` in `in_time`.
- A cancellation of the caller wins over the result of the work and over the limit (`within`).

Rejected: `asyncio.wait_for`, since in Python 3.11 it leaves the work running if its caller is cancelled twice, and
since 3.12 is `asyncio.timeout`; `asyncio.shield` alone, since the caller goes on while the work still runs.

Sources: CPython, Lib/asyncio/timeouts.py (`Timeout.__aexit__`), and the paragraphs on `Task.cancel` and `Task.uncancel`
in the documentation of asyncio.
"""

import asyncio
import contextlib
import sys
import time
import types
from collections.abc import Awaitable, Callable, Coroutine, Generator
from typing import Any, TypeVar

T = TypeVar("T")

GRACE_S = 15.0
"""Seconds that the user's code has to end after its cancellation. Beyond them, it is closed where it waits."""


class Late(TimeoutError):
    """The limit of `within` or `in_time` was reached. Any other TimeoutError was raised by the work itself."""


class StopRequested(Exception):
    """The future `stop` of `within` was resolved."""


async def within(limit_s: float | None, work: Coroutine[Any, Any, T], stop: "asyncio.Future[None] | None" = None) -> T:
    """Await `work` in a task of its own. At a cut, cancel that task once and await its end.

    A cut is the limit, the resolution of `stop`, or the caller's own cancellation. A result that comes in spite of the
    cut is returned.

    Args:
        limit_s: Seconds from now until `work` is cancelled; None sets no limit.
        work: Coroutine to run. It always ends before this function does.
        stop: Future whose resolution cancels `work`; None where only the limit does.

    Raises:
        Late: `work` was cancelled at the limit.
        StopRequested: `work` was cancelled since `stop` was resolved.
        asyncio.CancelledError: The caller was cancelled. Takes precedence over all that `work` returned or raised.
    """
    task = unlisted(work)
    waits_for: set[asyncio.Future[Any]] = {task} if stop is None else {task, stop}
    cancelled: asyncio.CancelledError | None = None
    try:
        await asyncio.wait(waits_for, timeout=limit_s, return_when=asyncio.FIRST_COMPLETED)
    except asyncio.CancelledError as ours:
        cancelled = ours
    is_cut = not task.done()
    if is_cut:
        task.cancel()
    await ended(task, cancelled)
    if is_cut and task.cancelled():
        raise StopRequested if stop is not None and stop.done() else Late
    return task.result()


async def to_its_end(work: Callable[[], Coroutine[Any, Any, T]]) -> T:
    """Await a clean-up to its end, also if the caller is cancelled meanwhile.

    Takes a function and no coroutine: if the caller is cancelled first, its coroutine would never be awaited, which
    Python reports by a RuntimeWarning.

    Raises:
        asyncio.CancelledError: The caller was cancelled. Raised after the end of the work.
    """
    task = unlisted(work())
    await ended(task)
    return task.result()


def begun_task(work: Coroutine[Any, Any, T], name: str | None = None) -> "asyncio.Task[T]":
    """Run `work` in a task that has run up to its first wait, where CPython can do that (from 3.12 on).

    Work that never waits is then done at once, without a further turn of the loop. A loop with a task factory of the
    user's begins the task in its own way. SystemExit or KeyboardInterrupt of the first step ends the loop and not the
    caller, as one of a later step does.
    """
    loop = asyncio.get_running_loop()
    if sys.version_info >= (3, 12) and loop.get_task_factory() is None:
        task: asyncio.Task[T] = asyncio.Task.__new__(asyncio.Task)  # kept although its constructor raises
        try:
            asyncio.Task.__init__(task, work, loop=loop, name=name, eager_start=True)
        except (SystemExit, KeyboardInterrupt) as error:
            loop.call_soon(_raise, error)
        return task
    return loop.create_task(work, name=name)


def _raise(error: BaseException) -> None:
    raise error


def unlisted(work: Coroutine[Any, Any, T]) -> "asyncio.Task[T]":
    """Run `work` in a task cancelled by its holder alone, since `asyncio.all_tasks` does not list it.

    The holder waits for it in a task of the loop. Otherwise `asyncio.run` would end before it does.
    """
    task = asyncio.get_running_loop().create_task(work)
    asyncio._unregister_task(task)
    return task


async def ended(task: "asyncio.Task[Any]", cancelled: asyncio.CancelledError | None = None) -> None:
    """Wait for the end of `task`, however often the caller is cancelled meanwhile; then raise that cancellation.

    Args:
        task: Task to wait for. It is not cancelled here.
        cancelled: Cancellation that the caller has received already.
    """
    while not task.done():
        try:
            await asyncio.wait({task})
        except asyncio.CancelledError as ours:
            cancelled = ours
    if cancelled is not None:
        if not task.cancelled():
            task.exception()  # read, or asyncio would report it as never retrieved: the caller gets `cancelled`
        raise cancelled


async def in_time(limit_s: float, work: Awaitable[T]) -> T:
    """Await `work` in the caller's task; cancel it at the limit.

    The timer is set when `work` first waits: a reply from the cache never does, and would cost half as much again.

    Args:
        limit_s: Seconds, counted from the call and not from the first wait.
        work: Awaitable to run. After its cancellation it has `GRACE_S` to end, see `closed_if_deaf`.

    Raises:
        Late: The limit was reached. The error that `work` then raised is its cause.
    """
    started = time.monotonic()
    steps = work.__await__()
    try:
        waits_for = next(steps)
    except StopIteration as done:
        result: T = done.value
        return result
    deadline = asyncio.timeout(limit_s - (time.monotonic() - started))
    try:
        async with deadline:
            return await _rest(steps, waits_for)
    except Exception as error:
        if deadline.expired():
            raise Late from error
        raise


async def closed_if_deaf(work: Awaitable[T]) -> T:
    """Await code of the user's. Once cancelled it has `GRACE_S` seconds to end; then it is closed."""
    steps = work.__await__()
    try:
        waits_for = next(steps)
    except StopIteration as done:
        result: T = done.value
        return result
    return await _rest(steps, waits_for)


@types.coroutine
def _rest(steps: Generator[Any, Any, T], waits_for: object) -> Generator[Any, Any, T]:
    """Drive `steps` from its first wait on. (`yield from` would begin with a step of its own.)

    After the first cancellation `steps` has `GRACE_S` to end, and gets all further ones. Then it is closed where it
    waits, and CancelledError is raised: code may catch CancelledError, and would hold its caller without limit.
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
                    task.uncancel()  # the timer's cancel: counted as the caller's, it would hide a timeout further out
                    with contextlib.suppress(Exception, SystemExit, KeyboardInterrupt, GeneratorExit):
                        steps.close()
                    raise
                waits_for = steps.throw(error)
            except BaseException as error:  # noqa: BLE001 - raised inside `steps`, which may handle it
                waits_for = steps.throw(error)
            else:
                waits_for = steps.send(sent)
    except StopIteration as done:
        result: T = done.value
        return result
    finally:
        if closing is not None:
            closing.cancel()
