"""Memory of processes and of all that they started, read from /proc in one pass."""

import os
from collections import defaultdict
from collections.abc import Iterable, Mapping
from pathlib import Path

PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")
_PARENT, _RESIDENT = 1, 21
"""Indices of the parent and of the resident pages in /proc/PID/stat, among the fields behind the program's name."""


def own_bytes() -> int:
    """Return the resident memory of this process in bytes."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * PAGE_BYTES


def bytes_below(roots: Iterable[int]) -> Mapping[int, int]:
    """Return the resident memory in bytes of each of these processes, with all processes below it.

    A page that several processes share counts for each. Call it in a thread: it reads one file for each process of the
    machine.

    Args:
        roots: Process ids. One that has ended has 0 bytes.
    """
    wanted = set(roots)
    if not wanted:
        return {}
    resident: dict[int, int] = {}
    children: defaultdict[int, list[int]] = defaultdict(list)
    for folder in Path("/proc").iterdir():
        if not folder.name.isdigit():
            continue
        try:
            fields = (folder / "stat").read_bytes().rpartition(b")")[2].split()
        except OSError:  # it has ended meanwhile
            continue
        pid = int(folder.name)
        resident[pid] = int(fields[_RESIDENT]) * PAGE_BYTES
        children[int(fields[_PARENT])].append(pid)
    return {root: _sum(root, resident, children) for root in wanted}


def _sum(root: int, resident: Mapping[int, int], children: Mapping[int, list[int]]) -> int:
    total, left = 0, [root]
    while left:
        pid = left.pop()
        total += resident.get(pid, 0)
        left += children.get(pid, ())
    return total
