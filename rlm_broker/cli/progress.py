"""What `ask` shows while it runs: one live line on a terminal, plain lines elsewhere."""

import contextlib
import time
from typing import TYPE_CHECKING, TextIO

from rlm_broker.trace.events import (
    BlockEnded,
    BlockStarted,
    CallEnded,
    CallStarted,
    Event,
    IterationStarted,
    RunEnded,
    RunStarted,
)
from rlm_broker.trace.printing import line_of, print_event, trouble
from rlm_broker.usage import Usage

if TYPE_CHECKING:
    from rich.console import Console, ConsoleOptions, RenderResult
    from rich.live import Live

REFRESHES_PER_S = 8
ROOM_FOR_CTRL_C = 3
"""Columns that the live line leaves free: a terminal writes ^C there, which would else begin a line of its own."""


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
        self._batches: dict[tuple[str, int], tuple[int, int]] = {}
        """Run and number of each batch that is going on -> how many of its calls have ended, and of how many."""
        self._live = _live_line(self, stream) if stream.isatty() else None

    def __call__(self, event: Event) -> None:
        """Take one event."""
        self._count(event)
        self._count_batch(event)
        if self._live is None:
            print_event(event, self._stream)
        elif note := trouble(event):
            from rich.text import Text

            self._live.console.print(Text(line_of(event, note)), soft_wrap=True)

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
        batches = self._batches.values()
        parts = [f"{seconds}{cost}", f"iteration {self._iteration}{most}"]
        parts += [f"{self._runs} runs"] if self._runs > 1 else []
        parts += [f"block {self._blocks}{' running' if self._running else ''}"] if self._blocks else []
        if batches:
            parts.append(f"batch {sum(done for done, _ in batches):,} of {sum(of for _, of in batches):,}")
        elif self._in_flight:
            parts.append(f"waiting for {_counted(self._in_flight, 'call')}")
        return ", ".join([*parts, f"{_counted(total.total_calls, 'call')} done, {_tokens(total)}"])

    def _count_batch(self, event: Event) -> None:
        match event:
            case CallStarted() if event.batch:
                self._batches.setdefault((event.run, event.batch), (0, event.of))
            case CallEnded() if event.batch:
                self._batches[event.run, event.batch] = (event.done, event.of)
                if event.done == event.of:
                    del self._batches[event.run, event.batch]
            case BlockEnded() | RunEnded():  # of some prompts no call was made
                for place in [each for each in self._batches if each[0] == event.run]:
                    del self._batches[place]

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
