"""Turns: places that sessions take in turn, batches waiting as one, rates, and the loop."""

import asyncio
import math
from collections import OrderedDict, deque
from collections.abc import Awaitable, Callable, Hashable, Sequence
from typing import Any, Generic, TypeVar

from msgspec import Struct

Turn = asyncio.Future[None]


class FairSemaphore:
    """At most `places` held at the same time. Among the sessions that wait, each gets one place in turn.

    Every operation takes constant time, however many wait: a hostile session may queue and cancel thousands of turns,
    and costs the event loop no more than those. So the queues are `OrderedDict`s. A deque finds a cancelled turn by
    looking at every one before it; a dict without its first keys looks at every key that it has lost.

    Lives on one event loop.

    Example:
        ```python
        places = FairSemaphore(10)
        await places.acquire("ann")
        try:
            await RLM("offline").acompletion("a\\nb", "How many lines are there?")
        finally:
            places.release()
        ```

    Args:
        places: Places in all; None sets no bound.

    Attributes:
        taken: Number of places that are held.
        waiting: Number of turns that wait.
    """

    def __init__(self, places: int | None) -> None:
        self._places = places
        self.taken = 0
        self.waiting = 0
        self._queues: OrderedDict[Hashable, OrderedDict[Turn, None]] = OrderedDict()
        """Sessions in the order of their turns, each with its own turns in order of arrival."""

    def take(self) -> bool:
        """Take a place if one is free and no turn waits for it, and return whether it was taken.

        `release` it afterwards.

        Example:
            ```python
            places = FairSemaphore(1)
            places.take(), places.take()  # (True, False)
            ```
        """
        if self._places is None or (self.taken < self._places and not self.waiting):
            self.taken += 1
            return True
        return False

    def has_waiting(self, session: Hashable) -> bool:
        """Whether a turn of the session waits for a place."""
        return session in self._queues

    def waiting_of(self, session: Hashable) -> int:
        """Return how many turns of the session wait for a place."""
        return len(self._queues.get(session, ()))

    async def acquire(self, session: Hashable) -> None:
        """Wait for a place, in the turn of `session`. `release` it afterwards.

        Example:
            ```python
            places = FairSemaphore(10)
            await places.acquire("ann")
            places.release()
            ```
        """
        if self.take():
            return
        turn: Turn = asyncio.get_running_loop().create_future()
        self._queues.setdefault(session, OrderedDict())[turn] = None
        self.waiting += 1
        try:
            await turn
        except asyncio.CancelledError:
            if not turn.cancelled():  # a place was given to this turn just before it was cancelled
                self.release()
            else:
                self._leave(session, turn)
            raise

    def release(self) -> None:
        """Pass the place to the session whose turn it is, in the same step: no other caller gets in between."""
        while self._queues:
            session, queue = self._queues.popitem(last=False)
            turn, _ = queue.popitem(last=False)
            self.waiting -= 1
            if queue:
                self._queues[session] = queue  # behind all other sessions
            if not turn.done():  # a cancelled turn is still queued until its task runs
                turn.set_result(None)
                return
        self.taken -= 1

    def _leave(self, session: Hashable, turn: Turn) -> None:
        queue = self._queues.get(session)
        if queue is not None and turn in queue:  # else `release` has passed over it already
            del queue[turn]
            self.waiting -= 1
            if not queue:
                del self._queues[session]


T = TypeVar("T")
R = TypeVar("R")

IN_A_ROW = 64
"""Pieces of work done, or tasks started, before the event loop gets its turn. Without the bound, pieces without a wait,
such as replies from the cache, would hold up all other tasks of the loop."""


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
        work: Function awaited for each piece.
        at_once: Largest number of pieces that run at the same time.
        timeout_s: Seconds for the whole batch. Unfinished work is cancelled then. None sets no limit.
        places: Places of running pieces, shared with other batches; None sets no bound beside `at_once`.
        session: Session of the batch, see `FairSemaphore`.

    Returns:
        The results in the order of `todo`; None for each piece that was not done within `timeout_s`.

    Raises:
        BaseExceptionGroup: Pieces failed. The group holds their errors; all other pieces were cancelled.
    """
    batch = _MappedBatch(todo, work, at_once, places or FairSemaphore(None), session)
    try:
        async with asyncio.timeout(timeout_s):
            await batch.run()
    except TimeoutError:  # the whole batch's alone: `suppress` would take those of pieces out of their group, too
        pass
    return batch.results


class _MappedBatch(Generic[T, R]):
    """One batch of work.

    While it waits for places it takes one waiting turn and no task, however many pieces it has. A worker keeps its
    place for the next piece, unless another batch waits for one. So an undisturbed batch makes a task for each place,
    and not for each piece.
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


SPAN_S = 60.0
"""Length of the window in seconds: providers state their rates per minute."""


class RateEntry(Struct):
    """An amount that passed at `when`, in seconds of the caller's clock. Once it `has_left`, it counts no more."""

    when: float
    amount: float
    has_left: bool = False


class RateWindow:
    """Keeps the sum of any `SPAN_S` seconds within a bound, if there is one."""

    def __init__(self, most: float | None) -> None:
        self._most = math.inf if most is None else most
        self._entries: deque[RateEntry] = deque()
        self._sum = 0.0

    def wait_s(self, amount: float, now: float) -> float:
        """Return the seconds until `amount` fits; 0 if it fits now. Times come in order.

        An amount above the bound fits when the window is empty; it would otherwise wait without end.
        """
        while self._entries and self._entries[0].when <= now - SPAN_S:
            entry = self._entries.popleft()
            entry.has_left = True
            self._sum -= entry.amount
        excess, fits_at = self._sum + amount - self._most, now
        for entry in self._entries:
            if excess <= 0:
                break
            excess -= entry.amount
            fits_at = entry.when + SPAN_S
        return fits_at - now

    def use(self, amount: float, now: float) -> RateEntry:
        """Record that `amount` passes at time `now`, and return the entry for `correct`."""
        entry = RateEntry(now, amount)
        if self._most != math.inf:
            self._entries.append(entry)
            self._sum += amount
        return entry

    def correct(self, entry: RateEntry, amount: float) -> None:
        """Replace the estimate of `entry` by the actual amount, unless it has left the window."""
        if not entry.has_left and self._most != math.inf:
            self._sum += amount - entry.amount
            entry.amount = amount


class Apart:
    """Does pieces of work of some milliseconds each, with turns of all other tasks between two of them.

    Tasks with an end in the same turn of the loop would otherwise hold it for the sum of their pieces. Lives on one
    event loop.
    """

    def __init__(self) -> None:
        self._turn = asyncio.Lock()

    async def do(self, work: Callable[[], object]) -> None:
        """Do one piece of work when those before it are done, also if the caller is cancelled meanwhile."""
        try:
            await self._turn.acquire()
        except asyncio.CancelledError:
            work()
            raise
        try:
            work()
            await asyncio.sleep(0)
        finally:
            self._turn.release()
