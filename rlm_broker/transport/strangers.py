"""Bounds for the connections that have shown no token: how many, for how long, and what they may hold together."""

import asyncio
import resource
from collections import OrderedDict
from typing import Protocol

MOST_SILENT = 256
"""Connections that have not said what they are. When one more comes, the one that is silent for longest is dropped."""
MOST_SERVED = 2048
"""One-shot requests that are served at the same time. A further one is refused as `BUSY`."""
DESCRIPTOR_SHARE = 4
"""Part of the process's descriptors that served requests may hold, a quarter: REPLs and files need the others."""
MOST_WEIGHT = 128 << 20
"""Bytes of memory that one-shot requests and their unread replies may take together, see `request_weight`. A request
beyond is refused as `BUSY`."""
SMALL_BYTES = 1 << 12
"""Bytes of a request that is served at once. Larger ones begin one in a turn of the event loop."""
BUSY = "busy: the handler serves as many one-shot requests as it can hold; try again in 1 s"

STRING_WEIGHT = 1024
"""Bytes of memory for each string of a request: a prompt, its call and its part of the reply."""
MOST_STRINGS = 1 << 14
"""Strings of a request that are weighed. A long text may hold more quotes, but no more prompts are served at once."""


def request_weight(payload: bytes | bytearray) -> int:
    """Memory in bytes that a request may take while it is served: its text in wide characters, and its objects."""
    return 8 * len(payload) + STRING_WEIGHT * min(MOST_STRINGS, payload.count(b'"') // 2)


class Stranger(Protocol):
    """A connection that has shown no token."""

    def hang_up(self) -> None:
        """Close the connection at once."""
        ...

    async def end(self) -> None:
        """Hang up, and wait for the end of what is being done for the caller."""
        ...


class Strangers:
    """The connections of one listener that have shown no token.

    Args:
        silence_s: Seconds for which one of them may say nothing.

    Attributes:
        present: All of them.
    """

    def __init__(self, silence_s: float) -> None:
        self.silence_s = silence_s
        self.present: set[Stranger] = set()
        self._silent: OrderedDict[Stranger, float] = OrderedDict()
        """Until when each may be silent. The longest silent comes first."""
        self._sweep: asyncio.TimerHandle | None = None
        self._weights: dict[Stranger, int] = {}
        self._weight = 0
        self._served = 0
        self._beginning = asyncio.Lock()

    def close(self) -> None:
        """Stop the timer."""
        if self._sweep is not None:
            self._sweep.cancel()
            self._sweep = None

    # -- silence -----------------------------------------------------------------------------------------------------

    def awaits(self, stranger: Stranger) -> None:
        """Expect `stranger` to say something within `silence_s`. One timer watches all: most speak long before."""
        loop = asyncio.get_running_loop()
        self._silent[stranger] = until = loop.time() + self.silence_s
        self._silent.move_to_end(stranger)
        if self._sweep is None:
            self._sweep = loop.call_at(until, self._drop_the_late)
        if len(self._silent) > MOST_SILENT:
            self.drop_longest_silent()

    def hears(self, stranger: Stranger) -> None:
        """Note that `stranger` has said something, or is gone."""
        self._silent.pop(stranger, None)

    def drop_longest_silent(self) -> None:
        """Make room by dropping a connection, if one is silent."""
        if self._silent:
            stranger, _ = self._silent.popitem(last=False)
            stranger.hang_up()

    def _drop_the_late(self) -> None:
        self._sweep = None
        loop = asyncio.get_running_loop()
        while self._silent:
            until = next(iter(self._silent.values()))
            if until > loop.time():
                self._sweep = loop.call_at(until, self._drop_the_late)
                return
            self.drop_longest_silent()

    # -- what they hold ----------------------------------------------------------------------------------------------

    def weigh(self, stranger: Stranger, weight: int) -> bool:
        """Note how many bytes of memory `stranger` holds now.

        Returns:
            Whether there is room for that. One that is alone in holding anything always has room.
        """
        self._weight += weight - self._weights.pop(stranger, 0)
        if weight:
            self._weights[stranger] = weight
        return self._weight <= MOST_WEIGHT or len(self._weights) <= 1

    def begins(self) -> bool:
        """Count a request that is to be served, unless that would be too many; say `ends` afterwards."""
        if self._served >= min(MOST_SERVED, resource.getrlimit(resource.RLIMIT_NOFILE)[1] // DESCRIPTOR_SHARE):
            return False
        self._served += 1
        return True

    async def turn(self, payload_bytes: int) -> None:
        """Wait until a request of this size may be parsed: many large ones at once would hold the event loop."""
        if payload_bytes > SMALL_BYTES:
            async with self._beginning:
                await asyncio.sleep(0)

    def ends(self) -> None:
        """Count a request that was served no longer."""
        self._served -= 1
