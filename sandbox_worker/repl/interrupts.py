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
from _signal import signal as set_handler  # type: ignore[import-not-found]  # it converts no enums: half the time
from contextlib import AbstractContextManager
from threading import get_ident, main_thread
from types import FrameType


class Interrupts:
    """State that decides what a SIGINT does. A fresh REPL makes one, in its main thread."""

    def __init__(self) -> None:
        self._main = main_thread().ident
        self._is_armed = False  # a block's code runs
        self._depth = 0  # number of nested `held` blocks in the main thread
        self._pending = False  # the note: a SIGINT came that has not been raised yet
        # Of classes and made once: a context manager made of a generator for each use takes three times as long.
        self._armed, self._held = _Armed(self), _Held(self)

    def install(self) -> None:
        """Set the handler of SIGINT. Call this before every block: model code may have set another one."""
        set_handler(signal.SIGINT, self._on_signal)

    def armed(self) -> AbstractContextManager[None]:
        """Have SIGINT raise KeyboardInterrupt inside of this, for the code of a block."""
        return self._armed

    def held(self) -> AbstractContextManager[None]:
        """Delay the KeyboardInterrupt until the end of this. In other threads this has no effect."""
        return self._held

    def let_through(self) -> AbstractContextManager[None]:
        """Have SIGINT raise at once again, inside of `held`, for a wait that loses no data when it is left."""
        return _LetThrough(self)

    def _raise_if_due(self) -> None:
        if self._pending and self._depth == 0 and self._is_armed:
            self._pending = False
            raise KeyboardInterrupt

    def _on_signal(self, _number: int, _frame: FrameType | None) -> None:
        if not self._is_armed:
            return  # the block has ended or has not begun, see the first two races above
        self._pending = True
        self._raise_if_due()


class _Armed:
    def __init__(self, interrupts: Interrupts) -> None:
        self._of = interrupts

    def __enter__(self) -> None:
        self._of._pending, self._of._depth = False, 0
        self._of._is_armed = True

    def __exit__(self, *_error: object) -> None:
        self._of._is_armed = False


class _Held:
    def __init__(self, interrupts: Interrupts) -> None:
        self._of = interrupts

    def __enter__(self) -> None:
        if get_ident() == self._of._main:
            self._of._depth += 1

    def __exit__(self, kind: object, *_error: object) -> None:
        if get_ident() == self._of._main:
            self._of._depth -= 1
            if kind is None and self._of._pending:
                self._of._raise_if_due()


class _LetThrough:
    def __init__(self, interrupts: Interrupts) -> None:
        self._of = interrupts
        self._depth = 0

    def __enter__(self) -> None:
        if get_ident() == self._of._main:
            self._depth, self._of._depth = self._of._depth, 0
            if self._of._pending:
                try:
                    self._of._raise_if_due()
                except BaseException:
                    self._of._depth = self._depth
                    raise

    def __exit__(self, *_error: object) -> None:
        if get_ident() == self._of._main:
            self._of._depth = self._depth
