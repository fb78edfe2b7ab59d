"""Places that are given out in turn, so that nobody who asks for much keeps the others waiting."""

import asyncio
from collections import deque
from collections.abc import Hashable


class FairSlots:
    """At most `places` at the same time. Of those who wait, each session gets one in turn.

    Lives on one event loop.

    Args:
        places: None is without a bound.
    """

    def __init__(self, places: int | None) -> None:
        self._places = places
        self._taken = 0
        self._waiting: dict[Hashable, deque[asyncio.Future[None]]] = {}
        """Sessions in the order of their turns."""

    def take(self) -> bool:
        """Have a place if one is free and nobody waits for it. `release` it afterwards."""
        if self._places is None or (self._taken < self._places and not self._waiting):
            self._taken += 1
            return True
        return False

    async def acquire(self, session: Hashable) -> None:
        """Wait for a place. `release` it afterwards."""
        if self.take():
            return
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        queue = self._waiting.setdefault(session, deque())
        queue.append(turn)
        try:
            await turn
        except asyncio.CancelledError:
            if not turn.cancelled():  # it was given a place in the same moment
                self.release()
            elif turn in queue:  # unless its turn came while it was cancelled
                queue.remove(turn)
                if not queue and self._waiting.get(session) is queue:
                    del self._waiting[session]
            raise

    def release(self) -> None:
        """Pass the place on to whose turn it is, without letting anybody in between."""
        while self._waiting:
            session, queue = next(iter(self._waiting.items()))
            del self._waiting[session]
            turn = queue.popleft()
            if queue:
                self._waiting[session] = queue  # at the end: the others come first
            if not turn.done():  # one that is cancelled leaves the queue a moment later
                turn.set_result(None)
                return
        self._taken -= 1
