"""Time that only a test moves, for what would otherwise have to be waited for.

`Clock` stands still until it is moved, so a slow machine cannot make a limit pass. With `leaps` it moves by itself to
the next timer whenever the event loop has nothing else to do: what takes a minute is over at once. Leaping is only for
tests whose events all come from the loop itself: an answer from a socket, a thread or a process may come too late.
"""

import asyncio
import time
from typing import Any

import pytest


class Clock:
    """A clock that replaces `time.monotonic` for the length of one test, and with it the event loop's own time."""

    def __init__(self, patched: pytest.MonkeyPatch) -> None:
        self.now_s = time.monotonic()
        self._patched = patched
        patched.setattr(time, "monotonic", lambda: self.now_s)

    def forward(self, seconds: float) -> None:
        """Move it. Timers that are due then go off in the loop's next turn."""
        self.now_s += seconds

    def leaps(self) -> None:
        """From now on it moves to the next timer when the running loop would wait for that."""
        selector = asyncio.get_running_loop()._selector  # type: ignore[attr-defined]
        select = selector.select

        def leap(timeout: float | None = None) -> Any:
            events = select(0 if timeout else timeout)
            if not events and timeout:
                self.now_s += timeout
            return events

        self._patched.setattr(selector, "select", leap)
