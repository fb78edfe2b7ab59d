"""`rlm-broker doctor`: at each level start a real worker, let it try what is forbidden, and report."""

import dataclasses
import json
import resource
import sys
from typing import Any

import click

from rlm_broker.cli.failing import failures

DESCRIPTORS_EACH = 4
"""Of the orchestrator, for one REPL: its connection, its control socket, and pidfds."""


@click.command("doctor", epilog="exit codes: 0 isolation 'auto' works here, 4 it does not")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
def command(as_json: bool) -> None:
    """Show what isolation this machine offers, tried out in a real worker of each level."""
    with failures("doctor", as_json=as_json):
        levels = {level: _tried_out(level) for level in ("strict", "standard")}
        exact_memory = _has_memory_groups()
    auto = next((level for level, found in levels.items() if found["problem"] is None), None)
    fit = resource.getrlimit(resource.RLIMIT_NOFILE)[1] // DESCRIPTORS_EACH
    report = {"auto": auto, "levels": levels, "exact_memory": exact_memory, "repls_that_fit": fit}
    if as_json:
        click.echo(json.dumps(report, ensure_ascii=False))
    else:
        _print(report)
    sys.exit(0 if auto else 4)


def _tried_out(level: str) -> dict[str, Any]:
    """What was found of a level.

    `layers` that were raised; `refused`, each attempt of the canary and whether it was; `problem`, or None, with the
    `failed_layer`, its `reason` and its `remedy` if it was one.
    """
    from rlm_broker.errors import IsolationUnavailable, RlmBrokerError  # what --help need not pay for
    from rlm_broker.sandbox import canary
    from rlm_broker.sandbox.sandbox import Sandbox

    try:
        with Sandbox(isolation=level) as sandbox, sandbox.repl() as repl:
            refused = canary.verdict(level, repl.execute(canary.PROGRAM).final_answer)
            return {**dataclasses.asdict(repl.isolation), "refused": refused, "problem": None}
    except RlmBrokerError as error:
        found: dict[str, Any] = {"level": level, "layers": (), "refused": {}, "problem": str(error)}
        if isinstance(error, IsolationUnavailable) and error.layer:
            found |= {"failed_layer": error.layer, "reason": error.reason, "remedy": error.remedy}
        return found


def _has_memory_groups() -> bool:
    from rlm_broker.sandbox.cgroups import MemoryGroups

    groups = MemoryGroups.find()
    if groups is not None:
        groups.close()
    return groups is not None


def _print(report: dict[str, Any]) -> None:
    from rlm_broker.sandbox.cgroups import GROUP_REMEDY

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
    exact = "a control group can be made" if report["exact_memory"] else f"no control group for memory: {GROUP_REMEDY}"
    click.echo(f"exact_memory: {exact}")
    click.echo(f"open files allow for about {report['repls_that_fit']:,} REPLs at a time (ulimit -n)")
    auto = report["auto"]
    click.echo(f"isolation 'auto' is '{auto}' here" if auto else "isolation 'auto' cannot be had here")
