"""The present work of a run, in a few words, out of its events."""

import time

from rlm_broker.trace.events import (
    BlockEnded,
    BlockStarted,
    CallEnded,
    CallStarted,
    Event,
    IterationStarted,
    ReplReady,
    RunEnded,
    RunStarted,
)


class Following:
    """The state of one run, which its events change. It is a receiver of events.

    Attributes:
        turns: Turns of the root run so far.
    """

    def __init__(self) -> None:
        self.turns = 0
        self._began = time.monotonic()
        self._doing = "waits for a place"
        self._calls = 0
        self._runs = 0

    @property
    def seconds(self) -> float:
        """Seconds since the run was asked for."""
        return time.monotonic() - self._began

    def __call__(self, event: Event) -> None:
        """Take an event of the run, or of a run below it."""
        match event:
            case RunStarted():
                self._runs += 1
            case RunEnded():
                self._runs -= 1
            case CallStarted():
                self._calls += 1
            case CallEnded():
                self._calls -= 1
        if event.depth:
            return
        match event:
            case RunStarted() | ReplReady():
                self._doing = "begins"
            case IterationStarted(number=number):
                self.turns, self._doing = number, "asks the model"
            case BlockStarted():
                self._doing = "runs code"
            case BlockEnded():
                self._doing = "has run code"

    def __str__(self) -> str:
        parts = [self._doing]
        if self.turns:
            parts.insert(0, f"turn {self.turns}")
        if self._calls > 1 or (self._calls and "code" in self._doing):
            parts.append(f"{self._calls} calls under way")
        if self._runs > 1:
            parts.append(f"{self._runs - 1} child runs")
        return ", ".join(parts)
