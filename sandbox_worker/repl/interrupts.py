"""SIGINT in the REPL: it ends the model's code, and never our own in the middle of a frame.

Only the main thread ever runs the handler, between two of its bytecodes. So the handler may raise while model code is
on top, and must not while the channel holds half a frame: there it leaves a note, which is honoured at the next safe
place.
"""

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from threading import get_ident, main_thread
from types import FrameType


class Interrupts:
    """Decides what a SIGINT may do just now. One of them, made in the main thread of a fresh REPL."""

    def __init__(self) -> None:
        self._main = main_thread().ident
        self._armed = False  # model code is running
        self._held = 0  # how many pieces of our own code want to be left alone
        self._pending = False

    def install(self) -> None:
        """Take over SIGINT. Again before every block: model code may have taken it away."""
        signal.signal(signal.SIGINT, self._on_signal)

    @contextmanager
    def armed(self) -> Iterator[None]:
        """The block's code runs here: SIGINT raises KeyboardInterrupt."""
        self._pending, self._held = False, 0
        self._armed = True
        try:
            yield
        finally:
            self._armed = False

    @contextmanager
    def held(self) -> Iterator[None]:
        """SIGINT waits until the end of this, and is raised there."""
        if get_ident() != self._main:
            yield
            return
        self._held += 1
        try:
            yield
        finally:
            self._held -= 1
        self._raise_if_due()

    @contextmanager
    def let_through(self) -> Iterator[None]:
        """Inside `held`: a wait that may be left at once, because nothing of it is lost."""
        if get_ident() != self._main:
            yield
            return
        held, self._held = self._held, 0
        try:
            self._raise_if_due()
            yield
        finally:
            self._held = held

    def _raise_if_due(self) -> None:
        if self._pending and self._held == 0 and self._armed:
            self._pending = False
            raise KeyboardInterrupt

    def _on_signal(self, _number: int, _frame: FrameType | None) -> None:
        if not self._armed:
            return  # its block has ended: the orchestrator waits for the acknowledgement before the next
        self._pending = True
        self._raise_if_due()
