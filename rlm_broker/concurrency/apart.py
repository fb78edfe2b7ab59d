"""Work that holds the event loop, one piece of it in each turn of the loop."""

import asyncio
from collections.abc import Callable


class Apart:
    """Does pieces of work that each take milliseconds, with turns of all other tasks between two of them.

    Tasks that end in the same turn of the loop would otherwise hold it for the sum of their pieces. Lives on one event
    loop.
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
