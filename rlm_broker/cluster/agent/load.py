"""Memory that a node has left, for its heartbeats."""

import contextlib
from pathlib import Path

import psutil

from rlm_broker.sandbox.workers.cgroups import memory_bytes

RESERVE_SHARE = 0.05
"""Share of the node's memory that stays free: a node with less takes no further run."""
LEAST_RESERVE_BYTES = 256 << 20
"""Bytes that stay free on a small node: a REPL, its libraries and the output of its blocks need some room."""
CGROUPS = Path("/sys/fs/cgroup")
_USED_AND_LIMIT = (("memory.current", "memory.max"), ("memory.usage_in_bytes", "memory.limit_in_bytes"))
"""Files of a control group: memory in use, and its limit; for version 2 and version 1."""


def reserve_bytes(total_bytes: int | None = None) -> int:
    """Return the bytes that stay free on a node with that much memory; None: on this one."""
    total = memory_bytes() if total_bytes is None else total_bytes
    return max(LEAST_RESERVE_BYTES, int(total * RESERVE_SHARE))


def free_bytes(groups: tuple[Path, ...] | None = None) -> int:
    """Return the memory that the machine, and each control group around this process, has left.

    Args:
        groups: Folders of control groups; None takes those of this process.
    """
    left = [psutil.virtual_memory().available]
    for group in own_groups() if groups is None else groups:
        for used, limit in _USED_AND_LIMIT:
            with contextlib.suppress(OSError, ValueError):  # there is no such file; it says "max"
                taken = int((group / used).read_text()) - _reclaimable_bytes(group)
                left.append(max(0, int((group / limit).read_text()) - taken))
    return min(left)


def own_groups(cgroup: Path = Path("/proc/self/cgroup"), root: Path = CGROUPS) -> tuple[Path, ...]:
    """Return the folders of the control groups around this process that may limit its memory."""
    found = []
    with contextlib.suppress(OSError):
        for line in cgroup.read_text().splitlines():
            _, kinds, path = line.split(":", 2)
            if kinds and "memory" not in kinds.split(","):
                continue
            base = root / "memory" if kinds else root
            group = base / path.lstrip("/")
            found += [each for each in (group, *group.parents) if each.is_relative_to(base)]
    return tuple(found)


def _reclaimable_bytes(group: Path) -> int:
    """Return the bytes of files that the kernel drops before a group is out of memory."""
    with contextlib.suppress(OSError, ValueError):
        for line in (group / "memory.stat").read_text().splitlines():
            name, _, value = line.partition(" ")
            if name in ("inactive_file", "total_inactive_file"):
                return int(value)
    return 0
