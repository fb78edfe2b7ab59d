"""`rlm-broker doctor`: starts a real worker at each level, lets it try what is forbidden, and reports."""

import dataclasses
import json
import sys
from typing import TYPE_CHECKING, Any

import click

from rlm_broker.cli.failing import failures

if TYPE_CHECKING:
    from sandbox_worker.wire.level import Level, LevelName

TEXTS = {
    True: "shared by all REPLs",
    False: "copied by each REPL: this Python has another layout of strings",
    None: "shared or copied: no process can be forked here to find that out",
}
"""Descriptions of `maps_texts`."""


@click.command("doctor", epilog="exit codes: 0 isolation 'auto' works here, 4 it does not")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
def command(as_json: bool) -> None:
    """Show what isolation this machine offers, tried out in a real worker of each level."""
    from rlm_broker.cli import machine  # imports psutil, which --help need not wait for
    from sandbox_worker.wire.level import LEVELS

    with failures("doctor", as_json=as_json):
        facts = machine.offered()
        mapped = _maps_texts()
        levels = {level.name: _tried_out(level) for level in LEVELS if level.is_security_boundary}
        groups = _memory_groups_version()
    auto = _auto(levels)
    report = {
        "auto": auto,
        "levels": levels,
        "exact_memory": groups is not None,
        "control_groups": groups,
        "repls_that_fit": machine.repls_that_fit(facts),
        "maps_texts": mapped,
        "machine": facts,
    }
    if as_json:
        click.echo(json.dumps(report, ensure_ascii=False))
    else:
        _print(report)
        click.echo(machine.described(facts))
        click.echo(f"isolation 'auto' is '{auto}' here" if auto else "isolation 'auto' cannot be had here")
    sys.exit(0 if auto else 4)


def _tried_out(level: "Level") -> dict[str, Any]:
    """Return what a worker of a level found.

    Keys: `layers` has the names of the layers that hold. `refused` maps each attempt of the canary to whether it was
    refused. `problem` is None or a sentence. With a problem there is its `kind`, as in JSON errors; if a layer failed,
    there are also `failed_layer`, `reason` and `remedy`.
    """
    from rlm_broker.errors import IsolationUnavailable, RlmBrokerError  # these import what --help need not wait for
    from rlm_broker.sandbox.sandbox import Sandbox
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
    from rlm_broker.sandbox.workers.python_paths import maps_texts

    try:
        return maps_texts()
    except OSError:  # no further process is allowed; or SIGCHLD is ignored, so that the kernel keeps no exit status
        return None


def _auto(levels: "dict[LevelName, dict[str, Any]]") -> "LevelName | None":
    """Return the level that `auto` takes: a weaker one only if the stronger one is not available on this machine."""
    from rlm_broker.errors import IsolationUnavailable

    for level, found in levels.items():
        if found["problem"] is None:
            return level
        if found["kind"] != IsolationUnavailable.kind:
            return None
    return None


def _memory_groups_version() -> int | None:
    """Return the version of control groups that give REPLs exact limits of memory; None if there are none."""
    from rlm_broker.sandbox.workers.cgroups import MemoryGroups

    try:
        groups = MemoryGroups.find()
    except OSError:  # /proc is not mounted
        return None
    if groups is not None:
        groups.close()
    return None if groups is None else groups.version


def _print(report: dict[str, Any]) -> None:
    from rlm_broker.sandbox.workers.cgroups import GROUP_REMEDY

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
