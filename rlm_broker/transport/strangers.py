"""Bounds for the connections that have shown no token: their number, their silence, and their memory together."""

import asyncio
import resource
from collections import OrderedDict
from typing import Protocol

MOST_SILENT = 256
"""Connections that have not said what they are. When one more comes, the one that is silent for longest is dropped."""
MOST_SERVED = 2048
"""One-shot requests that are served at the same time. A further one is refused as `BUSY`."""
DESCRIPTOR_SHARE = 4
"""Divisor of the process's limit of descriptors: served requests may hold a quarter. REPLs and files need the rest."""
MOST_WEIGHT = 128 << 20
"""Bytes of memory that one-shot requests and their unread replies may take together, see `request_weight`. A request
beyond is refused as `BUSY`."""
SMALL_BYTES = 1 << 12
"""Bytes of a request that is parsed at once. Of larger ones, one is parsed in each turn of the event loop."""
BUSY = "busy: the handler serves as many one-shot requests as it can hold; try again in 1 s"

STRING_WEIGHT = 1024
"""Bytes of memory for each string of a request: a prompt, its call and its part of the reply."""
MOST_STRINGS = 1 << 14
"""Strings of a request that are weighed. A long text may have more quotes, but no more prompts are served at once."""


def request_weight(payload: bytes | bytearray) -> int:
    """Return the memory in bytes that a request may take while it is served: its text in wide characters, its objects.

    Estimated without parsing: quotes are counted, and two make a string.
    """
    return 8 * len(payload) + STRING_WEIGHT * min(MOST_STRINGS, payload.count(b'"') // 2)


class Stranger(Protocol):
    """A connection that has shown no token."""

    def hang_up(self) -> None:
        """Close the connection at once."""
        ...

    async def end(self) -> None:
        """Close the connection, and wait until the request that is served for it has ended."""
        ...


class Strangers:
    """The connections of one listener that have shown no token.

    Args:
        silence_s: Seconds that one of them may stay silent. Beyond, it is dropped.

    Attributes:
        present: All these connections.
    """

    def __init__(self, silence_s: float) -> None:
        self.silence_s = silence_s
        self.present: set[Stranger] = set()
        self._silent: OrderedDict[Stranger, float] = OrderedDict()
        """Each silent connection → the loop's time until which it may be silent. The longest silent comes first."""
        self._sweep: asyncio.TimerHandle | None = None
        self._weights: dict[Stranger, int] = {}
        self._weight = 0
        self._served = 0
        self._beginning = asyncio.Lock()

    def close(self) -> None:
        """Cancel the timer."""
        if self._sweep is not None:
            self._sweep.cancel()
            self._sweep = None

    # -- silence -----------------------------------------------------------------------------------------------------

    def awaits(self, stranger: Stranger) -> None:
        """Drop `stranger` unless it says something within `silence_s`.

        One timer serves all connections: most of them speak long before their time, and would only set and cancel one.
        """
        loop = asyncio.get_running_loop()
        self._silent[stranger] = until = loop.time() + self.silence_s
        self._silent.move_to_end(stranger)
        if self._sweep is None:
            self._sweep = loop.call_at(until, self._drop_the_late)
        if len(self._silent) > MOST_SILENT:
            self.drop_longest_silent()

    def hears(self, stranger: Stranger) -> None:
        """Note that `stranger` has said something, or is gone: its time does not run any more."""
        self._silent.pop(stranger, None)

    def drop_longest_silent(self) -> None:
        """Drop the connection that is silent for longest, if there is one, to make room."""
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

    # -- memory and requests -----------------------------------------------------------------------------------------

    def weigh(self, stranger: Stranger, weight: int) -> bool:
        """Note how many bytes of memory `stranger` holds now.

        Returns:
            Whether there is room for them. A stranger always has room while no other holds memory.
        """
        self._weight += weight - self._weights.pop(stranger, 0)
        if weight:
            self._weights[stranger] = weight
        return self._weight <= MOST_WEIGHT or len(self._weights) <= 1

    def begins(self) -> bool:
        """Count one more served request, unless there are too many. Call `ends` afterwards.

        Returns:
            Whether the request may be served.
        """
        if self._served >= min(MOST_SERVED, resource.getrlimit(resource.RLIMIT_NOFILE)[1] // DESCRIPTOR_SHARE):
            return False
        self._served += 1
        return True

    async def turn(self, payload_bytes: int) -> None:
        """Wait until a request of this size may be parsed: many large ones in a row would keep the event loop busy."""
        if payload_bytes > SMALL_BYTES:
            async with self._beginning:
                await asyncio.sleep(0)

    def ends(self) -> None:
        """Count one served request less."""
        self._served -= 1
