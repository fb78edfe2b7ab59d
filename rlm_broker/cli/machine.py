"""What this machine, or the container that this process is in, offers to sandboxes."""

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
    """Facts by name; None for one that cannot be found out here, as without /proc.

    `memory_bytes` is the container's limit if that is lower than the machine's memory; `max_open_files` is the hard
    limit, which a sandbox takes.

    Args:
        root: Folder with /sys/fs/cgroup.
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
    """How many REPLs at a time the limit of open files allows."""
    return int(facts["max_open_files"] // DESCRIPTORS_EACH)


def described(facts: dict[str, Any]) -> str:
    """The facts as lines of text."""
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
    """Versions that are mounted: "1", "2", or "1 and 2"."""
    unified = (folder / "cgroup.controllers").exists()
    versions = ["1"] * (not unified and (folder / "memory").is_dir())
    versions += ["2"] * (unified or (folder / "unified/cgroup.procs").exists())
    return " and ".join(versions) or None


def _size(amount: int | None) -> str:
    if amount is None:
        return "an unknown amount"
    return f"{amount / (1 << 30):,.1f} GiB" if amount >= 1 << 30 else f"{amount / (1 << 20):,.0f} MiB"
