"""SIGINT in the REPL: it interrupts model code, and never the REPL's own code in the middle of a frame.

Theory of operation
===================
A SIGINT passes four places:

1. The orchestrator sends `Interrupt` with the number of a block, once for each block (`BlockClock`).
2. Init writes the number to shared memory (`wire.descriptors`), then sends the signal, then answers `Interrupted`.
3. The kernel delivers the signal to the main thread, if that does not block it (`complete_signal` in kernel/signal.c).
   A system call of that thread fails with EINTR. The C handler of CPython only sets a flag (Modules/signalmodule.c).
4. CPython runs `_on_signal` in the main thread, between two bytecodes or after EINTR (PEP 475). Blocks run in this
   thread as well. So an exception from the handler appears in model code, or in our code it called.

The handler raises KeyboardInterrupt at once only if a block's code runs (`armed`) and no code of ours asks it to wait
(`held`). If code of ours asks it to wait, then it sets a note. If no block's code runs, then it ignores the signal. The
races, and how each is closed:

- *The signal comes before its block's code runs.* The handler ignores it. Then `Repl._run` arms, compares the number in
  shared memory, and raises. Init writes the number before it sends the signal, so the handler never runs before the
  number is there.
- *The signal comes after its block has ended.* The handler ignores it, and the number in shared memory belongs to an
  old block. The orchestrator sends the next block only after `Interrupted`, when the signal is queued already. So it
  cannot hit the next block.
- *The signal comes in the middle of a frame.* An exception there would leave half a frame on the connection. The
  channel sends and reads within `held`: the handler sets the note, the interrupted system call goes on (PEP 475), and
  the end of the outermost `held` raises.
- *The signal comes while the channel waits for a reply.* The wait may last for hours. So it is inside `let_through`,
  where the handler raises at once. The wait only polls; it reads no byte that an exception could lose.
- *The signal comes between the last line of model code and the end of `armed`.* `Repl._run` catches the exception, and
  the block counts as interrupted.
- *Another thread is inside `held`.* Handlers run in the main thread alone, so the code of another thread is never
  interrupted. There `held` has no effect: it would only delay the interrupt of the main thread.

Two gaps remain. If the signal comes after CPython's last check and before poll(2) has begun to wait, then the handler
runs only when the wait ends. If an exception leaves `held`, then a note stays set until the next `held` ends or waits.
In both cases the orchestrator kills the REPL after `interrupt_grace_s`, unless the block ends before. A wakeup
descriptor (`signal.set_wakeup_fd`) in every wait would close the first gap. It would cost each worker two descriptors
and more code in each wait, for a window of about a microsecond.

Alternative rejected: `signal.pthread_sigmask` around frames costs two system calls for each frame; the note costs none.
"""

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from threading import get_ident, main_thread
from types import FrameType


class Interrupts:
    """State that decides what a SIGINT does. A fresh REPL makes one, in its main thread."""

    def __init__(self) -> None:
        self._main = main_thread().ident
        self._armed = False  # a block's code runs
        self._held = 0  # number of nested `held` blocks in the main thread
        self._pending = False  # the note: a SIGINT came that has not been raised yet

    def install(self) -> None:
        """Set the handler of SIGINT. Call this before every block: model code may have set another one."""
        signal.signal(signal.SIGINT, self._on_signal)

    @contextmanager
    def armed(self) -> Iterator[None]:
        """Have SIGINT raise KeyboardInterrupt inside of this, for the code of a block."""
        self._pending, self._held = False, 0
        self._armed = True
        try:
            yield
        finally:
            self._armed = False

    @contextmanager
    def held(self) -> Iterator[None]:
        """Delay the KeyboardInterrupt until the end of this. In other threads this has no effect."""
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
        """Have SIGINT raise at once again, inside of `held`, for a wait that loses no data when it is left."""
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
            return  # the block has ended or has not begun, see the first two races above
        self._pending = True
        self._raise_if_due()
