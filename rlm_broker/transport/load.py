"""The memory that open queries of all connections take together, and the connections that wait for it to fall."""

from collections import OrderedDict
from collections.abc import Callable

MOST_WEIGHT = 1 << 30
"""Bytes that the open queries of all connections of one listener may weigh. Beyond, connections with an open query are
not read until others were answered. A connection without one is read, so that every REPL makes progress."""


class QueryLoad:
    """A sum of weights, and the connections that stopped reading because of it, in the order in which they stopped.

    Args:
        most: Bytes from which on the load is high.

    Attributes:
        weight: Bytes that the open queries weigh, see `Session.open_weight`. Callers add to it; `lighten` takes off.
    """

    def __init__(self, most: int = MOST_WEIGHT) -> None:
        self.weight = 0
        self._most = most
        self._paused: OrderedDict[object, Callable[[], None]] = OrderedDict()

    @property
    def is_high(self) -> bool:
        """Whether the weight has reached its bound."""
        return self.weight >= self._most

    def lighten(self, by: int) -> None:
        """Take `by` bytes off, and let waiting connections read on while the load is not high."""
        self.weight -= by
        while by and self._paused and not self.is_high:
            _, resume = self._paused.popitem(last=False)
            resume()

    def wait(self, who: object, resume: Callable[[], None]) -> None:
        """Call `resume` once the load has fallen, unless `who` is forgotten before."""
        self._paused.setdefault(who, resume)

    def forget(self, who: object) -> None:
        """Drop what `wait` noted for `who`. Has no effect when repeated."""
        self._paused.pop(who, None)
