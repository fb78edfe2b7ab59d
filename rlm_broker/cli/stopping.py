"""SIGTERM and SIGHUP end a command in the way of Ctrl+C: with its partial answer, and with nothing left running."""

import signal
from typing import NoReturn

SIGNALS = (signal.SIGTERM, signal.SIGHUP)
"""Sent by `timeout`, `docker stop` and systemd, and by a terminal that is closed."""

_received = signal.SIGINT


class EndedBySignal(KeyboardInterrupt):
    """One of `SIGNALS` came. The library handles it where it handles Ctrl+C."""


def listen() -> None:
    """Raise `EndedBySignal` in the main thread for each of `SIGNALS` that is not ignored, as `nohup` ignores SIGHUP."""
    for number in SIGNALS:
        if signal.getsignal(number) is signal.SIG_DFL:
            signal.signal(number, _stop)


def has_come() -> bool:
    """Whether one of `SIGNALS` came."""
    return _received in SIGNALS


def exit_code() -> int:
    """Return the exit code of a command that was stopped: 128 and the number of the signal, by default SIGINT."""
    return 128 + _received


def _stop(number: int, _frame: object) -> NoReturn:
    global _received
    _received = signal.Signals(number)
    raise EndedBySignal
