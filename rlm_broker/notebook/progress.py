"""Runs as they go on, in the notebook whose cell started them."""

import asyncio
import secrets
import sys
from collections.abc import Callable
from typing import Any

from rlm_broker.callback import Callback
from rlm_broker.notebook.tree import TreeView
from rlm_broker.trace.events import Event, RunEnded

REFRESH_S = 0.25
"""Seconds between two updates of a display. Events that come earlier are shown by the next update."""

Publish = Callable[..., None]
"""`publish` of IPython's display publisher."""


def notebook_progress() -> "NotebookProgress | None":
    """Return what shows runs in the notebook of this process; None where no notebook kernel runs."""
    ipython: Any = sys.modules.get("IPython")  # a kernel has imported it; this package never does
    shell: Any = None if ipython is None else ipython.get_ipython()
    return None if getattr(shell, "kernel", None) is None else NotebookProgress(shell.display_pub.publish)


class NotebookProgress:
    """Shows each tree of runs in one display of a notebook, which is brought up to date as events come.

    Args:
        publish: Sends a display to the notebook.
    """

    def __init__(self, publish: Publish) -> None:
        self._publish = publish
        self._shown: dict[str, _Display] = {}

    def __call__(self, event: Event) -> None:
        """Take one event."""
        if event.tree not in self._shown:
            self._shown[event.tree] = _Display(self._publish)
        display = self._shown[event.tree]
        display.tree.take(event)
        if isinstance(event, RunEnded) and event.depth == 0:
            del self._shown[event.tree]
            display.show()
        else:
            display.show_soon()


class _Display:
    """One display: shown at once for the first event, then at most once in `REFRESH_S`."""

    def __init__(self, publish: Publish) -> None:
        self.tree = TreeView()
        identity = {"display_id": secrets.token_hex(8)}
        self._publish = Callback(lambda forms, again: publish(forms, transient=identity, update=again), "verbose")
        self._is_there = False
        self._timer: asyncio.TimerHandle | None = None

    def show_soon(self) -> None:
        if not self._is_there:
            self.show()
        elif self._timer is None:
            # A timer of the run's loop has the context of this task. By it the kernel finds the cell.
            self._timer = asyncio.get_running_loop().call_later(REFRESH_S, self.show)

    def show(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        forms = {"text/html": self.tree.page(), "text/plain": self.tree.headline()}
        self._publish(forms, self._is_there)
        self._is_there = True
