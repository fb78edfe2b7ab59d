"""Errors for a fork server that this machine refuses to start, or kills."""

import contextlib
import os
import re
import signal
import subprocess
from pathlib import Path

from rlm_broker.errors import SHORT_OF, ConfigurationError, RlmBrokerError, SandboxFailed
from rlm_broker.sandbox.levels.level import unavailable
from rlm_broker.sandbox.levels.remedies import SYSTEM_CALLS
from sandbox_worker.wire.level import Level

EXIT_OF_SIGNAL = 128
"""Added to a signal's number in the exit status of the fork server's parent, if it has one, as shells do."""


def ended(level: Level, process: "subprocess.Popen[bytes]") -> RlmBrokerError:
    """Return the error for a fork server that ended before it was ready."""
    if _killed_by(process) == signal.SIGSYS:
        reason = "the fork server was killed by SIGSYS, as a system call filter does for a call that it forbids"
        return unavailable(level, SYSTEM_CALLS, reason)
    why = why_ended(process)
    number = re.search(r"\[Errno (\d+)\]", why)  # as Python's traceback ends
    what_would = SHORT_OF.get(int(number[1])) if number else None
    return SandboxFailed(f"the sandbox's fork server cannot start: {why}" + (f"; {what_would}" if what_would else ""))


def why_ended(process: "subprocess.Popen[bytes]") -> str:
    """Return the last line that a fork server wrote to stderr, or the signal that killed it, or its exit status."""
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(timeout=1)
    words = ""
    if process.stderr is not None:
        os.set_blocking(process.stderr.fileno(), False)
        words = (process.stderr.read() or b"").decode("utf-8", "replace").strip()
    if words:
        return words.splitlines()[-1]
    number = _killed_by(process)
    return f"it was killed by {signal.Signals(number).name}" if number else f"it ended with status {process.poll()}"


def utf8(path: str | Path) -> str:
    """Return `path` as the fork server names it, whose locale is C.UTF-8. Our own locale may know ASCII alone.

    Raises:
        ConfigurationError: The name is not UTF-8, so that no message can carry it.
    """
    try:
        return os.fsencode(path).decode()
    except UnicodeDecodeError:
        raise ConfigurationError(
            f"the path {os.fsencode(path)!r} is not UTF-8: rename it, or set TMPDIR if it is the temporary folder"
        ) from None


def _killed_by(process: "subprocess.Popen[bytes]") -> int:
    """Return the number of the signal that ended a process, or 0."""
    status = process.poll()
    number = -status if status is not None and status < 0 else (status or 0) - EXIT_OF_SIGNAL
    return number if number in set(signal.Signals) else 0
