"""A bounded number of places that sessions take in turn, so that a session which asks for much delays no other."""

import asyncio
from collections import OrderedDict
from collections.abc import Hashable

Turn = asyncio.Future[None]


class FairSemaphore:
    """At most `places` held at the same time. Among the sessions that wait, each gets one place in turn.

    Every operation takes constant time, however many wait: a hostile session that queues and cancels thousands of turns
    costs the event loop no more than those turns. The queues are `OrderedDict`s for that reason. A deque finds a
    cancelled turn by looking at every one before it; a dict that loses its first key again and again looks at every key
    that it has lost.

    Lives on one event loop.

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
        """Wait for a place, in the turn of `session`. `release` it afterwards."""
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
