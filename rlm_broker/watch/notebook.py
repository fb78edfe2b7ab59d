"""The story of runs as they go on, in the notebook whose cell started them.

A tree of runs is one display: the passages of the root's turns, each turn folded, then the runs below it and their
troubles. Many runs of one cell share a display.
"""

import asyncio
import secrets
import sys
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from rlm_broker.events.callback import Callback
from rlm_broker.events.event import BlockPrinted, CallEnded, Event, IterationStarted, RunEnded, RunStarted
from rlm_broker.events.progress import RunProgress
from rlm_broker.events.story import Passage, Story
from rlm_broker.usage import Tally
from rlm_broker.values.markup import Markup, TextBudget, box, escaped, folded, joined, line, paragraph
from rlm_broker.values.words import counted, spent

MAX_TURNS = 20
"""Turns of the root in a page. Earlier ones are counted."""
MAX_RUNS = 8
"""Live child runs named in a page. Further ones are counted."""
MAX_BLOCKS = 10
"""Blocks of a turn in a page. Later ones are counted."""
MAX_CALLS = 10
"""Calls of models and tools of a turn in a page. Later ones are counted."""
MAX_NOTES = 10
"""Troubles in a page apart from the turns. Earlier ones go."""
KEPT_CHARS = 4_000
"""Characters kept of the output of a running block: the last."""
TEXT_CHARS = 20_000
"""Characters of all texts in a page. Each update sends the whole page to the browser."""
REFRESH_S = 0.25
"""Seconds between two updates of a display. Earlier events wait for the next update."""
MAX_DISPLAYS = 20
"""Displays of one cell. Later runs share one more display: a count of them."""

Publish = Callable[..., None]
"""`publish` of IPython's display publisher."""


def notebook_progress() -> "NotebookProgress | None":
    """Return the receiver of events for the notebook of this process; None where no notebook kernel runs."""
    ipython: Any = sys.modules.get("IPython")  # a kernel has imported it; this package never does
    shell: Any = None if ipython is None else ipython.get_ipython()
    if getattr(shell, "kernel", None) is None:
        return None
    return NotebookProgress(shell.display_pub.publish, lambda: shell.execution_count)


class NotebookProgress:
    """Shows each tree of runs in one display of a notebook, and updates it as events come.

    Args:
        publish: Sends a display to the notebook.
        cell: Returns the number of the running cell.
    """

    def __init__(self, publish: Publish, cell: Callable[[], int]) -> None:
        self._publish = publish
        self._cell = cell
        self._displays: dict[str, _LiveTree] = {}
        self._last_cell = 0
        self._in_cell = 0
        self._shared: _LiveTree | None = None

    def __call__(self, event: Event) -> None:
        """Take one event."""
        if isinstance(event, RunStarted) and event.depth == 0:
            self._displays[event.tree] = self._display()
        display = self._displays.get(event.tree)
        if display is None:
            return
        display.view.take(event)
        if isinstance(event, RunEnded) and event.depth == 0:
            del self._displays[event.tree]
            display.show()
        else:
            display.show_soon()

    def _display(self) -> "_LiveTree":
        cell = self._cell()
        if cell != self._last_cell:
            self._last_cell, self._in_cell, self._shared = cell, 0, None
        self._in_cell += 1
        if self._in_cell <= MAX_DISPLAYS:
            return _LiveTree(self._publish, TreeView())
        if self._shared is None:
            self._shared = _LiveTree(self._publish, FurtherTrees())
        return self._shared


class _LiveTree:
    """One display: shown at once for the first event, then at most once in `REFRESH_S`, and at the end of a root.

    Attributes:
        view: What is shown.
    """

    def __init__(self, publish: Publish, view: "TreeView | FurtherTrees") -> None:
        self.view = view
        identity = {"display_id": secrets.token_hex(8)}
        self._publish = Callback(lambda forms, again: publish(forms, transient=identity, update=again), "verbose")
        self._is_there = False
        self._is_due = False
        self._is_new = True

    def show_soon(self) -> None:
        self._is_new = True
        if not self._is_there:
            self.show()
        elif not self._is_due:
            self._is_due = True
            # A timer of the run's loop has the context of this task. By it the kernel finds the cell.
            asyncio.get_running_loop().call_later(REFRESH_S, self._show_what_is_new)

    def show(self) -> None:
        self._is_new = False
        self._publish({"text/html": self.view.page(), "text/plain": self.view.headline()}, self._is_there)
        self._is_there = True

    def _show_what_is_new(self) -> None:
        self._is_due = False
        if self._is_new:
            self.show()


@dataclass(slots=True)
class _Turn:
    """A turn of the root: its passages so far, and the output of its running block."""

    number: int
    passages: list[Passage] = field(default_factory=list)
    output: str = ""
    blocks: int = 0
    calls: int = 0
    left_out: int = 0

    def add(self, passage: Passage) -> bool:
        """Keep a passage, unless the turn has as many as are shown; return whether it is kept."""
        self.blocks += passage.kind == "block"
        self.calls += passage.kind in ("call", "tool")
        if passage.kind in ("block", "output"):
            self.output = ""
        if self.blocks > MAX_BLOCKS or (self.calls > MAX_CALLS and passage.kind in ("call", "tool")):
            self.left_out += 1
            return False
        self.passages.append(passage)
        return True

    def page(self, texts: TextBudget, *, is_open: bool) -> Markup:
        """Return the turn: each passage as its title and its texts."""
        parts = [] if self.passages else [paragraph(escaped("the model is being asked"))]
        for passage in self.passages:
            parts.append(paragraph(line(passage.title)))
            for piece in passage.pieces:
                is_label = piece.kind == "label"
                kind = "error" if piece.kind == "error" else ""
                parts.append(paragraph(line(piece.text)) if is_label else box(texts.fitted(piece.text), kind))
        parts += [box(texts.fitted(self.output))] if self.output else []
        parts += [paragraph(escaped(f"{counted(self.left_out, 'later step')} not shown"))] if self.left_out else []
        ends = [passage.title for passage in self.passages if passage.kind == "output"]
        state = "running" if self.passages and self.passages[-1].kind == "block" else ""
        told = "; ".join([*ends, state] if state else ends)
        return folded(line(f"turn {self.number}: {told or 'no code'}"), joined(parts), is_open=is_open)


class TreeView:
    """The story of one tree of runs so far: the root with its turns, and the live runs below it."""

    def __init__(self) -> None:
        self._story = Story()
        self._progress = RunProgress()
        self._turns: deque[_Turn] = deque(maxlen=MAX_TURNS)
        self._children: dict[str, int] = {}
        self._notes: deque[str] = deque(maxlen=MAX_NOTES)

    def take(self, event: Event) -> None:
        """Take one event."""
        self._progress(event)
        is_root = "." not in event.run
        match event:
            case IterationStarted(number=number) if is_root:
                self._turns.append(_Turn(number))
            case BlockPrinted(text=text) if is_root and self._turns:
                self._turns[-1].output = (self._turns[-1].output + text)[-KEPT_CHARS:]
            case RunStarted() | IterationStarted() if not is_root:
                self._children[event.run] = event.number if isinstance(event, IterationStarted) else 0
            case RunEnded() if not is_root:
                self._children.pop(event.run, None)
        passage = self._story.passage(event)
        if passage is None or passage.kind == "turn" or (is_root and passage.kind == "end"):
            return
        is_shown = is_root and bool(self._turns) and self._turns[-1].add(passage)
        if passage.is_trouble and not is_shown:
            self._notes.append(passage.line)

    def headline(self) -> str:
        """Return the state of the tree in a line."""
        progress = self._progress
        end = progress.ended
        state = f"turn {progress.turn}" if progress.turn else "starting"
        if end is not None:
            state = f"{end.how} after {end.duration_s:.1f} s"
        parts = [*([progress.model] if progress.model else []), state]
        used = progress.usage
        parts += [spent(used)] if used.total_calls else []
        parts += [f"{counted(progress.open_calls, 'call')} open"] if progress.open_calls and end is None else []
        children = progress.started - 1
        parts += [f"{counted(children, 'child run')}, {len(self._children)} open"] if children > 0 else []
        return ", ".join(parts)

    def page(self) -> Markup:
        """Return the page: the last turn is open while the tree goes on, and all are closed when it has ended."""
        goes_on = self._progress.ended is None
        texts = TextBudget(TEXT_CHARS, sum(1 + sum(len(each.pieces) for each in turn.passages) for turn in self._turns))
        parts = [turn.page(texts, is_open=goes_on and turn is self._turns[-1]) for turn in self._turns]
        if self._turns and (earlier := self._turns[0].number - 1):
            parts.insert(0, paragraph(escaped(f"{counted(earlier, 'earlier turn')} not shown")))
        running = [f"run {run}: turn {number}" for run, number in list(self._children.items())[:MAX_RUNS]]
        parts += [paragraph(line(each)) for each in [*running, *self._notes]]
        return folded(line(self.headline()), joined(parts), is_open=goes_on)


class FurtherTrees:
    """Many trees in one page: their number, their usage, and the number of failures."""

    def __init__(self) -> None:
        self._open: set[str] = set()
        self._ended = 0
        self._failed = 0
        self._tally = Tally()

    def take(self, event: Event) -> None:
        """Take one event of any of the trees."""
        match event:
            case RunStarted(depth=0):
                self._open.add(event.tree)
            case CallEnded():
                self._tally.add(event.usage)
            case RunEnded(depth=0):
                self._open.discard(event.tree)
                self._ended += 1
                self._failed += event.error is not None

    def headline(self) -> str:
        """Return the state of all of them, in a line."""
        counts = f"{counted(len(self._open) + self._ended, 'further run')}: {len(self._open)} open, {self._ended} ended"
        return f"{counts}, {self._failed} of them failed; {spent(self._tally.usage)}"

    def page(self) -> Markup:
        """Return the same as a page."""
        return paragraph(line(self.headline()))
