"""Errors for a fork server that this machine does not let start, or kills."""

import os
import re
import signal
import subprocess
from pathlib import Path

from rlm_broker.errors import ConfigurationError, RlmBrokerError, SandboxFailed
from rlm_broker.sandbox.levels.level import unavailable
from rlm_broker.sandbox.levels.remedies import OUT_OF_RESOURCES, SYSTEM_CALLS
from rlm_broker.sandbox.workers import zygote_process
from sandbox_worker.wire.level import Level


def cannot_start(error: OSError) -> SandboxFailed:
    """The error for a fork server whose process, sockets or folder the kernel refused."""
    what_would = OUT_OF_RESOURCES.get(error.errno or 0, "")
    return SandboxFailed(
        f"the sandbox's fork server cannot be started: {error.strerror or error}. {what_would}".strip()
    )


def ended(level: Level, process: "subprocess.Popen[bytes]") -> RlmBrokerError:
    """The error for a fork server that ended before it was ready."""
    if zygote_process.killed_by(process) == signal.SIGSYS:
        reason = "the fork server was killed by SIGSYS, as a system call filter does for a call that it forbids"
        return unavailable(level, SYSTEM_CALLS, reason)
    why = zygote_process.why_ended(process)
    number = re.search(r"\[Errno (\d+)\]", why)  # as Python's traceback ends
    what_would = OUT_OF_RESOURCES.get(int(number[1])) if number else None
    return SandboxFailed(f"the sandbox's fork server cannot start: {why}" + (f". {what_would}" if what_would else ""))


def utf8(path: str | Path) -> str:
    """`path` as the fork server names it, whose locale is C.UTF-8. Ours may know ASCII alone.

    Raises:
        ConfigurationError: The name is not UTF-8, so that no message can carry it.
    """
    try:
        return os.fsencode(path).decode()
    except UnicodeDecodeError:
        raise ConfigurationError(
            f"the path {os.fsencode(path)!r} is not UTF-8: rename it, or set TMPDIR if it is the temporary folder"
        ) from None
