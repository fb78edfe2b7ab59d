"""The fork server as a process: how it is started, and why it ended."""

import contextlib
import os
import resource
import signal
import subprocess
import sys
import threading

from rlm_broker.sandbox.workers.python_paths import environment, isolated

_FORKING = threading.RLock()
"""Held by each fork of this process, and while the fork server is started. A process that is forked in between inherits
the pipe on which `Popen` waits for the start of its program: `Popen` would wait for as long as that process lives."""
os.register_at_fork(before=_FORKING.acquire, after_in_parent=_FORKING.release, after_in_child=_FORKING.release)

EXIT_OF_SIGNAL = 128
"""Added to a signal's number in the exit status of the fork server's parent, where there is one (as shells do)."""


def start(control_fd: int, paths: list[str], seed: int | None) -> tuple["subprocess.Popen[bytes]", int]:
    """The process, which serves the other end of `control_fd`, and a pidfd of it.

    Args:
        paths: Its `sys.path`.
        seed: Of its hashes; None draws one.

    Raises:
        OSError: No process or no descriptor could be had. Nothing is left.
    """
    program = f"import sys; sys.path[:] = {paths!r}; from sandbox_worker.zygote.main import main; main({control_fd})"
    with _FORKING:
        process = subprocess.Popen(
            [sys.executable, *isolated(seed), "-S", "-c", program],
            pass_fds=[control_fd],
            env=environment(seed),
            cwd="/",
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            start_new_session=True,  # a Ctrl+C at the terminal is ours to pass on
        )
    try:
        return process, os.pidfd_open(process.pid)
    except OSError:  # no descriptor is free; or it has ended already where SIGCHLD is ignored
        process.kill()
        process.communicate()
        raise


def killed_by(process: "subprocess.Popen[bytes]") -> int:
    """Number of the signal that ended it, or 0."""
    status = process.poll()
    number = -status if status is not None and status < 0 else (status or 0) - EXIT_OF_SIGNAL
    return number if number in set(signal.Signals) else 0


def why_ended(process: "subprocess.Popen[bytes]") -> str:
    """The last line that it wrote to stderr, or the signal that killed it, or its exit status."""
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(timeout=1)
    words = ""
    if process.stderr is not None:
        os.set_blocking(process.stderr.fileno(), False)
        words = (process.stderr.read() or b"").decode("utf-8", "replace").strip()
    if words:
        return words.splitlines()[-1]
    number = killed_by(process)
    return f"it was killed by {signal.Signals(number).name}" if number else f"it ended with status {process.poll()}"


def raise_descriptor_limit() -> None:
    """Raise the soft limit of open files to the hard one: three are open for a REPL, and the usual 1,024 end at 300."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft < hard:
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
