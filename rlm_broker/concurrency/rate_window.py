"""A sliding window over the last minute: the sum of what passed, and when more may pass. Callers pass the time in."""

import math
from collections import deque
from dataclasses import dataclass

SPAN_S = 60.0
"""Length of the window in seconds: providers state their rates per minute."""


@dataclass(slots=True)
class Entry:
    """An amount that passed.

    Attributes:
        when: Time at which it passed, in seconds of the caller's clock.
        amount: Requests or tokens, as the window counts.
        has_left: Whether it is older than `SPAN_S`, so that it counts no more.
    """

    when: float
    amount: float
    has_left: bool = False


class RateWindow:
    """Keeps the sum of any `SPAN_S` seconds within a bound.

    Args:
        most: Largest sum; None sets no bound.
    """

    def __init__(self, most: float | None) -> None:
        self._most = math.inf if most is None else most
        self._entries: deque[Entry] = deque()
        self._sum = 0.0

    def wait_s(self, amount: float, now: float) -> float:
        """Return the seconds until `amount` fits; 0 if it fits now.

        An amount larger than the bound fits when the window is empty; it would otherwise wait without end.

        Args:
            amount: Amount that should pass.
            now: Present time, not before that of any earlier call.
        """
        while self._entries and self._entries[0].when <= now - SPAN_S:
            entry = self._entries.popleft()
            entry.has_left = True
            self._sum -= entry.amount
        excess, fits_at = self._sum + amount - self._most, now
        for entry in self._entries:
            if excess <= 0:
                break
            excess -= entry.amount
            fits_at = entry.when + SPAN_S
        return fits_at - now

    def use(self, amount: float, now: float) -> Entry:
        """Record that `amount` passes at time `now`, and return the entry, which `correct` takes."""
        entry = Entry(now, amount)
        if self._most != math.inf:
            self._entries.append(entry)
            self._sum += amount
        return entry

    def correct(self, entry: Entry, amount: float) -> None:
        """Replace the estimate of `entry` by the actual amount. An entry that has left the window is not changed."""
        if not entry.has_left and self._most != math.inf:
            self._sum += amount - entry.amount
            entry.amount = amount
