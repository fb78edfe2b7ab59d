"""The printer of `RLM(verbose=True)` and `ask -v`: each turn's reply, code, output and calls, as they happen."""

import sys
import time
from typing import TYPE_CHECKING, TextIO

from rlm_broker.trace.events import Event, RunEnded
from rlm_broker.trace.panels import console_of, show, takes_panels
from rlm_broker.trace.printing import line_of
from rlm_broker.trace.story import Passage, Story
from rlm_broker.values.text import printable

if TYPE_CHECKING:
    from rich.console import Console


DRAWN_AT_ONCE_S = 3.0
"""CPU seconds of drawing panels that are free. Beyond them, panels are left out to keep to `DRAWING_SHARE`."""
DRAWING_SHARE = 0.1
"""Largest share of the time that drawing panels takes from the event loop, which all runs of the process share."""


class VerbosePrinter:
    """Prints what a run does, as a function for `on_event`. On a terminal it draws panels; elsewhere it writes lines.

    Args:
        stream: Where to. None is stderr, as it is when an event comes.
        console: A console of rich to draw panels on, such as one that has a live line below them.
        is_whole, tells_answer: See `Story`.
    """

    def __init__(
        self,
        stream: TextIO | None = None,
        *,
        console: "Console | None" = None,
        is_whole: bool = False,
        tells_answer: bool = True,
    ) -> None:
        self._story = Story(is_whole=is_whole, tells_answer=tells_answer)
        self._stream = stream
        self._console = console
        self._is_given = console is not None
        self._has_no_bound = is_whole
        self._left_s = DRAWN_AT_ONCE_S
        self._counted_until = time.monotonic()
        self._left_out = 0

    def __call__(self, event: Event) -> None:
        """Print one event, if it has a passage."""
        passage = self._story.passage(event)
        if passage is None:
            return
        stream = self._stream or sys.stderr
        if not self._is_given and (self._console is None or self._console.file is not stream):
            self._console = console_of(stream) if takes_panels(stream) else None
        if self._console is None:
            print_lines(event, passage, stream)
        else:
            is_last = isinstance(event, RunEnded) and event.depth == 0
            self._draw(passage, event.depth, self._console, is_kept=is_last)

    def _draw(self, passage: Passage, depth: int, console: "Console", *, is_kept: bool) -> None:
        """Draw a passage. One that is not kept is left out if drawing has taken its share of the time already."""
        now = time.monotonic()
        self._left_s = min(DRAWN_AT_ONCE_S, self._left_s + DRAWING_SHARE * (now - self._counted_until))
        self._counted_until = now
        if self._left_s <= 0 and not self._has_no_bound and not is_kept:
            self._left_out += 1
            return
        if self._left_out:
            show(Passage(f"[... {self._left_out:,} left out: they came too fast to be drawn]"), depth, console)
            self._left_out = 0
        started = time.thread_time()
        show(passage, depth, console)
        self._left_s -= time.thread_time() - started


def print_lines(event: Event, passage: Passage, stream: TextIO) -> None:
    """Print a passage as plain lines: the title, and each line of its texts two columns further to the right."""
    lines = [line_of(event, passage.title)]
    for piece in passage.pieces:
        mark = ":" if piece.kind == "label" else ""
        lines += [f"  {printable(line, keep=chr(9))}{mark}" for line in piece.text.split("\n")]
    stream.write("".join(f"{line}\n" for line in lines))
    stream.flush()


_print = VerbosePrinter()


def print_events(event: Event) -> None:
    """Print to stderr what a run does, as it does it: `RLM(on_event=print_events)`, or short `RLM(verbose=True)`.

    It tells of runs, REPLs and turns, and shows each turn's reply, its code, its output, and each call with its prompt
    and reply; of a batch the first 4 calls, and a line for each tenth. Long texts lose their middle. A terminal gets
    panels, with errors in red. Elsewhere they are lines, each title with the depth of its run: `[depth 0] turn 1`.
    """
    _print(event)
