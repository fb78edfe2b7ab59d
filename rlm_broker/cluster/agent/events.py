"""Events of a run on their way to the orchestrator: in order, in batches, and in bounded memory."""

import asyncio
from collections import deque
from collections.abc import Sequence

import msgspec

from rlm_broker.cluster.events import are_few
from rlm_broker.cluster.link import Link
from rlm_broker.cluster.messages import MOST_EVENTS, FromBroker, Happened
from rlm_broker.events.event import Event, EventsMissed
from rlm_broker.events.log import EVENT_CHARS, text_chars
from rlm_broker.events.trace import plain
from sandbox_worker.wire.errors import FrameTooLarge
from sandbox_worker.wire.text_json import encode_written_out

MOST_CHARS = 1 << 22
"""Characters of events of one run that wait for the link. Beyond, the oldest are dropped, and an `EventsMissed` says
how many."""
BATCH_CHARS = 1 << 18
"""Characters of events from which on a batch is full."""
BATCH_S = 0.02
"""Seconds that an event waits for others to be sent with."""


class EventSender:
    """Sends the events of one run. Adding one never waits.

    Args:
        link: Link to the orchestrator.
        run: Number of the run on the link.
    """

    def __init__(self, link: Link[FromBroker], run: int) -> None:
        self._link = link
        self._run = run
        self._waiting: deque[tuple[Event, int]] = deque()
        self._chars = 0
        self._missed = 0
        self._last_missed: Event | None = None
        self._is_closing = asyncio.Event()
        self._sending: asyncio.Task[None] | None = None

    def add(self, event: Event) -> None:
        """Send an event soon."""
        chars = EVENT_CHARS + text_chars(event)
        self._waiting.append((event, chars))
        self._chars += chars
        while self._chars > MOST_CHARS and len(self._waiting) > 1:
            self._last_missed, dropped = self._waiting.popleft()
            self._missed += 1
            self._chars -= dropped
        if self._sending is None:
            self._sending = asyncio.get_running_loop().create_task(self._send())

    async def aclose(self) -> None:
        """Send all that waits.

        Raises:
            LinkLost: The link has ended.
        """
        self._is_closing.set()
        if self._sending is not None:
            await self._sending

    async def _send(self) -> None:
        """Send batches until no event waits."""
        try:
            async with asyncio.timeout(BATCH_S):
                await self._is_closing.wait()
        except TimeoutError:
            pass
        while self._waiting or self._last_missed is not None:
            batch = self._batch()
            encoded = tuple(map(_raw, batch))
            if not are_few(encoded):
                self._miss(batch)
                continue
            try:
                await self._link.send(Happened(self._run, encoded))
            except FrameTooLarge:
                self._miss(batch)
        self._sending = None

    def _batch(self) -> list[Event]:
        """Take the events of the next message."""
        batch = list[Event]()
        if (last := self._last_missed) is not None:
            gap = EventsMissed(last.run, last.depth, self._missed, tree=last.tree, n=last.n, time=last.time)
            batch.append(gap)
            self._missed, self._last_missed = 0, None
        chars = 0
        while self._waiting and chars < BATCH_CHARS and len(batch) < MOST_EVENTS:
            event, size = self._waiting.popleft()
            chars += size
            batch.append(event)
        self._chars -= chars
        return batch

    def _miss(self, batch: Sequence[Event]) -> None:
        """Count events as missed. They come before all that were missed since."""
        self._missed += sum(event.count if isinstance(event, EventsMissed) else 1 for event in batch)
        self._last_missed = self._last_missed or batch[-1]


def _raw(event: Event) -> msgspec.Raw:
    return msgspec.Raw(encode_written_out(plain(event)))
