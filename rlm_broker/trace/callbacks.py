"""The field's callbacks, made of events."""

import time
from collections.abc import Callable

from rlm_broker.callback import Callback
from rlm_broker.trace.events import PREVIEW_CHARS, Event, IterationStarted, RunEnded, RunStarted


class Callbacks:
    """Calls what is given, as `RLM(on_event=Callbacks(...))`. What one of them raises is logged once.

    Args:
        on_subcall_start: A child run starts: its depth, its model, the first 80 characters of its prompt.
        on_subcall_complete: It has ended: its depth, its model, seconds, the error or None.
        on_iteration_start: A turn starts: the run's depth, the turn's number from 1.
        on_iteration_complete: It has ended: depth, number, seconds.
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
        """Take one event."""
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
