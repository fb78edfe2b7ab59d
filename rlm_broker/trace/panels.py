"""Passages on a terminal: panels of rich, which is imported when the first one is shown (0.3 s)."""

from typing import TYPE_CHECKING, TextIO

from rlm_broker.trace.story import Passage, Piece
from rlm_broker.values.text import printable

if TYPE_CHECKING:
    from rich.console import Console, RenderableType

INDENT = 2
"""Columns by which a run of the next depth is moved to the right."""
TROUBLE = "red"
"""Colour of errors, and of the panels that hold one."""
COLOURED_CHARS = 2_000
"""Characters of code up to which its syntax is coloured. Colouring takes up to 0.1 ms a character of hostile code."""
TITLE = "cyan"
"""Colour of all other panels."""


def takes_panels(stream: TextIO) -> bool:
    """Whether a stream is a terminal on which a cursor can be moved. `TERM=dumb` says that it is not one."""
    import os

    return stream.isatty() and os.environ.get("TERM", "").lower() not in ("dumb", "unknown")


def console_of(stream: TextIO) -> "Console":
    """Return a console of rich that writes to a stream: in colour where it is a terminal and NO_COLOR is not set."""
    from rich.console import Console

    return Console(file=stream, force_jupyter=False, highlight=False)


def show(passage: Passage, depth: int, console: "Console") -> None:
    """Print a passage: a panel, or one line if it has only a title.

    All texts are the model's or its code's. So control characters are written as escapes, and no text is markup.
    """
    from rich.padding import Padding
    from rich.text import Text

    title, indent = printable(passage.title), INDENT * depth
    if passage.pieces:
        panel = _panel(title, passage.pieces, TROUBLE if passage.is_trouble else TITLE)
        console.print(Padding(panel, (0, 0, 0, indent)))
    else:
        console.print(Text(f"{'':{indent}}{title}", TROUBLE if passage.is_trouble else ""), soft_wrap=True)


def _panel(title: str, pieces: tuple[Piece, ...], style: str) -> "RenderableType":
    from rich.console import Group
    from rich.panel import Panel
    from rich.text import Text

    return Panel(Group(*map(_body, pieces)), title=Text(title, style), title_align="left", border_style=style)


def _body(piece: Piece) -> "RenderableType":
    from rich.text import Text

    text = printable(piece.text, keep="\n\t")
    if piece.kind == "code" and len(text) <= COLOURED_CHARS:
        from rich.syntax import Syntax

        return Syntax(text, "python", theme="ansi_dark", background_color="default", word_wrap=True)
    return Text(text, {"error": TROUBLE, "label": "bold"}.get(piece.kind, ""))
