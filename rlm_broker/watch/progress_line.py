"""One live line on a terminal about a run that goes on; plain lines elsewhere.

rich draws the live line again 8 times a second, on a thread of its own. So its clock goes on while the run waits. The
end of a line that is too long is cut: what changes most, the time, comes first.
"""

import atexit
import contextlib
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, TextIO

from rlm_broker.broker.clients.base import IMPORTING
from rlm_broker.events.event import Event
from rlm_broker.events.progress import RunProgress
from rlm_broker.events.story import Story
from rlm_broker.usage import Usage
from rlm_broker.values.words import counted
from rlm_broker.watch.terminal import StoryPrinter, console_of, takes_panels

if TYPE_CHECKING:
    from rich.console import Console, ConsoleOptions, RenderableType, RenderResult
    from rich.live import Live

REFRESHES_PER_S = 8
"""Times that the live line is drawn in a second."""
ROOM_FOR_CTRL_C = 3
"""Columns that the live line leaves free. A terminal writes ^C there; without room it would begin a further line."""


class ProgressLine:
    """The progress of a run, as `rlm-broker ask` shows it. Give it as `on_event`, and close it.

    On a terminal it keeps one line up to date, and prints failures above it. Elsewhere it prints a line for each event
    that matters.

    Example:
        ```python
        with contextlib.closing(ProgressLine()) as line:
            RLM("offline", on_event=line).completion("a", "Which letter is it?")
        ```

    Args:
        stream: Receiver of the text; None is stderr.
        is_verbose: Whether each turn's reply, code, output and calls are shown, too.
        runs: Number of runs to come, of which each has its number before its lines.
    """

    def __init__(self, stream: TextIO | None = None, *, is_verbose: bool = False, runs: int = 1) -> None:
        stream = stream or sys.stderr
        self._started = time.monotonic()
        self._trees: dict[str, RunProgress] = {}
        self._live = live_line(self, stream)
        if self._live is not None:
            atexit.register(self.close)  # else an unclosed line leaves its terminal without a cursor
        console = None if self._live is None else self._live.console
        self._story = Story("texts" if is_verbose else "titles", tells_answer=False, trees=runs)
        self._printer = None if self._live and not is_verbose else StoryPrinter(self._story, stream, console=console)

    def __call__(self, event: Event) -> None:
        """Take one event: count it, and print its passage. Beside a live line only troubles need one."""
        self._trees.setdefault(event.tree, RunProgress())(event)
        if self._printer is not None:
            self._printer(event)
        elif self._live and (passage := self._story.passage(event)) and passage.is_trouble:
            self._live.console.print(passage.line, markup=False, emoji=False, soft_wrap=True)

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """Keep the live line away while the user types.

        Example:
            ```python
            with contextlib.closing(ProgressLine()) as line, line.paused():
                print("Press Ctrl+D at the end of the text.")
            ```
        """
        self.close()
        yield
        if self._live is not None:
            atexit.register(self.close)
            self._live.start()

    def close(self) -> None:
        """Remove the live line from the terminal. A second call has no effect.

        Example:
            ```python
            ProgressLine().close()
            ```
        """
        atexit.unregister(self.close)
        if self._live is not None:
            with contextlib.suppress(OSError):  # the terminal was closed
                self._live.stop()

    def __rich_console__(self, console: "Console", options: "ConsoleOptions") -> "RenderResult":
        """Yield the present line. rich asks for it at each refresh."""
        line = console.render_str(self._line(), markup=False, emoji=False, highlight=False)
        line.no_wrap = True
        line.truncate(options.max_width, overflow="ellipsis")
        yield line

    def _line(self) -> str:
        """Return the line: time and cost, turn, what is under way, and what has been used so far."""
        seconds = f"{time.monotonic() - self._started:.0f} s"
        trees = list(self._trees.values())
        if not trees:
            return f"{seconds}, starting: modules, context, sandbox"
        progress = next((each for each in trees if each.ended is None), trees[-1])
        total = sum((each.usage for each in trees), Usage())
        started = sum(each.started for each in trees)
        cost = f", ${total.total_cost:.4f}" if total.total_cost else ""
        most = "" if progress.most_turns is None else f" of {progress.most_turns:,}"
        parts = [seconds, f"turn {progress.turn}{most}{cost}"]
        parts += [f"{started} runs"] if started > 1 else []
        parts += [f"block {progress.blocks}{' running' if progress.is_running else ''}"] if progress.blocks else []
        if batch := progress.batch:
            parts.append(f"batch {batch[0]:,} of {batch[1]:,}")
        elif progress.open_calls:
            parts.append(f"waiting for {counted(progress.open_calls, 'call')}")
            parts += [f"importing {', '.join(IMPORTING)}"] if IMPORTING else []
        parts.append(f"{counted(total.total_calls, 'call')} done")
        parts += [f"{total.total_tokens:,} tokens"] if total.total_tokens else []
        return ", ".join(parts)


def live_line(line: "RenderableType", stream: TextIO) -> "Live | None":
    """Show a line on a terminal, and return what draws it again and again until it is stopped.

    Nothing is shown on a stream whose cursor cannot be moved, and None is returned.
    """
    if not takes_panels(stream):
        return None
    from rich.live import Live  # 0.1 s, which only a terminal pays

    live = Live(
        _Narrowed(line),
        console=console_of(stream),
        refresh_per_second=REFRESHES_PER_S,
        transient=True,
        redirect_stdout=False,
        redirect_stderr=True,  # warnings appear above the line
    )
    live.start()
    return live


@dataclass(frozen=True)
class _Narrowed:
    """A line that leaves the columns for ^C free."""

    line: "RenderableType"

    def __rich_console__(self, console: "Console", options: "ConsoleOptions") -> "RenderResult":
        yield from console.render(self.line, options.update_width(options.max_width - ROOM_FOR_CTRL_C))
