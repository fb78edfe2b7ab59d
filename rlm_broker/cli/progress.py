"""What `ask` shows while it runs: one live line on a terminal, plain lines elsewhere."""

import time
from typing import TYPE_CHECKING, TextIO

from rlm_broker.cli.terminal import printable
from rlm_broker.trace.events import (
    BlockEnded,
    BlockStarted,
    CallEnded,
    CallRetried,
    CallStarted,
    Event,
    IterationStarted,
    ReplReady,
    RunEnded,
    RunStarted,
)
from rlm_broker.types import Usage

if TYPE_CHECKING:
    from rich.live import Live
    from rich.text import Text

REFRESHES_PER_S = 8


class Progress:
    """Follows a run's events. On a terminal it keeps one line up to date; otherwise it prints what matters."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self._started = time.monotonic()
        self._iteration = 0
        self._blocks = 0
        self._in_flight = 0
        self._runs = 0
        self._usage: dict[tuple[str, int], Usage] = {}
        self._live = _live_line(self, stream) if stream.isatty() else None

    def __call__(self, event: Event) -> None:
        """Take one event."""
        note = self._take(event)
        if note and self._live is None:
            self._stream.write(f"[depth {event.depth}] {printable(note)}\n")
            self._stream.flush()

    def close(self) -> None:
        """Leave the terminal clean."""
        if self._live is not None:
            self._live.stop()

    def __rich__(self) -> "Text":
        """The line as it is now; asked for several times a second, so that the time goes on while nothing happens."""
        from rich.text import Text

        children = f", {self._runs} runs" if self._runs > 1 else ""
        return Text(
            f"iteration {self._iteration}, block {self._blocks}{children}, {self._in_flight} calls in flight, "
            f"{self._spent()}, {time.monotonic() - self._started:.0f} s",
            no_wrap=True,
            overflow="ellipsis",
        )

    def _take(self, event: Event) -> str | None:
        match event:
            case RunStarted():
                self._runs += 1
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
            case CallRetried():
                return f"call {event.call}: attempt {event.attempt} in {event.wait_s:.1f} s, since {event.reason}"
            case CallEnded():
                self._in_flight -= 1
                place = (event.model or "?", event.depth)
                self._usage[place] = self._usage.get(place, Usage()) + event.usage
                return f"call {event.call} failed: {event.error}" if event.error else None
            case RunEnded():
                how = event.error or "answered"
                return f"run {event.run}: {how} after {event.duration_s:.2f} s, {self._spent()}"
        return None

    def _spent(self) -> str:
        """The sum, and where there are several models or depths the money of each."""
        total = spent(sum(self._usage.values(), Usage()))
        if len(self._usage) < 2:
            return total
        parts = [f"{model} at depth {depth} {_cost(usage)}" for (model, depth), usage in self._usage.items()]
        return f"{total} ({', '.join(parts)})"


def spent(usage: Usage) -> str:
    """Calls, tokens and cost. A price that is not known is unknown, and not nothing."""
    stored = f" ({usage.stored_calls:,} of them stored, not paid)" if usage.stored_calls else ""
    tokens = f"{usage.total_input_tokens:,}+{usage.total_output_tokens:,} tokens"
    calls = "1 call" if usage.total_calls == 1 else f"{usage.total_calls:,} calls"
    return f"{calls}{stored}, {tokens}, {_cost(usage)}"


def _cost(usage: Usage) -> str:
    return "cost unknown" if usage.total_cost is None else f"${usage.total_cost:.4f}"


def _live_line(progress: Progress, stream: TextIO) -> "Live":
    from rich.console import Console  # 0.1 s, which only a terminal pays
    from rich.live import Live

    live = Live(
        progress,
        console=Console(file=stream),
        refresh_per_second=REFRESHES_PER_S,
        transient=True,
        redirect_stdout=False,
        redirect_stderr=False,
    )
    live.start()
    return live
