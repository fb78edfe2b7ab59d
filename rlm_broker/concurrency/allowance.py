"""An amount that its holders share, such as bytes of memory."""

import asyncio
import contextlib
from collections import deque
from collections.abc import AsyncIterator


class Allowance:
    """At most `amount` held at the same time; holders wait in the order in which they came.

    A part larger than the whole amount is held alone. Few are expected to wait: each may look at all others once.

    Args:
        amount: What there is in all.
    """

    def __init__(self, amount: int) -> None:
        self._amount = amount
        self._left = amount
        self._waiting: deque[tuple[int, asyncio.Future[None]]] = deque()

    @contextlib.asynccontextmanager
    async def held(self, part: int) -> AsyncIterator[None]:
        """Hold `part` of the amount, once it is there."""
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
            else:  # it was given in the same step
                self._left += part
            self._serve()
            raise

    def _serve(self) -> None:
        while self._waiting and self._waiting[0][0] <= self._left:
            part, turn = self._waiting[0]
            if turn.cancelled():  # its task removes it in its next step, and serves the rest
                return
            self._waiting.popleft()
            self._left -= part
            turn.set_result(None)
