"""The processes that a test is answerable for."""

import contextlib
import time
from collections.abc import Callable

import psutil

from tests.support.waiting import WAIT_S


def living_below() -> set[psutil.Process]:
    """All descendants of this process; not those that ended and that their parent has yet to take leave of."""
    return set(filter(lives, psutil.Process().children(recursive=True)))


def lives(process: psutil.Process) -> bool:
    """Return whether a process has not ended; one that its parent has yet to take leave of has."""
    try:
        return bool(process.is_running() and process.status() != psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return False


def kill_below() -> None:
    """SIGKILL to all of them; some may end with others before their turn comes."""
    for process in living_below():
        with contextlib.suppress(psutil.NoSuchProcess):
            process.kill()


def until_used(is_so: Callable[[], object], cpu_s: float = WAIT_S) -> None:
    """Block the calling thread until `is_so()`, which busy processes below bring about by the CPU time that they use.

    A busy machine may need minutes to give them that time, so that no wall time bounds the wait.

    Raises:
        TimeoutError: It was not so when they had used `cpu_s` seconds.
    """
    used_s = dict[psutil.Process, float]()
    while not is_so():
        for process in living_below():
            with contextlib.suppress(psutil.Error):
                times = process.cpu_times()
                used_s[process] = times.user + times.system + times.children_user + times.children_system
        if sum(used_s.values()) > cpu_s:
            raise TimeoutError(f"they have used {cpu_s:g} s")
        time.sleep(0.01)


def living_parents_below() -> set[int]:
    """Pids of those that have children: the fork servers and the inits."""
    parents = set()
    for process in living_below():
        with contextlib.suppress(psutil.NoSuchProcess):
            parents.add(process.ppid())
    return parents
