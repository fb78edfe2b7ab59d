"""Progress of `ask`: one live line on a terminal, plain lines elsewhere.

rich draws the live line again 8 times a second, on a thread of its own. So its clock goes on while the run waits. The
end of a line that is too long is cut: what changes most, the time, comes first.
"""

import contextlib
import time
from collections.abc import Iterator
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
from rlm_broker.trace.panels import console_of, takes_panels
from rlm_broker.trace.printing import line_of, print_event, trouble
from rlm_broker.trace.verbose import VerbosePrinter
from rlm_broker.usage import Usage
from rlm_broker.values.words import counted, tokens

if TYPE_CHECKING:
    from rich.console import Console, ConsoleOptions, RenderableType, RenderResult
    from rich.live import Live

REFRESHES_PER_S = 8
"""Times that the live line is drawn in a second."""
ROOM_FOR_CTRL_C = 3
"""Columns that the live line leaves free. A terminal writes ^C there; without room it would begin a further line."""


class ProgressLine:
    """Follows a run's events. On a terminal it keeps one line up to date, and prints notes of failures above it.
    Elsewhere it prints a line for each event that matters.

    Args:
        is_verbose: Whether each turn's reply, code, output and calls are shown, too.
    """

    def __init__(self, stream: TextIO, *, is_verbose: bool = False) -> None:
        self._stream = stream
        self._started = time.monotonic()
        self._turn = 0
        self._most_turns: int | None = None
        self._blocks = 0
        self._running: set[str] = set()
        self._in_flight = 0
        self._runs = 0
        self._usage: dict[tuple[str, int], Usage] = {}
        self._batches: dict[tuple[str, int], tuple[int, int]] = {}
        """Run and number of each batch under way -> how many of its calls have ended, and how many there are."""
        self._live = live_line(self, stream) if takes_panels(stream) else None
        console = None if self._live is None else self._live.console
        self._verbose = VerbosePrinter(stream, console=console, tells_answer=False) if is_verbose else None

    def __call__(self, event: Event) -> None:
        """Take one event: count it, and print what is to be said of it."""
        self._count(event)
        self._count_batch(event)
        if self._verbose is not None:
            self._verbose(event)
        elif self._live is None:
            print_event(event, self._stream)
        elif note := trouble(event):
            from rich.text import Text

            self._live.console.print(Text(line_of(event, note)), soft_wrap=True)

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """Keep the live line away while the user types."""
        self.close()
        yield
        if self._live is not None:
            self._live.start()

    def close(self) -> None:
        """Remove the live line from the terminal. A second call has no effect."""
        if self._live is not None:
            with contextlib.suppress(OSError):  # the terminal was closed
                self._live.stop()

    def __rich_console__(self, console: "Console", options: "ConsoleOptions") -> "RenderResult":
        """Yield the present line. rich asks for it at each refresh."""
        from rich.text import Text

        del console
        line = Text(self._line(), no_wrap=True)
        line.truncate(options.max_width - ROOM_FOR_CTRL_C, overflow="ellipsis")
        yield line

    def _line(self) -> str:
        """Return the line: time and cost, turn, what is under way, and what has been used so far."""
        seconds = f"{time.monotonic() - self._started:.0f} s"
        if not self._runs:
            return f"{seconds}, starting: modules, context, sandbox"
        # Copies: this runs on the thread of rich, and a dict that grows while it is iterated would end that thread.
        total = sum(list(self._usage.values()), Usage())
        cost = f", ${total.total_cost:.4f}" if total.total_cost else ""
        most = "" if self._most_turns is None else f" of {self._most_turns:,}"
        batches = list(self._batches.values())
        parts = [seconds, f"turn {self._turn}{most}{cost}"]
        parts += [f"{self._runs} runs"] if self._runs > 1 else []
        parts += [f"block {self._blocks}{' running' if self._running else ''}"] if self._blocks else []
        if batches:
            parts.append(f"batch {sum(done for done, _ in batches):,} of {sum(of for _, of in batches):,}")
        elif self._in_flight:
            parts.append(f"waiting for {counted(self._in_flight, 'call')}")
        parts += [f"{counted(total.total_calls, 'call')} done", tokens(total)]
        return ", ".join(filter(None, parts))

    def _count_batch(self, event: Event) -> None:
        match event:
            case CallStarted() if event.batch:
                self._batches.setdefault((event.run, event.batch), (0, event.of))
            case CallEnded() if event.batch:
                self._batches[event.run, event.batch] = (event.done, event.of)
                if event.done == event.of:
                    del self._batches[event.run, event.batch]
            case BlockEnded() | RunEnded():  # for refused prompts of the batch there was no call
                for place in [each for each in self._batches if each[0] == event.run]:
                    del self._batches[place]

    def _count(self, event: Event) -> None:
        match event:
            case RunStarted(depth=depth, metadata=metadata):
                self._runs += 1
                most = metadata.get("limits", {}).get("max_iterations")
                if depth == 0 and most is not None:
                    self._most_turns = most if isinstance(most, int) else most[0]
            case IterationStarted(depth=0, number=number):
                self._turn = number
            case BlockStarted():
                self._blocks += 1
                self._running.add(event.run)
            case BlockEnded() | RunEnded():  # the block of a cancelled run gets no event of its end
                self._running.discard(event.run)
            case CallStarted():
                self._in_flight += 1
            case CallEnded():
                self._in_flight -= 1
                place = (event.model or "?", event.depth)
                self._usage[place] = self._usage.get(place, Usage()) + event.usage


def live_line(line: "RenderableType", stream: TextIO) -> "Live":
    """Show a line on a terminal, and return what draws it again and again until it is stopped."""
    from rich.live import Live  # 0.1 s, which only a terminal pays

    live = Live(
        line,
        console=console_of(stream),
        refresh_per_second=REFRESHES_PER_S,
        transient=True,
        redirect_stdout=False,
        redirect_stderr=True,  # warnings appear above the line
    )
    live.start()
    return live
