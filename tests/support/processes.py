"""The processes that a test is answerable for."""

import contextlib

import psutil


def living_below() -> set[psutil.Process]:
    """All descendants of this process; not those that ended and that their parent has yet to take leave of."""
    return set(filter(_lives, psutil.Process().children(recursive=True)))


def _lives(process: psutil.Process) -> bool:
    try:
        return bool(process.status() != psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return False


def kill_below() -> None:
    """SIGKILL to all of them; some may end with others before their turn comes."""
    for process in living_below():
        with contextlib.suppress(psutil.NoSuchProcess):
            process.kill()


def living_parents_below() -> set[int]:
    """Pids of those that have children: the fork servers and the inits."""
    parents = set()
    for process in living_below():
        with contextlib.suppress(psutil.NoSuchProcess):
            parents.add(process.ppid())
    return parents
