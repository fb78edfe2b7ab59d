"""What `ask` shows while it runs: one live line on a terminal, plain lines elsewhere."""

import time
from typing import TextIO

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
from rlm_broker.types import Usage


class Progress:
    """Follows a run's events. On a terminal it rewrites one line; otherwise it prints what matters, line by line."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self._live = stream.isatty()
        self._started = time.monotonic()
        self._iteration = 0
        self._blocks = 0
        self._in_flight = 0
        self._usage = Usage()
        self._shown = 0

    def __call__(self, event: Event) -> None:
        """Take one event."""
        note = self._take(event)
        if self._live:
            self._show()
        elif note:
            self._stream.write(f"[depth {event.depth}] {note}\n")
            self._stream.flush()

    def close(self) -> None:
        """Leave the terminal clean."""
        if self._live and self._shown:
            self._stream.write("\r" + " " * self._shown + "\r")
            self._stream.flush()

    def _take(self, event: Event) -> str | None:
        match event:
            case RunStarted():
                return f"run {event.run} with {event.model}"
            case ReplReady():
                layers = len(event.isolation.layers)
                level = event.isolation.level
                return f"REPL ready in {event.duration_s * 1e3:.0f} ms, isolation {level} ({layers} layers)"
            case IterationStarted():
                self._iteration = event.number
                return f"iteration {event.number}"
            case BlockStarted():
                self._blocks += 1
            case BlockEnded():
                return f"block {event.block}: {event.outcome.status} after {event.outcome.execution_time:.2f} s"
            case CallStarted():
                self._in_flight += 1
            case CallEnded():
                self._in_flight -= 1
                self._usage += event.usage
                return f"call {event.call} failed: {event.error}" if event.error else None
            case RunEnded():
                how = event.error or "answered"
                return f"run {event.run}: {how} after {event.duration_s:.2f} s, {self._spent()}"
        return None

    def _spent(self) -> str:
        usage = self._usage
        cost = "cost unknown" if usage.total_cost is None else f"${usage.total_cost:.4f}"
        return f"{usage.total_calls} calls, {usage.total_input_tokens}+{usage.total_output_tokens} tokens, {cost}"

    def _show(self) -> None:
        line = (
            f"iteration {self._iteration}, block {self._blocks}, {self._in_flight} calls in flight, {self._spent()}, "
            f"{time.monotonic() - self._started:.1f} s"
        )
        self._stream.write("\r" + line.ljust(self._shown))
        self._stream.flush()
        self._shown = len(line)
