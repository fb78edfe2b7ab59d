"""A batch of work, held as data: a piece becomes a task only when it has a place to run in."""

import asyncio
import contextlib
from collections import deque
from collections.abc import Awaitable, Callable, Hashable, Sequence
from typing import Any, Generic, TypeVar

from rlm_broker.concurrency.fair_semaphore import FairSemaphore

T = TypeVar("T")
R = TypeVar("R")

IN_A_ROW = 64
"""Pieces of work that may be done, or tasks started, before the event loop gets its turn.

Without the bound, pieces that never wait, such as replies from the cache, would hold up all other tasks of the loop."""


async def bounded_map(
    todo: Sequence[T],
    work: Callable[[T], Awaitable[R]],
    at_once: int,
    timeout_s: float | None = None,
    *,
    places: FairSemaphore | None = None,
    session: Hashable = None,
) -> list[R | None]:
    """Await `work` for each of `todo`, at most `at_once` at the same time, begun in the order of `todo`.

    Args:
        todo: Pieces of work.
        work: Function that is awaited for each piece.
        at_once: Largest number of pieces that run at the same time.
        timeout_s: Seconds for the whole batch. Work that is unfinished then is cancelled. None sets no limit.
        places: Places that running pieces need, shared with other batches; None sets no bound beside `at_once`.
        session: Session whose turn a place is taken for, see `FairSemaphore`.

    Returns:
        The results in the order of `todo`; None for each piece that was not done within `timeout_s`.

    Raises:
        BaseExceptionGroup: Pieces failed. The group holds their errors; all other pieces were cancelled.
    """
    batch = _Batch(todo, work, at_once, places or FairSemaphore(None), session)
    with contextlib.suppress(TimeoutError):  # that of the whole batch alone: errors of pieces come in a group
        async with asyncio.timeout(timeout_s):
            await batch.run()
    return batch.results


class _Batch(Generic[T, R]):
    """One batch of work.

    While it waits for places it takes one waiting turn and no task, however many pieces it has. A worker that has a
    place keeps it for the next piece, unless another batch waits for a place. So an undisturbed batch makes one task
    for each place, and not one for each piece.
    """

    def __init__(
        self,
        todo: Sequence[T],
        work: Callable[[T], Awaitable[R]],
        at_once: int,
        places: FairSemaphore,
        session: Hashable,
    ) -> None:
        self.results: list[R | None] = [None] * len(todo)
        self._waiting = deque(enumerate(todo))
        self._work = work
        self._at_once = min(at_once, len(todo))
        self._places = places
        self._session = session
        self._busy = 0
        self._is_queued = False
        self._worker_ended = asyncio.Event()

    async def run(self) -> None:
        async with asyncio.TaskGroup() as group:
            try:
                await self._start_workers(group)
            finally:
                self._waiting.clear()  # a worker whose work ignores its cancellation must not begin another piece

    async def _start_workers(self, group: asyncio.TaskGroup) -> None:
        started = 0
        while self._waiting:
            if self._busy == self._at_once:
                self._worker_ended.clear()
                await self._worker_ended.wait()
            if not self._places.take():
                await self._queue()
            if not self._waiting:  # the workers took the last pieces while this waited for a place
                self._places.release()
                return
            self._busy += 1
            # A callback, no `finally` in the worker: a task cancelled before its first step runs none of its code.
            group.create_task(self._work_on()).add_done_callback(self._ended)
            started += 1
            if started % IN_A_ROW == 0:
                await asyncio.sleep(0)

    async def _queue(self) -> None:
        self._is_queued = True
        try:
            await self._places.acquire(self._session)
        finally:
            self._is_queued = False

    async def _work_on(self) -> None:
        done, in_a_row = 0, max(1, IN_A_ROW // self._at_once)
        while self._waiting:
            position, piece = self._waiting.popleft()
            self.results[position] = await self._work(piece)
            done += 1
            if self._places.waiting > self._is_queued:
                return
            if done % in_a_row == 0:
                await asyncio.sleep(0)

    def _ended(self, _worker: asyncio.Task[Any]) -> None:
        self._busy -= 1
        self._places.release()
        self._worker_ended.set()
