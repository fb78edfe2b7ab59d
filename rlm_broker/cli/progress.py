"""What `ask` shows while it runs: one live line on a terminal, plain lines elsewhere."""

import contextlib
import time
from typing import TYPE_CHECKING, TextIO

from rlm_broker.cli.terminal import printable
from rlm_broker.results import Block, Usage
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

if TYPE_CHECKING:
    from rich.console import Console, ConsoleOptions, RenderResult
    from rich.live import Live

REFRESHES_PER_S = 8
ROOM_FOR_CTRL_C = 3
"""Columns that the live line leaves free: a terminal writes ^C there, which would else begin a line of its own."""
CANCELLED = "cancelled"
"""Error of a call that its caller cancelled."""
MAX_ERROR_CHARS = 300
"""Characters of an error of untrusted code that a note shows."""


class ProgressLine:
    """Follows a run's events. On a terminal it keeps one line up to date, with notes of what fails above it; elsewhere
    it prints a note of everything that matters."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self._started = time.monotonic()
        self._iteration = 0
        self._most_iterations: int | None = None
        self._blocks = 0
        self._running: set[str] = set()
        self._in_flight = 0
        self._runs = 0
        self._usage: dict[tuple[str, int], Usage] = {}
        self._live = _live_line(self, stream) if stream.isatty() else None

    def __call__(self, event: Event) -> None:
        """Take one event."""
        self._count(event)
        if self._live is None:
            if note := _trouble(event) or _milestone(event):
                self._stream.write(f"[depth {event.depth}] {printable(note)}\n")
                self._stream.flush()
        elif note := _trouble(event):
            from rich.text import Text

            self._live.console.print(Text(f"[depth {event.depth}] {printable(note)}"), soft_wrap=True)

    def close(self) -> None:
        """Leave the terminal clean."""
        if self._live is not None:
            with contextlib.suppress(OSError):  # the terminal was closed
                self._live.stop()

    def __rich_console__(self, console: "Console", options: "ConsoleOptions") -> "RenderResult":
        """The line as it is now; asked for several times a second, so that the time goes on while nothing happens."""
        from rich.text import Text

        del console
        line = Text(self._line(), no_wrap=True)
        line.truncate(options.max_width - ROOM_FOR_CTRL_C, overflow="ellipsis")
        yield line

    def _line(self) -> str:
        """What changes comes first: the end of a long line is cut."""
        seconds = f"{time.monotonic() - self._started:.0f} s"
        if not self._runs:
            return f"{seconds}, reading the context and starting the sandbox"
        total = sum(self._usage.values(), Usage())
        cost = "" if total.total_cost is None else f", {_cost(total)}"
        most = "" if self._most_iterations is None else f" of {self._most_iterations:,}"
        parts = [f"{seconds}{cost}", f"iteration {self._iteration}{most}"]
        parts += [f"{self._runs} runs"] if self._runs > 1 else []
        parts += [f"block {self._blocks}{' running' if self._running else ''}"] if self._blocks else []
        parts += [f"waiting for {_counted(self._in_flight, 'call')}"] if self._in_flight else []
        return ", ".join([*parts, f"{_counted(total.total_calls, 'call')} done, {_tokens(total)}"])

    def _count(self, event: Event) -> None:
        match event:
            case RunStarted(depth=depth, metadata=metadata):
                self._runs += 1
                most = metadata.get("limits", {}).get("max_iterations")
                if depth == 0 and most is not None:
                    self._most_iterations = most if isinstance(most, int) else most[0]
            case IterationStarted(depth=0, number=number):
                self._iteration = number
            case BlockStarted():
                self._blocks += 1
                self._running.add(event.run)
            case BlockEnded() | RunEnded():  # a run that is cancelled ends without an end of its block
                self._running.discard(event.run)
            case CallStarted():
                self._in_flight += 1
            case CallEnded():
                self._in_flight -= 1
                place = (event.model or "?", event.depth)
                self._usage[place] = self._usage.get(place, Usage()) + event.usage


def _trouble(event: Event) -> str | None:
    """What a user should see also where little room is: what failed, and what is tried again."""
    match event:
        case CallRetried():
            return f"call {event.call} failed, attempt {event.attempt} in {event.wait_s:.1f} s: {event.reason}"
        case CallEnded(error=str(error)) if error != CANCELLED:  # of a call that is cancelled its block or run tells
            return f"call {event.call} failed: {_head(error)}"
        case BlockEnded(outcome=outcome) if outcome.status not in ("ok", "exited"):
            return f"block {event.block}: {_ended(outcome)}: {_head(outcome.error or '')}"
        case RunEnded(error=str(error)) if event.depth:  # of the root's own error the command tells
            return f"run {event.run}: {_head(error)} after {event.duration_s:.2f} s"
    return None


def _milestone(event: Event) -> str | None:
    match event:
        case RunStarted():
            return f"run {event.run} with {event.model}"
        case ReplReady(isolation=isolation):
            layers = f"isolation {isolation.level} ({len(isolation.layers)} layers)"
            return f"REPL ready in {event.duration_s * 1e3:.0f} ms, {layers}"
        case IterationStarted():
            return f"iteration {event.number}"
        case BlockEnded(outcome=outcome):
            return f"block {event.block}: {_ended(outcome)}"
        case RunEnded():
            return f"run {event.run}: {'failed' if event.error else 'answered'} after {event.duration_s:.2f} s"
    return None


def _head(error: str) -> str:
    """The first line of an error: what follows, such as a difference, the command tells once."""
    return error.partition("\n")[0][:MAX_ERROR_CHARS]


def _ended(outcome: Block) -> str:
    return f"{outcome.status} after {outcome.execution_time:.2f} s"


def spent(usage: Usage) -> str:
    """Calls, tokens and cost. A price that is not known is unknown, and not nothing."""
    stored = f" ({usage.stored_calls:,} of them stored, not paid)" if usage.stored_calls else ""
    return f"{_counted(usage.total_calls, 'call')}{stored}, {_tokens(usage)}, {_cost(usage)}"


def _counted(number: int, what: str) -> str:
    return f"1 {what}" if number == 1 else f"{number:,} {what}s"


def _tokens(usage: Usage) -> str:
    return f"{usage.total_input_tokens:,}+{usage.total_output_tokens:,} tokens"


def _cost(usage: Usage) -> str:
    return "cost unknown" if usage.total_cost is None else f"${usage.total_cost:.4f}"


def _live_line(progress: ProgressLine, stream: TextIO) -> "Live":
    from rich.console import Console  # 0.1 s, which only a terminal pays
    from rich.live import Live

    live = Live(
        progress,
        console=Console(file=stream),
        refresh_per_second=REFRESHES_PER_S,
        transient=True,
        redirect_stdout=False,
        redirect_stderr=True,  # warnings appear above the line
    )
    live.start()
    return live
