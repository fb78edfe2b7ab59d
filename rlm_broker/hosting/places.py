"""Places for work that ends with its request: a bounded number at once, and a bounded queue that is fair to owners."""

import contextlib
from collections.abc import AsyncIterator
from typing import Final

from rlm_broker.concurrency.turns import FairSemaphore
from rlm_broker.hosting.owner import Busy, Owner

RETRY_AFTER_S: Final = 1.0
"""Seconds after which a refused request may find a place in the queue."""


class Places:
    """Places for work of all owners. Lives on one event loop.

    Args:
        most: Places.
        most_waiting: Turns that may wait for a place.
    """

    def __init__(self, most: int, most_waiting: int) -> None:
        self._places = FairSemaphore(most)
        self._most_waiting = most_waiting

    @contextlib.asynccontextmanager
    async def place(self, owner: Owner) -> AsyncIterator[None]:
        """Wait for a place, and have it within the block. Owners take turns.

        Where the queue is full, an owner that does not wait in it may still wait once.

        Raises:
            Busy: Too many wait already.
        """
        if not self._places.take():
            if self._places.waiting >= self._most_waiting and (
                self._places.has_waiting(owner.name) or not self._most_waiting
            ):
                raise Busy(f"all places are taken, and {self._most_waiting:,} wait: try again later", RETRY_AFTER_S)
            await self._places.acquire(owner.name)
        try:
            yield
        finally:
            self._places.release()
