"""Events of one response, numbered and encoded once, for any number of followers."""

import asyncio
from collections import deque
from collections.abc import AsyncIterator
from itertools import islice
from typing import Any, Final

from rlm_broker.service.errors import ApiError
from rlm_broker.service.replying import sse

MOST_BYTES: Final = 32 << 20
"""Bytes of the events of one response that are kept; beyond it the oldest are dropped."""


class Journal:
    """Keeps the events of one response in order. Their sequence numbers begin at 0, without a gap.

    All followers share the encoded bytes, and all see the same events with the same numbers, at any time.

    Args:
        most_bytes: Bytes that are kept.
    """

    def __init__(self, most_bytes: int = MOST_BYTES) -> None:
        self._most_bytes = most_bytes
        self._kept: deque[bytes] = deque()
        self._next = 0
        self._is_closed = False
        self._waiting: set[asyncio.Event] = set()
        self.bytes = 0

    def add(self, kind: str, fields: dict[str, Any]) -> None:
        """Number an event, encode it, and wake all followers."""
        event = sse({"type": kind, "sequence_number": self._next, **fields}, kind)
        self._kept.append(event)
        self._next += 1
        self.bytes += len(event)
        while self.bytes > self._most_bytes and len(self._kept) > 1:
            self.bytes -= len(self._kept.popleft())
        self._wake()

    def close(self) -> None:
        """Declare that no further event follows."""
        self._is_closed = True
        self._wake()

    def events(self) -> list[bytes]:
        """Return the encoded events that are kept."""
        return list(self._kept)

    def require(self, after: int) -> None:
        """Refuse a follower whose first event was dropped, or never will be.

        Args:
            after: Number of the last event that the follower has; -1 begins with the first.

        Raises:
            ApiError: 410: events after it were dropped. 400: there is no such event.
        """
        first = self._next - len(self._kept)
        if after + 1 < first:
            said = f"events of the response were dropped, since it has too many: start after {first - 1}"
            raise ApiError(410, said, code="events_dropped", param="starting_after")
        if after >= self._next:
            said = f"the response has no event {after:,} yet: its last one is {self._next - 1:,}"
            raise ApiError(400, said, code="invalid", param="starting_after")

    async def follow(self, after: int = -1) -> AsyncIterator[bytes]:
        """Yield each encoded event with a number above `after`, until the journal is closed.

        Raises:
            ApiError: 410: the follower was so slow that events were dropped before it has read them.
        """
        news = asyncio.Event()
        self._waiting.add(news)
        number = after + 1
        try:
            while True:
                news.clear()
                is_closed = self._is_closed  # read before the events: a later `add` or `close` sets `news` again
                self.require(number - 1)
                events = list(islice(self._kept, number - (self._next - len(self._kept)), None))
                for event in events:
                    yield event
                number += len(events)
                if not events:
                    if is_closed:
                        return
                    await news.wait()
        finally:
            self._waiting.discard(news)

    def _wake(self) -> None:
        for news in self._waiting:
            news.set()
