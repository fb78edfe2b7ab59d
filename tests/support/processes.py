"""The processes that a test is answerable for."""

import contextlib
import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil

from tests.support.waiting import WAIT_S

LISTS_CHILDREN = Path("/proc/thread-self/children").exists()
"""Whether the kernel lists the children of a thread. Else psutil looks at all processes of the machine, for 4 ms."""


def living_below() -> set[psutil.Process]:
    """All descendants of this process; not those that ended and that their parent has yet to take leave of."""
    if not LISTS_CHILDREN:
        return set(filter(lives, psutil.Process().children(recursive=True)))
    found = set()
    for pid in _below(os.getpid()):
        with contextlib.suppress(psutil.NoSuchProcess):
            found.add(psutil.Process(pid))
    return set(filter(lives, found))


def _below(pid: int) -> Iterator[int]:
    with contextlib.suppress(OSError):  # it ends meanwhile
        for thread in Path(f"/proc/{pid}/task").iterdir():
            for child in map(int, (thread / "children").read_text().split()):
                yield child
                yield from _below(child)


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
