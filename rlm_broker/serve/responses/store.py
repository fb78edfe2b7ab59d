"""Responses of all keys, those under way and the ended ones while they are kept; their events; their REPLs.

A response's events are numbered and encoded once, for any number of followers. A REPL lives on between the responses of
a conversation.
"""

import asyncio
import contextlib
import secrets
import weakref
from collections import deque
from collections.abc import AsyncGenerator, AsyncIterator
from dataclasses import dataclass, field
from itertools import islice
from typing import Any, Final

from rlm_broker import RLM, PersistentRepl
from rlm_broker.serve.errors import ApiError
from rlm_broker.serve.hosting.owner import Busy, EndedThings, Owner, UnknownHandle
from rlm_broker.serve.hosting.repls import ID_BYTES, HeldRepls
from rlm_broker.serve.questions.conversation import Item
from rlm_broker.serve.questions.runs import Asked
from rlm_broker.serve.replies import sse
from rlm_broker.serve.responses.bodies import Resource, response_of

MOST_BYTES: Final = 32 << 20
"""Bytes of the events kept of one response; beyond it the oldest are dropped."""


class ResponseEvents:
    """Keeps the events of one response in order. Their sequence numbers begin at 0, without a gap.

    All followers share the encoded bytes, and all see the same events with the same numbers, at any time.
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
        """Return the encoded events still kept."""
        return list(self._kept)

    def require(self, after: int) -> None:
        """Refuse a follower if its first event was dropped, or will never exist.

        Args:
            after: Number of the follower's last event; -1 begins with the first.

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

    async def follow(self, after: int = -1) -> AsyncGenerator[bytes, None]:
        """Yield each encoded event with a number above `after`, until the journal is closed.

        Raises:
            ApiError: 410: events were dropped before the slow follower has read them.
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


MOST_IDLE: Final = 16
"""REPLs of one owner between two responses; the least recently used one makes room for a new one."""


class LastingRepl:
    """A REPL of one conversation. While a run has it, it counts as part of the run; between runs it is held.

    Between runs it is also a container of its owner, under its id: it can be looked into, and is closed after its idle
    time, or when newer ones need its room.

    Args:
        rlm: The open `RLM`.
        repls: Live REPLs of all owners.
        owner: Owner of the conversation.
        idle_s: Seconds between two runs until it is closed.

    Attributes:
        id: Id of the container.
        last: Id of the response with its variables, or None.
        run: Id of its last run, or None.
        is_over: Whether it is closed at the end of its run.
        persistent: The REPL, for `RLM.start`.
    """

    def __init__(self, rlm: RLM, repls: HeldRepls, owner: Owner, idle_s: float) -> None:
        self.id = f"cntr_{secrets.token_hex(ID_BYTES)}"
        self.last: str | None = None
        self.run: str | None = None
        self.is_over = False
        self.persistent: PersistentRepl = rlm.persistent_repl()
        self._repls = repls
        self._owner = owner
        self._idle_s = idle_s

    @property
    def is_held(self) -> bool:
        """Whether the REPL lives and is held."""
        try:
            return not self._repls.get(self._owner, self.id).repl.is_closed
        except UnknownHandle:
            return False

    @contextlib.asynccontextmanager
    async def lent(self) -> AsyncIterator[None]:
        """Keep the REPL open for a run within the block, and hold it afterwards."""
        if self.is_held:
            async with self._repls.used(self._owner, self.id):
                yield
            if self.is_over:
                await self.close()
            return
        await self.persistent.__aenter__()
        try:
            yield
        finally:
            await self._hold()

    async def _hold(self) -> None:
        repl = self.persistent.sandboxed
        if repl is None or repl.is_closed or self.is_over:
            await self.persistent.aclose()
            return
        self._make_room()
        try:
            async with self._repls.room(self._owner):
                close = self.persistent.aclose
                self._repls.hold(
                    self._owner, repl, close, id=self.id, name="response", run=self.run, idle_s=self._idle_s
                )
        except Busy:  # all places run blocks: the next response begins with a new REPL and the whole conversation
            await self.persistent.aclose()

    def _make_room(self) -> None:
        """End the REPLs of the owner's oldest conversations, so that its other containers keep their places."""
        idle = [held for held in self._repls.of(self._owner) if held.run is not None and not held.users]
        idle.sort(key=lambda held: held.used_at)
        for held in idle[: max(0, len(idle) + 1 - MOST_IDLE)]:
            self._repls.end(self._owner, held.id)

    async def close(self) -> None:
        """End the REPL, if it is held."""
        with contextlib.suppress(UnknownHandle):
            await self._repls.close(self._owner, self.id)


MOST_KEPT: Final = 1_000
"""Ended responses kept, of all keys together; beyond it the oldest of the key with the most go."""
MOST_KEPT_BYTES: Final = 1 << 28
"""Bytes of the events and the inputs of ended responses kept together, likewise."""


@dataclass(eq=False, slots=True)
class Made:
    """A response, under way or ended.

    Attributes:
        owner: Owner of the response.
        resource: Its body.
        journal: Its events.
        run: Its run. The runs of the server decide how long it is kept.
        given: Items of its input, as its request brought them.
        before: Items of the conversation before it.
        given_bytes: Bytes of the request, and of the conversation before it.
        is_stored: Whether it can be retrieved.
        repl: Its REPL, for the next response; None if it has none.
        returning: Ends when the REPL was given back, after the end of the run; None without a REPL.
        error: Error that ended its run, or None.
        is_paid: Whether a model was called before the error.
        ended: Set at its end.
    """

    owner: Owner
    resource: Resource
    journal: ResponseEvents
    run: "weakref.ref[Asked]"
    given: tuple[Item, ...]
    before: tuple[Item, ...]
    given_bytes: int
    is_stored: bool
    repl: LastingRepl | None = None
    returning: "asyncio.Task[None] | None" = None
    error: Exception | None = None
    is_paid: bool = False
    ended: asyncio.Event = field(default_factory=asyncio.Event)

    @property
    def asked(self) -> Asked | None:
        """Run of the response; None if it has ended, and is kept no longer."""
        return self.run()

    @property
    def is_suspended(self) -> bool:
        """Whether the response has ended, and its run waits for results of the client's functions."""
        asked = self.run()
        return self.resource.is_ended and asked is not None and not asked.hosted.run.is_done

    async def returned(self) -> None:
        """Wait until the REPL was given back."""
        if self.returning is not None:
            await asyncio.shield(self.returning)

    @property
    def conversation(self) -> tuple[Item, ...]:
        """Items of the conversation up to here, with its output."""
        return (*self.before, *self.given, *self.resource.output)

    @property
    def bytes(self) -> int:
        """Bytes of memory, with its events and the conversation before it."""
        return self.given_bytes + self.journal.bytes


class Responses:
    """Responses of all keys: those under way, and the ended ones while they are kept."""

    def __init__(self, keep_s: float) -> None:
        self._live: dict[str, Made] = {}
        self._ended = EndedThings[Made](MOST_KEPT, MOST_KEPT_BYTES, keep_s)

    def add(self, made: Made) -> None:
        """Keep a new response."""
        self._live[made.resource.id] = made

    def end(self, made: Made) -> None:
        """Take the end of a response, whether or not it is kept."""
        if self._live.pop(made.resource.id, None) is not None:
            self._ended.add(made.resource.id, made, made.owner.name, made.bytes)

    def get(self, owner: Owner, id: str, param: str | None = None) -> Made:
        """Find a response by its id.

        Args:
            param: Field of the request with the id.

        Raises:
            ApiError: 404: the owner has no such response, or it ended too long ago.
        """
        made = self._live.get(id) or self._ended.get(id)
        if made is None or made.owner != owner:
            said = f"there is no response {id[:100]!r}: it was deleted, ended too long ago, or never existed"
            raise ApiError(404, said, code="not_found", param=param)
        return made

    def item(self, owner: Owner, id: str, param: str) -> Item:
        """Find an item of a kept response by its id.

        Raises:
            ApiError: 404: the owner has no such item.
        """
        made = self._live.get(response_of(id)) or self._ended.get(response_of(id))
        known = (*made.given, *made.resource.output) if made is not None and made.owner == owner else ()
        if (found := next((item for item in known if item["id"] == id), None)) is None:
            said = f"there is no item {id[:100]!r}: its response was not stored, was deleted, or ended too long ago"
            raise ApiError(404, said, code="not_found", param=param)
        return found

    def forget(self, made: Made) -> None:
        """Drop a response, with its events."""
        self._live.pop(made.resource.id, None)
        self._ended.pop(made.resource.id)
