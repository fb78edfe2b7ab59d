"""An amount that its holders share, such as bytes of memory."""

import asyncio
import contextlib
from collections import deque
from collections.abc import AsyncIterator


class Allowance:
    """At most `amount` held at the same time; holders wait in order of arrival.

    A part larger than the whole amount is held alone. Meant for few waiting holders: a cancelled one is searched for
    among all others.

    Args:
        amount: Amount in all, in any unit.
    """

    def __init__(self, amount: int) -> None:
        self._amount = amount
        self._left = amount
        self._waiting: deque[tuple[int, asyncio.Future[None]]] = deque()

    @contextlib.asynccontextmanager
    async def held(self, part: int) -> AsyncIterator[None]:
        """Wait until `part` of the amount is free, and hold it until the block ends.

        Smaller parts do not overtake a larger one that waits, which could otherwise wait without end.
        """
        part = min(part, self._amount)
        await self._take(part)
        try:
            yield
        finally:
            self._left += part
            self._serve()

    async def _take(self, part: int) -> None:
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.append((part, turn))
        self._serve()
        try:
            await turn
        except asyncio.CancelledError:
            if turn.cancelled():
                self._waiting.remove((part, turn))
            else:  # the part was given just before the cancellation arrived
                self._left += part
            self._serve()
            raise

    def _serve(self) -> None:
        while self._waiting and self._waiting[0][0] <= self._left:
            part, turn = self._waiting[0]
            if turn.cancelled():  # its task removes the turn when it next runs, and then serves the rest
                return
            self._waiting.popleft()
            self._left -= part
            turn.set_result(None)
