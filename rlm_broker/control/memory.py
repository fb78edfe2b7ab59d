"""Memory of processes and of all that they started, read from /proc in one pass."""

import os
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")
_PARENT, _RESIDENT = 1, 21
"""Indices of the parent and of the resident pages in /proc/PID/stat, among the fields behind the program's name."""


def own_bytes() -> int:
    """Return the resident memory of this process in bytes."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * PAGE_BYTES


def bytes_below(roots: Iterable[int]) -> Mapping[int, int]:
    """Return the memory in bytes of each of these processes, with all processes below it.

    A page that several processes share counts in equal parts for each (PSS), since REPLs share the interpreter and the
    context. Where the kernel does not tell that, all resident pages count. Call it in a thread: it reads a file for
    each process of the machine, and one that takes the kernel about a millisecond for each process that is measured.

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
    return {
        root: sum(_share(pid, resident[pid]) for pid in _tree(root, children) if pid in resident) for root in wanted
    }


def _tree(root: int, children: Mapping[int, list[int]]) -> Iterator[int]:
    left = [root]
    while left:
        pid = left.pop()
        yield pid
        left += children.get(pid, ())


def _share(pid: int, resident_bytes: int) -> int:
    """Return the share of a process in its resident pages; all of them if the kernel does not tell its share."""
    try:
        lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
    except OSError:  # it has ended, or is not this user's to look into
        return resident_bytes
    share = next((line for line in lines if line.startswith("Pss:")), None)
    return resident_bytes if share is None else int(share.split()[1]) << 10
