"""`rlm-broker doctor`: at each level start a real worker, let it try what is forbidden, and report."""

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
    False: "copied by each REPL: this Python keeps strings otherwise",
    None: "shared or copied, which cannot be tried out here",
}
"""What to say of `maps_texts`."""


@click.command("doctor", epilog="exit codes: 0 isolation 'auto' works here, 4 it does not")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
def command(as_json: bool) -> None:
    """Show what isolation this machine offers, tried out in a real worker of each level."""
    from rlm_broker.cli import machine  # what --help need not pay for
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
    """What was found of a level.

    `layers` that were raised; `refused`, each attempt of the canary and whether it was; `problem`, or None, with its
    `kind` as in JSON errors, and the `failed_layer`, its `reason` and its `remedy` if it was one.
    """
    from rlm_broker.errors import IsolationUnavailable, RlmBrokerError  # what --help need not pay for
    from rlm_broker.sandbox.levels import canary
    from rlm_broker.sandbox.sandbox import Sandbox

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
    """Whether REPLs share the texts of a context; None where no process can be forked to try it out."""
    from rlm_broker.sandbox.workers.python_paths import maps_texts

    try:
        return maps_texts()
    except OSError:  # no further process; or SIGCHLD is ignored, and nothing is told of its end
        return None


def _auto(levels: "dict[LevelName, dict[str, Any]]") -> "LevelName | None":
    """The level that `auto` takes. It goes on to a weaker one only if the stronger one is not available here."""
    from rlm_broker.errors import IsolationUnavailable

    for level, found in levels.items():
        if found["problem"] is None:
            return level
        if found["kind"] != IsolationUnavailable.kind:
            return None
    return None


def _memory_groups_version() -> int | None:
    """Version of the control groups in which REPLs can have exact limits of memory; None if there are none."""
    from rlm_broker.sandbox.workers.cgroups import MemoryGroups

    try:
        groups = MemoryGroups.find()
    except OSError:  # no /proc
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
