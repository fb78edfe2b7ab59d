"""Search for leftovers: processes, descriptors, tasks, mounts and folders."""

import asyncio
import contextlib
import ctypes
import os
import re
import time
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

import psutil

from rlm_broker.concurrency.event_loop import EventLoopRef

WAIT_S = 10.0
"""Time in seconds that an end may take, such as that of a killed process; what is there later is left."""
PAUSE_S = 0.02
_PR_SET_CHILD_SUBREAPER = 36  # include/uapi/linux/prctl.h


def adopt_orphans() -> None:
    """Become the parent of all descendants whose parents end, so that none is out of sight."""
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def reap() -> None:
    """Collect adopted processes that have ended: for the engine, which has no other children by then."""
    with contextlib.suppress(ChildProcessError):
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass


def below() -> list[psutil.Process]:
    """Descendants that live."""
    return [each for each in psutil.Process().children(recursive=True) if lives(each)]


def lives(process: psutil.Process) -> bool:
    """Whether it runs; a zombie does not."""
    try:
        return bool(process.status() != psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return False


def processes() -> list[str]:
    """Descendants that live, as what is left of a cell."""
    found = []
    for each in below():
        with contextlib.suppress(psutil.Error):
            found.append(f"process: {each.name()} {each.status()}")
    return found


def mounts(folder: Path) -> list[str]:
    """Mount points of this namespace below the folder of a cell."""
    points = [line.split()[4] for line in Path("/proc/self/mountinfo").read_text().splitlines()]
    return [f"mount: {point}" for point in points if point.startswith(str(folder))]


def folders(temporary: Path) -> list[str]:
    """List the temporary folder of a cell."""
    return [f"folder: {each.name.rstrip('0123456789_')}" for each in temporary.iterdir()] if temporary.is_dir() else []


def descriptors() -> Counter[str]:
    """Descriptors of this process by what they are open on, without the numbers of inodes."""
    found = Counter[str]()
    for fd in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(OSError):
            found[re.sub(r":\[\d+\]", "", str(fd.readlink()))] += 1
    return found


def tasks() -> list[str]:
    """Tasks on the background loop that have not ended."""
    loop = EventLoopRef.background()._loop
    return [f"task: {task.get_coro()!r}"[:90] for task in asyncio.all_tasks(loop)]


def more(now: Counter[str], before: Counter[str], kind: str) -> list[str]:
    """Return what was added since `before`."""
    return [f"{kind}: {name}" for name in (now - before).elements() if not name.startswith("/proc/")]


def after_a_while(look: Callable[[], Iterable[str]]) -> Sequence[str]:
    """Return what `look` still finds after `WAIT_S`. Return at once if it finds an empty list."""
    until = time.monotonic() + WAIT_S
    while found := list(look()):
        if time.monotonic() > until:
            return found
        time.sleep(PAUSE_S)
    return ()
