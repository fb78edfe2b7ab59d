"""Facts of this machine, or of the container around this process, that bound sandboxes."""

import contextlib
import os
import platform
import resource
import tempfile
from pathlib import Path
from typing import Any

import psutil

from rlm_broker.sandbox.workers import cgroups

DESCRIPTORS_EACH = 4
"""Descriptors of the orchestrator for one REPL: its connection, its control socket, and pidfds."""


def offered(root: Path = Path("/")) -> dict[str, Any]:
    """Return facts by name; None for a fact that cannot be found out, for example because /proc is not mounted.

    `memory_bytes` is the container's limit if that is lower than the machine's memory. `max_open_files` is the hard
    limit, to which a sandbox raises its own.

    Args:
        root: Folder in which /sys/fs/cgroup is looked for.
    """
    facts: dict[str, Any] = {
        "kernel": platform.release(),
        "architecture": platform.machine(),
        "python": platform.python_version(),
        "cpus": len(os.sched_getaffinity(0)),
        "memory_bytes": cgroups.memory_bytes(),
        "memory_available_bytes": None,
        "max_open_files": resource.getrlimit(resource.RLIMIT_NOFILE)[1],
        "temporary_folder": None,
        "temporary_free_bytes": None,
        "control_groups": _control_groups(root / "sys/fs/cgroup"),
    }
    with contextlib.suppress(OSError, psutil.Error):
        facts["memory_available_bytes"] = psutil.virtual_memory().available
    with contextlib.suppress(OSError):
        facts["temporary_folder"] = tempfile.gettempdir()
        facts["temporary_free_bytes"] = psutil.disk_usage(facts["temporary_folder"]).free
    return facts


def repls_that_fit(facts: dict[str, Any]) -> int:
    """Return how many REPLs at a time the limit of open files allows."""
    return int(facts["max_open_files"] // DESCRIPTORS_EACH)


def described(facts: dict[str, Any]) -> str:
    """Return the facts as lines of text."""
    available = facts["memory_available_bytes"]
    folder = facts["temporary_folder"]
    return "\n".join(
        (
            f"machine: Linux {facts['kernel']} on {facts['architecture']}, Python {facts['python']}",
            f"  CPUs: {facts['cpus']} usable",
            f"  memory: {_size(facts['memory_bytes'])}" + (f", {_size(available)} available" if available else ""),
            f"  temporary folder: {folder}, {_size(facts['temporary_free_bytes'])} free"
            if folder
            else "  temporary folder: none that can be written to",
            f"  control groups: {facts['control_groups'] or 'none'}",
            f"  open files: {facts['max_open_files']:,}, for about {repls_that_fit(facts):,} REPLs at a time",
        )
    )


def _control_groups(folder: Path) -> str | None:
    """Return the mounted versions: "1", "2", or "1 and 2"; None if there are none."""
    unified = (folder / "cgroup.controllers").exists()
    versions = ["1"] * (not unified and (folder / "memory").is_dir())
    versions += ["2"] * (unified or (folder / "unified/cgroup.procs").exists())
    return " and ".join(versions) or None


def _size(amount: int | None) -> str:
    if amount is None:
        return "an unknown amount"
    return f"{amount / (1 << 30):,.1f} GiB" if amount >= 1 << 30 else f"{amount / (1 << 20):,.0f} MiB"
