"""The events of one run, kept in memory for any number of followers, each at its own pace."""

import asyncio
import threading
from collections import deque
from collections.abc import AsyncIterator, Iterable
from itertools import islice
from typing import Any

from rlm_broker.events.event import Event, EventsMissed
from rlm_broker.events.redaction import fields_of

MOST_CHARS = 1 << 24
"""Maximum characters of the events in one log; beyond it the oldest are dropped. A follower that has not read them yet
gets one `EventsMissed` in their place."""
_WITHOUT_TEXT = (int, float, bool, type(None))
EVENT_CHARS = 200
"""Characters counted for each event in addition to its texts, for its object, its number and its time."""


class EventLog:
    """Keeps events in the order of their numbers, from 1 without a gap. It can be used from any thread."""

    def __init__(self) -> None:
        self._chars = 0
        self._kept: deque[tuple[Event, int]] = deque()
        self._last = 0
        self._is_closed = False
        self._lock = threading.Lock()
        self._waiting: set[tuple[asyncio.AbstractEventLoop, asyncio.Event]] = set()

    @property
    def chars(self) -> int:
        """Characters of all kept events."""
        return self._chars

    def add(self, event: Event) -> None:
        """Keep an event, and wake all followers."""
        chars = EVENT_CHARS + text_chars(event)
        with self._lock:
            self._kept.append((event, chars))
            self._last = event.n
            self._chars += chars
            while self._chars > MOST_CHARS and len(self._kept) > 1:
                self._chars -= self._kept.popleft()[1]
        if self._waiting:
            self._wake()

    def close(self) -> None:
        """End the log. Followers read the last event, then end."""
        self._is_closed = True
        self._wake()

    async def follow(self, after: int = 0) -> AsyncIterator[Event]:
        """Yield each event with a number above `after`, also those added before this call, until the log is closed."""
        after = max(0, after)
        here = (asyncio.get_running_loop(), asyncio.Event())
        self._waiting.add(here)
        try:
            while True:
                here[1].clear()
                is_closed = self._is_closed  # read before the events: a later `add` or `close` sets the event again
                events = self._after(after)
                for event in events:
                    yield event
                    after = event.n
                if not events:
                    if is_closed:
                        return
                    await here[1].wait()
        finally:
            self._waiting.discard(here)

    def _after(self, number: int) -> list[Event]:
        with self._lock:
            newer = self._last - number
            if newer <= 0:
                return []
            events = [event for event, _ in islice(self._kept, max(0, len(self._kept) - newer), None)]
        missed = newer - len(events)
        if missed:
            first = events[0]
            gap = EventsMissed(first.run, first.depth, missed, tree=first.tree, n=first.n - 1, time=first.time)
            events.insert(0, gap)
        return events

    def _wake(self) -> None:
        here = asyncio._get_running_loop()
        for loop, event in list(self._waiting):
            try:
                if loop is here:  # a follower beside the run, as in a server: it needs no byte in the loop's own pipe
                    event.set()
                else:
                    loop.call_soon_threadsafe(event.set)
            except RuntimeError:  # the follower's event loop has ended
                self._waiting.discard((loop, event))


def text_chars(value: object) -> int:
    """Return the number of characters of all texts in an event, or in plain values."""
    return _chars_of((value,))


def _chars_of(values: Iterable[Any]) -> int:
    """Sum up one level of values: a call for each value would cost more than all that the call does."""
    chars = 0
    for value in values:
        kind: Any = type(value)
        if kind is str:
            chars += len(value)
        elif kind in _WITHOUT_TEXT:
            continue
        elif isinstance(value, dict):
            chars += _chars_of(value.values())
        elif isinstance(value, list | tuple):
            chars += _chars_of(value)
        elif fields := fields_of(kind):
            chars += _chars_of(fields(value))
    return chars
