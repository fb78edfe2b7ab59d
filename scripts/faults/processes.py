"""Faults of processes: signals to the fork server, to init, to the REPL and to the orchestrator."""

import contextlib
import os
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path

import psutil

from scripts.faults import leftovers
from scripts.faults.cell import CLOSING
from scripts.faults.stage import Stage, Strike

WAIT_S = 10.0
"""Time in seconds until a signal must have worked."""
SWITCHED_S = 0.005
"""Time in seconds in which each thread that waits for the GIL has had it."""
Role = Callable[[], list[psutil.Process]]


def _children(process: psutil.Process) -> list[psutil.Process]:
    with contextlib.suppress(psutil.NoSuchProcess):
        return list(process.children())
    return []


def fork_servers() -> list[psutil.Process]:
    """Fork servers of this process. At "strict" the process that was started is the parent of the real one."""
    started = _children(psutil.Process())
    return [*started, *(child for parent in started for child in _children(parent) if _is_in_its_own_namespace(child))]


def inits() -> list[psutil.Process]:
    """First processes of the workers, of those in the pool, too."""
    servers = fork_servers()
    return [child for server in servers for child in _children(server) if child not in servers]


def repls() -> list[psutil.Process]:
    """REPLs that run or wait."""
    return [child for init in inits() for child in _children(init)]


def _is_in_its_own_namespace(process: psutil.Process) -> bool:
    with contextlib.suppress(OSError):
        return Path(f"/proc/{process.pid}/ns/pid").stat().st_ino != Path("/proc/self/ns/pid").stat().st_ino
    return False


def signalled(role: Role, number: int) -> Strike:
    """Send a signal to all processes of a role, and wait until it has worked."""
    state = psutil.STATUS_ZOMBIE if number == signal.SIGKILL else psutil.STATUS_STOPPED

    def strike(stage: Stage) -> None:
        met = role()
        for process in met:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.send_signal(number)
        until = time.monotonic() + WAIT_S
        # A process that ends by itself while the run closes needs no signal any more.
        wanted = (state, psutil.STATUS_ZOMBIE) if stage.phase == CLOSING else (state,)
        while not all(_is(process, wanted) for process in met):
            if time.monotonic() > until:
                stage.notes.append("the signal did not work")
                return
            time.sleep(0.001)

    return strike


def _is(process: psutil.Process, states: tuple[str, ...]) -> bool:
    try:
        return process.status() in states
    except psutil.NoSuchProcess:
        return True


def to_ourselves(number: int) -> Strike:
    """Send a signal to the orchestrator."""

    def strike(_stage: Stage) -> None:
        os.kill(os.getpid(), number)
        if number == signal.SIGSTOP:
            time.sleep(0.05)  # the other threads stop a moment after this one

    return strike


def killed_beside(fork: Callable[[], int]) -> Strike:
    """Fork a process that lives until all others of this one have ended, and kill the orchestrator."""

    def strike(_stage: Stage) -> None:
        others = leftovers.below()
        # A fork by C code copies the GIL as it is. If another thread has asked for it, the child would hand it over and
        # wait for ever until that thread, which was not forked, has taken it.
        sys.setswitchinterval(WAIT_S)
        time.sleep(SWITCHED_S)
        if fork() == 0:
            while any(map(leftovers.lives, others)):
                time.sleep(leftovers.PAUSE_S)
            os._exit(0)
        os.kill(os.getpid(), signal.SIGKILL)

    return strike


def said_by_fork(work: Callable[[], str]) -> Callable[[], str]:
    """Do this in a forked process; what is returned waits for its end, and tells what it said, or its error."""
    read_end, write_end = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            said = work()
        except BaseException as error:  # noqa: BLE001 - it is the report
            said = f"{type(error).__name__}: {error}"
        os.write(write_end, said.encode()[:4000])
        os._exit(0)
    os.close(write_end)

    def told() -> str:
        with os.fdopen(read_end) as pipe:
            said = pipe.read()
        os.waitpid(pid, 0)
        return said

    return told
