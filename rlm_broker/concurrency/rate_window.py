"""How much was used in the last minute, and when there is room for more. No clock of its own."""

import math
from collections import deque
from dataclasses import dataclass

SPAN_S = 60.0


@dataclass(slots=True)
class Entry:
    """What passed at a time."""

    when: float
    amount: float
    has_left: bool = False


class RateWindow:
    """Keeps the sum of any `SPAN_S` seconds within a bound.

    Args:
        most: None is without a bound.
    """

    def __init__(self, most: float | None) -> None:
        self._most = math.inf if most is None else most
        self._entries: deque[Entry] = deque()
        self._sum = 0.0

    def wait_s(self, amount: float, now: float) -> float:
        """Seconds until `amount` fits; 0 if it does. More than the bound itself fits when nothing else is there."""
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
        """It passes now."""
        entry = Entry(now, amount)
        if self._most != math.inf:
            self._entries.append(entry)
            self._sum += amount
        return entry

    def correct(self, entry: Entry, amount: float) -> None:
        """It was really so much."""
        if not entry.has_left and self._most != math.inf:
            self._sum += amount - entry.amount
            entry.amount = amount
