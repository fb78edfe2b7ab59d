"""Runs as they go on, in the notebook whose cell started them."""

import asyncio
import secrets
import sys
from collections.abc import Callable
from typing import Any, Protocol

from rlm_broker.notebook.markup import Markup
from rlm_broker.notebook.tree import FurtherTrees, TreeView
from rlm_broker.trace.events import Event, RunEnded, RunStarted
from rlm_broker.values.callback import Callback

REFRESH_S = 0.25
"""Seconds between two updates of a display. Events that come earlier are shown by the next update."""
MAX_DISPLAYS = 20
"""Displays of one cell. Runs that start after them share one more display, which counts them."""

Publish = Callable[..., None]
"""`publish` of IPython's display publisher."""


class View(Protocol):
    """A page that is made of events."""

    def take(self, event: Event) -> None:
        """Take one event."""

    def headline(self) -> str:
        """Return the state in a line."""

    def page(self) -> Markup:
        """Return the page."""


def notebook_progress() -> "NotebookProgress | None":
    """Return what shows runs in the notebook of this process; None where no notebook kernel runs."""
    ipython: Any = sys.modules.get("IPython")  # a kernel has imported it; this package never does
    shell: Any = None if ipython is None else ipython.get_ipython()
    if getattr(shell, "kernel", None) is None:
        return None
    return NotebookProgress(shell.display_pub.publish, lambda: shell.execution_count)


class NotebookProgress:
    """Shows each tree of runs in one display of a notebook, which is brought up to date as events come.

    Args:
        publish: Sends a display to the notebook.
        cell: Returns the number of the cell that runs.
    """

    def __init__(self, publish: Publish, cell: Callable[[], int]) -> None:
        self._publish = publish
        self._cell = cell
        self._displays: dict[str, _Display] = {}
        self._last_cell = 0
        self._in_cell = 0
        self._shared: _Display | None = None

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

    def _display(self) -> "_Display":
        cell = self._cell()
        if cell != self._last_cell:
            self._last_cell, self._in_cell, self._shared = cell, 0, None
        self._in_cell += 1
        if self._in_cell <= MAX_DISPLAYS:
            return _Display(self._publish, TreeView())
        if self._shared is None:
            self._shared = _Display(self._publish, FurtherTrees())
        return self._shared


class _Display:
    """One display: shown at once for the first event, then at most once in `REFRESH_S`, and at the end of a root.

    Attributes:
        view: What is shown.
    """

    def __init__(self, publish: Publish, view: View) -> None:
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
