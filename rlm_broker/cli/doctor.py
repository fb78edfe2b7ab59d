"""`rlm-broker doctor`: starts a real worker at each level, lets it try what is forbidden, and reports.

The report has facts of this machine, or of the container around this process, that bound sandboxes.
"""

import contextlib
import dataclasses
import json
import os
import platform
import resource
import tempfile
from pathlib import Path
from typing import Any

import click
import psutil

from rlm_broker.errors import IsolationUnavailable, RlmBrokerError
from rlm_broker.sandbox.sandbox import Sandbox
from rlm_broker.sandbox.workers.cgroups import GROUP_REMEDY, MemoryGroups, memory_bytes
from rlm_broker.sandbox.workers.python_paths import maps_texts
from sandbox_worker.wire.level import LEVELS, Level, LevelName

IDLE_REPL_BYTES = 3_500_000
"""Memory of an idle REPL with its init, and the kernel's for them."""
OPEN_FILES, AVAILABLE_MEMORY = "ulimit -n", "available memory"
TAKEN_BY_EACH = {
    OPEN_FILES: 4,  # its connection, its control socket, and pidfds
    "ulimit -u": 2,  # init and the REPL
    "kernel.pid_max": 2,
    "kernel.threads-max": 2,
    "pids.max": 2,
    "user.max_user_namespaces": 1,
    "user.max_pid_namespaces": 1,
    "user.max_mnt_namespaces": 1,
    "user.max_ipc_namespaces": 1,
    "user.max_uts_namespaces": 1,
    "net.ipv4.ip_local_port_range": 1,  # the number of ports: its connection goes through the loopback device
    AVAILABLE_MEMORY: IDLE_REPL_BYTES,
}
"""Bound of this machine → what one idle REPL takes of it. Bounds without a value here do not hold here."""
SHOWN_BOUNDS = 4
"""Bounds that the text names, from the lowest. JSON has all."""
TEXTS = {
    True: "shared by all REPLs",
    False: "copied by each REPL: this Python has another layout of strings",
    None: "shared or copied: no process can be forked here to find that out",
}
"""Descriptions of `maps_texts`."""


def run(*, as_json: bool) -> int:
    """Try each level out, print the report, and return the exit code."""
    facts = machine_facts()
    mapped = _maps_texts()
    levels = {level.name: _tried_out(level) for level in LEVELS if level.is_security_boundary}
    groups = _memory_groups_version()
    auto = _auto(levels)
    report = {
        "auto": auto,
        "levels": levels,
        "exact_memory": groups is not None,
        "control_groups": groups,
        "repls_that_fit": repls_that_fit(facts),
        "repl_bounds": repl_bounds(facts),
        "maps_texts": mapped,
        "machine": facts,
    }
    if as_json:
        click.echo(json.dumps(report, ensure_ascii=False))
    else:
        _print(report)
        click.echo(described(facts))
        click.echo(f"isolation 'auto' is '{auto}' here" if auto else "isolation 'auto' cannot be had here")
    return 0 if auto else 4


def _tried_out(level: Level) -> dict[str, Any]:
    """Return what a worker of a level found.

    Keys: `layers` has the names of the layers that hold. `refused` maps each attempt of the canary to whether it was
    refused. `problem` is None or a sentence. With a problem there is its `kind`, as in JSON errors; if a layer failed,
    there are also `failed_layer`, `reason` and `remedy`.
    """
    from rlm_broker.errors import IsolationUnavailable  # these import what --help need not wait for
    from rlm_broker.sandbox.workers import canary

    try:
        with Sandbox(isolation=level.name) as sandbox, sandbox.repl() as repl:
            refused = canary.verdict(level, repl.execute(canary.PROGRAM).final_answer)
            return {**dataclasses.asdict(repl.isolation), "refused": refused, "problem": None}
    except RlmBrokerError as error:
        found: dict[str, Any] = {
            "level": level.name,
            "layers": (),
            "refused": {},
            "problem": str(error),
            "kind": error.kind,
        }
        if isinstance(error, IsolationUnavailable) and error.layer:
            found |= {"failed_layer": error.layer, "reason": error.reason, "remedy": error.remedy}
        return found


def _maps_texts() -> bool | None:
    """Return whether REPLs share the texts of a context; None if no process can be forked to try it out."""
    try:
        return maps_texts()
    except OSError:  # no further process is allowed; or SIGCHLD is ignored, so that the kernel keeps no exit status
        return None


def _auto(levels: dict[LevelName, dict[str, Any]]) -> LevelName | None:
    """Return the level that `auto` takes: a weaker one only if the stronger one is not available on this machine."""
    for level, found in levels.items():
        if found["problem"] is None:
            return level
        if found["kind"] != IsolationUnavailable.kind:
            return None
    return None


def _memory_groups_version() -> int | None:
    """Return the version of control groups that give REPLs exact limits of memory; None if there are none."""
    try:
        groups = MemoryGroups.find()
    except OSError:  # /proc is not mounted
        return None
    if groups is not None:
        groups.close()
    return None if groups is None else groups.version


def _print(report: dict[str, Any]) -> None:
    for level, found in report["levels"].items():
        click.echo(f"{level}:")
        for layer in found["layers"]:
            click.echo(f"  ok    {layer}")
        for attempt, held in found["refused"].items():
            click.echo(f"  {'ok  ' if held else 'FAIL'}  a worker cannot {attempt}")
        if "remedy" in found:
            click.echo(f"  FAIL  {found['reason']}\n        {found['remedy']}")
        elif found["problem"]:
            click.echo(f"  FAIL  {found['problem']}")
    version = report["control_groups"]
    exact = f"control groups (version {version})" if version else f"no control group for memory: {GROUP_REMEDY}"
    click.echo(f"exact_memory: {exact}")
    click.echo(f"texts of a context: {TEXTS[report['maps_texts']]}")


def machine_facts(root: Path = Path("/")) -> dict[str, Any]:
    """Return facts by name; None for a fact that cannot be found out, for example because /proc is not mounted.

    `memory_bytes` is the container's limit if that is lower than the machine's memory. `max_open_files` is the hard
    limit, to which a sandbox raises its own.

    Args:
        root: Folder in which /sys/fs/cgroup and /proc/sys are looked for.
    """
    facts: dict[str, Any] = {
        "kernel": platform.release(),
        "architecture": platform.machine(),
        "python": platform.python_version(),
        "cpus": len(os.sched_getaffinity(0)),
        "memory_bytes": memory_bytes(),
        "memory_available_bytes": None,
        "max_open_files": resource.getrlimit(resource.RLIMIT_NOFILE)[1],
        "temporary_folder": None,
        "temporary_free_bytes": None,
        "control_groups": _control_groups(root / "sys/fs/cgroup"),
        "kernel_limits": _kernel_limits(root),
    }
    with contextlib.suppress(OSError, psutil.Error):
        facts["memory_available_bytes"] = psutil.virtual_memory().available
    with contextlib.suppress(OSError):
        facts["temporary_folder"] = tempfile.gettempdir()
        facts["temporary_free_bytes"] = psutil.disk_usage(facts["temporary_folder"]).free
    return facts


def repl_bounds(facts: dict[str, Any]) -> dict[str, dict[str, int]]:
    """Return each bound of the number of REPLs by its name, the lowest first: its value, and the REPLs that fit."""
    values = {
        OPEN_FILES: facts["max_open_files"],
        **facts["kernel_limits"],
        AVAILABLE_MEMORY: facts["memory_available_bytes"],
    }
    found = {
        name: {"value": value, "repls": value // TAKEN_BY_EACH[name]}
        for name, value in values.items()
        if value is not None
    }
    return dict(sorted(found.items(), key=lambda item: item[1]["repls"]))


def repls_that_fit(facts: dict[str, Any]) -> int:
    """Return how many idle REPLs this machine carries at a time."""
    return next(iter(repl_bounds(facts).values()))["repls"]


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
            "  idle REPLs at a time:",
            *(
                f"    {bound['repls']:>9,} by {name} = "
                + (_size(bound["value"]) if name == AVAILABLE_MEMORY else f"{bound['value']:,}")
                for name, bound in list(repl_bounds(facts).items())[:SHOWN_BOUNDS]
            ),
        )
    )


def _control_groups(folder: Path) -> str | None:
    """Return the mounted versions: "1", "2", or "1 and 2"; None if there are none."""
    unified = (folder / "cgroup.controllers").exists()
    versions = ["1"] * (not unified and (folder / "memory").is_dir())
    versions += ["2"] * (unified or (folder / "unified/cgroup.procs").exists())
    return " and ".join(versions) or None


def _kernel_limits(root: Path) -> dict[str, int | None]:
    """Return the limits of processes, namespaces and ports by their names; None where there is none."""
    limits: dict[str, int | None] = {}
    for name in TAKEN_BY_EACH:
        if name.startswith(("kernel.", "user.", "net.")):
            words = _words(root / "proc/sys" / name.replace(".", "/"))
            limits[name] = int(words[-1]) - (int(words[0]) - 1 if len(words) == 2 else 0) if words else None
    own = resource.getrlimit(resource.RLIMIT_NPROC)[1]
    limits["ulimit -u"] = None if own == resource.RLIM_INFINITY or os.geteuid() == 0 else own  # root may have more
    groups = [_words(root / "sys/fs/cgroup" / name) for name in ("pids.max", "pids/pids.max")]
    limits["pids.max"] = min((int(words[0]) for words in groups if words and words[0] != "max"), default=None)
    return limits


def _words(file: Path) -> list[str]:
    """Return the words of a file; none if it cannot be read."""
    try:
        return file.read_text().split()
    except OSError:
        return []


def _size(amount: int | None) -> str:
    if amount is None:
        return "an unknown amount"
    return f"{amount / (1 << 30):,.1f} GiB" if amount >= 1 << 30 else f"{amount / (1 << 20):,.0f} MiB"
