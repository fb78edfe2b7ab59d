"""The story of runs on a terminal: panels of rich where a cursor can be moved, and plain lines elsewhere.

All texts are the model's or its code's. So control characters are written as escapes, and no text is markup. rich is
imported when the first panel is drawn (0.3 s).
"""

import os
import sys
import time
from typing import TYPE_CHECKING, TextIO

from rlm_broker.broker.clients.base import IMPORTING
from rlm_broker.events.event import CallStarted, Event
from rlm_broker.events.story import Passage, PassageText, Story
from rlm_broker.values.text import printable

if TYPE_CHECKING:
    from rich.console import Console, RenderableType

DRAWN_AT_ONCE_S = 3.0
"""CPU seconds of drawing without a bound. Beyond them, panels are left out to keep to `DRAWING_SHARE`."""
DRAWING_SHARE = 0.1
"""Largest share of the event loop's time for drawing panels: all runs of the process share that loop."""
INDENT = 2
"""Columns by which a run of the next depth is moved to the right."""
TROUBLE = "red"
"""Colour of errors, and of the panels holding one."""
TITLE = "cyan"
"""Colour of all other panels."""
COLOURED_CHARS = 2_000
"""Characters of code with coloured syntax; longer code has none. A character of hostile code takes up to 0.1 ms."""


class StoryPrinter:
    """Prints a story as it goes on, as a function for `on_event`.

    Args:
        story: Makes the passages; None shows texts below titles.
        stream: Receiver of the text. None is stderr, as it is when an event comes.
        console: A console of rich to draw panels on, for example one with a live line below them.
        has_no_bound: Whether panels may take any time to draw.
    """

    def __init__(
        self,
        story: Story | None = None,
        stream: TextIO | None = None,
        *,
        console: "Console | None" = None,
        has_no_bound: bool = False,
    ) -> None:
        self._story = story or Story()
        self._stream = stream
        self._console = console
        self._is_given = console is not None
        self._has_no_bound = has_no_bound
        self._left_s = DRAWN_AT_ONCE_S
        self._counted_until = time.monotonic()
        self._left_out = 0
        self._tells_import = False

    def __call__(self, event: Event) -> None:
        """Print one event, if it has a passage."""
        if (passage := self._story.passage(event)) is not None:
            self._print(passage)
        if IMPORTING and not self._tells_import and isinstance(event, CallStarted):
            self._tells_import = True
            note = f"waiting for the import of {', '.join(IMPORTING)}, which takes seconds"
            self._print(Passage("call", event.run, event.depth, note))

    def _print(self, passage: Passage) -> None:
        stream = self._stream or sys.stderr
        if not self._is_given and (self._console is None or self._console.file is not stream):
            self._console = console_of(stream) if takes_panels(stream) else None
        if self._console is None:
            _print_lines(passage, stream)
        else:
            self._draw(passage, self._console)

    def _draw(self, passage: Passage, console: "Console") -> None:
        """Draw a passage. If drawing has taken its share of the time, only the end of a root run is drawn."""
        now = time.monotonic()
        self._left_s = min(DRAWN_AT_ONCE_S, self._left_s + DRAWING_SHARE * (now - self._counted_until))
        self._counted_until = now
        is_last = passage.kind == "end" and passage.depth == 0
        if self._left_s <= 0 and not self._has_no_bound and not is_last:
            self._left_out += 1
            return
        if self._left_out:
            note = f"[... {self._left_out:,} left out: they came too fast to be drawn]"
            _show(Passage(passage.kind, passage.run, passage.depth, note), console)
            self._left_out = 0
        started = time.thread_time()
        _show(passage, console)
        self._left_s -= time.thread_time() - started


_print = StoryPrinter()


def print_events(event: Event) -> None:
    """Print to stderr what a run does, as it does it: `RLM(on_event=print_events)`, or short `RLM(verbose=True)`.

    It tells of runs, REPLs and turns, and shows each turn's reply, its code, its output, and each call with its prompt
    and reply; of a batch the first 4 calls, and a line for each tenth. Long texts lose their middle. A terminal gets
    panels, with errors in red. Elsewhere they are lines, each title with the depth of its run: `[depth 0] turn 1`.

    Example:
        ```python
        RLM("offline", on_event=print_events).completion("a", "Which letter is it?")
        ```
    """
    _print(event)


def takes_panels(stream: TextIO) -> bool:
    """Whether a stream is a terminal with a cursor that moves; not with `TERM=dumb`."""
    return stream.isatty() and os.environ.get("TERM", "").lower() not in ("dumb", "unknown")


def console_of(stream: TextIO) -> "Console":
    """Return a console of rich for a stream: in colour on a terminal without NO_COLOR."""
    from rich.console import Console

    return Console(file=stream, force_jupyter=False, highlight=False)


def _print_lines(passage: Passage, stream: TextIO) -> None:
    """Print a passage as plain lines: the title, and each line of its texts two columns further to the right."""
    lines = [passage.line]
    for piece in passage.pieces:
        mark = ":" if piece.kind == "label" else ""
        lines += [f"  {printable(line, keep=chr(9))}{mark}" for line in piece.text.split("\n")]
    stream.write("".join(f"{line}\n" for line in lines))
    stream.flush()


def _show(passage: Passage, console: "Console") -> None:
    """Print a passage: a panel, or one line if it has only a title."""
    from rich.console import Group
    from rich.padding import Padding
    from rich.panel import Panel
    from rich.text import Text

    title, indent = printable(passage.title), INDENT * passage.depth
    if not passage.pieces:
        console.print(Text(f"{'':{indent}}{title}", TROUBLE if passage.is_trouble else ""), soft_wrap=True)
        return
    style = TROUBLE if passage.is_trouble else TITLE
    texts = Group(*map(_body, passage.pieces))
    console.print(
        Padding(Panel(texts, title=Text(title, style), title_align="left", border_style=style), (0, 0, 0, indent))
    )


def _body(piece: PassageText) -> "RenderableType":
    from rich.text import Text

    text = printable(piece.text, keep="\n\t")
    if piece.kind == "code" and len(text) <= COLOURED_CHARS:
        from rich.syntax import Syntax

        return Syntax(text, "python", theme="ansi_dark", background_color="default", word_wrap=True)
    return Text(text, {"error": TROUBLE, "label": "bold"}.get(piece.kind, ""))
