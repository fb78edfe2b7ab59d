"""The callbacks of other RLM runtimes, fed from events."""

import time
from collections.abc import Callable

from rlm_broker.events.callback import Callback
from rlm_broker.events.event import PREVIEW_CHARS, Event, IterationStarted, RunEnded, RunStarted


class Callbacks:
    """Calls functions at four kinds of events. The first exception of each function is logged.

    Example:
        ```python
        RLM("offline", on_event=Callbacks(on_iteration_start=lambda depth, number: print(depth, number)))
        ```

    Args:
        on_subcall_start: Called when a child run starts, with its depth, its model and the first 80 characters of its
            prompt.
        on_subcall_complete: Called when a child run has ended, with its depth, its model, its seconds, and the error or
            None.
        on_iteration_start: Called when a turn starts, with the depth of its run and its number from 1.
        on_iteration_complete: Called when a turn has ended, with depth, number and seconds.
    """

    def __init__(
        self,
        on_subcall_start: Callable[[int, str, str], object] | None = None,
        on_subcall_complete: Callable[[int, str, float, str | None], object] | None = None,
        on_iteration_start: Callable[[int, int], object] | None = None,
        on_iteration_complete: Callable[[int, int, float], object] | None = None,
    ) -> None:
        self._on_subcall_start = Callback.of(on_subcall_start, "on_subcall_start")
        self._on_subcall_complete = Callback.of(on_subcall_complete, "on_subcall_complete")
        self._on_iteration_start = Callback.of(on_iteration_start, "on_iteration_start")
        self._on_iteration_complete = Callback.of(on_iteration_complete, "on_iteration_complete")
        self._models: dict[str, str] = {}
        self._turns: dict[str, tuple[int, int, float]] = {}

    def __call__(self, event: Event) -> None:
        """Take one event, and call the function for it if there is one."""
        match event:
            case RunStarted(run=run, depth=depth, question=question, model=model) if depth:
                self._models[run] = model
                self._on_subcall_start(depth, model, (question or "")[:PREVIEW_CHARS])
            case IterationStarted(run=run, depth=depth, number=number):
                self._end_turn(run)
                self._turns[run] = (depth, number, time.monotonic())
                self._on_iteration_start(depth, number)
            case RunEnded(run=run, depth=depth, duration_s=duration_s, error=error):
                self._end_turn(run)
                if depth:
                    self._on_subcall_complete(depth, self._models.pop(run, ""), duration_s, error)

    def _end_turn(self, run: str) -> None:
        if (turn := self._turns.pop(run, None)) is not None:
            depth, number, started = turn
            self._on_iteration_complete(depth, number, time.monotonic() - started)
