"""Responses of all keys: the ones that go on, and the ended ones for as long as they are kept."""

import asyncio
import time
import weakref
from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Final

from rlm_broker.hosting.keeping import Kept, to_forget
from rlm_broker.hosting.owner import Owner
from rlm_broker.service.asking.asking import Asked
from rlm_broker.service.errors import ApiError
from rlm_broker.service.responses.journal import Journal
from rlm_broker.service.responses.lasting import LastingRepl
from rlm_broker.service.responses.resource import Item, Resource

MOST_KEPT: Final = 1_000
"""Ended responses that are kept, of all keys together; beyond it the oldest of the key with the most go."""
MOST_KEPT_BYTES: Final = 1 << 28
"""Bytes of the events and the inputs of ended responses that are kept together, likewise."""


@dataclass(eq=False, slots=True)
class Made:
    """A response that was made.

    Attributes:
        owner: Owner of the response.
        resource: Its body.
        journal: Its events.
        run: Its run. The runs of the server decide how long that is kept, with its own events.
        given: Items of its input, as its request brought them.
        before: Items of the conversation before it.
        given_bytes: Bytes of the request, and of the conversation before it.
        is_stored: Whether it can be retrieved.
        repl: Its REPL, which a response after it goes on with; None if it has none.
        returning: Ends when the REPL was given back, after the end of the run; None without a REPL.
        error: Error that ended its run, or None.
        is_paid: Whether a model was called before that error.
        ended_at: Unix time in seconds of its end, or None.
        ended: Set at its end.
    """

    owner: Owner
    resource: Resource
    journal: Journal
    run: "weakref.ref[Asked]"
    given: tuple[Item, ...]
    before: tuple[Item, ...]
    given_bytes: int
    is_stored: bool
    repl: LastingRepl | None = None
    returning: "asyncio.Task[None] | None" = None
    error: Exception | None = None
    is_paid: bool = False
    ended_at: float | None = None
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
        """Bytes that keeping it takes, with its events and the conversation before it."""
        return self.given_bytes + self.journal.bytes


class Responses:
    """Responses of all keys.

    Args:
        keep_s: Seconds for which an ended response is kept.
    """

    def __init__(self, keep_s: float) -> None:
        self._keep_s = keep_s
        self._made: OrderedDict[str, Made] = OrderedDict()

    def add(self, made: Made) -> None:
        """Keep a response."""
        self._forget_old()
        self._made[made.resource.id] = made

    def get(self, owner: Owner, id: str, param: str | None = None) -> Made:
        """Return the response of that id.

        Args:
            param: Field of the request that has the id.

        Raises:
            ApiError: 404: the owner has no such response, or it ended too long ago.
        """
        self._forget_old()
        made = self._made.get(id)
        if made is None or made.owner != owner:
            said = f"there is no response {id[:100]!r}: it was deleted, ended too long ago, or never existed"
            raise ApiError(404, said, code="not_found", param=param)
        return made

    def forget(self, made: Made) -> None:
        """Drop a response, with its events."""
        self._made.pop(made.resource.id, None)

    def _forget_old(self) -> None:
        """Drop ended responses that are too old, or too many."""
        ended = [Kept(made, made.owner, made.bytes, at) for made in self._made.values() if (at := made.ended_at)]
        oldest_at = time.time() - self._keep_s
        for made in to_forget(ended, most=MOST_KEPT, most_weight=MOST_KEPT_BYTES, oldest_at=oldest_at):
            self.forget(made)


def input_page(items: Mapping[str, Item], *, after: str | None, limit: int, is_ascending: bool) -> dict[str, Any]:
    """Return one page of input items.

    Args:
        items: All items by id, in their order.
        after: Id of the item after which the page begins, or None.
        limit: Items of a page.
        is_ascending: Whether the oldest comes first.

    Raises:
        ApiError: 404: there is no item `after`.
    """
    ids = list(items) if is_ascending else list(items)[::-1]
    if after is not None and after not in items:
        raise ApiError(404, f"there is no input item {after[:100]!r}", code="not_found", param="after")
    begin = 0 if after is None else ids.index(after) + 1
    page = ids[begin : begin + limit]
    return {
        "object": "list",
        "data": [items[id] for id in page],
        "first_id": page[0] if page else "",
        "last_id": page[-1] if page else "",
        "has_more": begin + limit < len(ids),
    }
