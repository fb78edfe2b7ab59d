"""SIGTERM and SIGHUP end a command as Ctrl+C does: it prints its partial answer, and leaves no process behind."""

import contextlib
import signal
from collections.abc import Callable, Iterator
from typing import NoReturn

SIGNALS = (signal.SIGTERM, signal.SIGHUP)
"""Signals that `timeout`, `docker stop` and systemd send, and that a closed terminal causes."""

_received = signal.SIGINT


class EndedBySignal(KeyboardInterrupt):
    """The arrival of one of `SIGNALS`. The library handles it as it handles Ctrl+C."""


def listen() -> None:
    """Raise `EndedBySignal` in the main thread for each of `SIGNALS`, and KeyboardInterrupt for Ctrl+C.

    A signal ignored by `nohup` stays ignored.
    """
    if signal.getsignal(signal.SIGINT) is not signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    for number in SIGNALS:
        if signal.getsignal(number) is signal.SIG_DFL:
            signal.signal(number, _stop)


@contextlib.contextmanager
def calling(stop: Callable[[], object]) -> Iterator[None]:
    """Call a function for each of these signals and for Ctrl+C, in place of raising."""

    def called(number: int, _frame: object) -> None:
        global _received
        _received = signal.Signals(number)
        stop()

    before = {number: signal.getsignal(number) for number in (*SIGNALS, signal.SIGINT)}
    for number, handler in before.items():
        if handler is not signal.SIG_IGN:  # as `nohup` sets it
            signal.signal(number, called)
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def has_come() -> bool:
    """Whether one of `SIGNALS` has arrived."""
    return _received in SIGNALS


def exit_code() -> int:
    """Return the exit code of a stopped command: 128 plus the number of the signal, by default SIGINT."""
    return 128 + _received


def _stop(number: int, _frame: object) -> NoReturn:
    global _received
    _received = signal.Signals(number)
    raise EndedBySignal
