"""Measures speed next to peers and floors in the same run: one table, and with --json a file and a picture.

    .venv/bin/python -m scripts.bench                       # everything, some minutes
    .venv/bin/python -m scripts.bench spawn memory --json bench.json
    .venv/bin/python -m scripts.bench --quick               # whether it runs; the figures say little
    .venv/bin/python -m scripts.bench costs --against HEAD~3   # page faults, system calls, frames: counts, no times

A row that fails makes it exit with 1. Rows that became slower than `baseline.json` are named below the table.
Everything runs the public API with its defaults. Peers are installed when they are first asked for, into a folder of
the bench's own below the user's cache. Figures of a shared machine wander: compare the ratios, and run it twice.
"""

import argparse
import json
import os
import platform
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

import psutil
from rich.console import Console
from rich.table import Table

from rlm_broker import __version__
from scripts.bench import (
    baseline,
    batches,
    blocks,
    chatting,
    contexts,
    costs,
    handling,
    listing,
    mcp_serving,
    nodes,
    peer,
    picture,
    prepared,
    providers,
    runs,
    serving,
    spawning,
    telemetry,
    uploads,
    viewing,
)
from scripts.bench.measure import Effort
from scripts.bench.row import OURS, Curve, Row, Side, number

MEASUREMENTS: dict[str, Callable[[Effort], Sequence[Row | Curve]]] = {
    "sessions": handling.sessions,
    "one_shot": handling.one_shot,
    "crowd": handling.crowd,
    "spawn": spawning.spawn,
    "warm": prepared.warm,
    "preloaded": prepared.preloaded,
    "burst": spawning.burst,
    "alive": spawning.alive,
    "memory": spawning.memory,
    "round_trip": blocks.round_trip,
    "queries": blocks.queries,
    "slow_provider": blocks.slow_provider,
    "program": blocks.program,
    "kill": blocks.kill,
    "fork": blocks.fork,
    "rollback": blocks.rollback,
    "context": contexts.ascii_file,
    "folder": contexts.folder,
    "other_contexts": contexts.other_contexts,
    "loaded_context": prepared.loaded_context,
    "runs": runs.many_runs,
    "direct": providers.direct,
    "litellm": providers.through_litellm,
    "answer": runs.answer,
    "starting": runs.starting,
    "execute": serving.execute,
    "container": serving.container,
    "uploads": uploads.uploads,
    "chat": chatting.chat,
    "chat_waits": chatting.waits,
    "followers": chatting.followers,
    "ps": listing.ps,
    "telemetry": telemetry.overhead,
    "mcp_starting": mcp_serving.starting,
    "mcp_block": mcp_serving.block,
    "viewing": viewing.viewing,
    "batch": batches.items,
    "batch_resume": batches.resumed,
    "node_runs": nodes.node_runs,
    "node_blocks": nodes.node_blocks,
    "node_spawns": nodes.node_spawns,
    "node_contexts": nodes.node_contexts,
    "throughput_curve": handling.crowds,
    "context_curve": contexts.sizes,
}
"""Name on the command line → what it measures. One that is added here is in the table, the file and the picture."""
LONG: dict[str, Callable[[Effort], Sequence[Row | Curve]]] = {"batch_many": batches.many_items}
"""Measurements of a quarter of an hour and more, which are made if they are named."""

MET = {True: "yes", False: "NO", None: "-"}


def main(arguments: list[str] | None = None) -> None:
    """Measure what the command line names."""
    given = sys.argv[1:] if arguments is None else arguments
    if given[:1] == ["costs"]:
        costs.main(given[1:])
        return
    parser = argparse.ArgumentParser(prog="scripts.bench", description="Measure, print one table, and write it down.")
    named = f"what to measure, by default all: {', '.join(MEASUREMENTS)}; only if named: {', '.join(LONG)}"
    parser.add_argument("names", nargs="*", metavar="NAME", choices=[[], *MEASUREMENTS, *LONG], help=named)
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures here, and curves to FILE.svg")
    parser.add_argument("--quick", action="store_true", help="few repetitions of small things: does it run?")
    parser.add_argument("--write-baseline", action="store_true", help="later runs are compared with this one")
    options = parser.parse_args(given)
    if options.quick and options.write_baseline:
        parser.error("--quick measures too little for a baseline")
    effort, measured, failed = Effort(options.quick), dict[str, Sequence[Row | Curve]](), list[str]()
    for name in options.names or MEASUREMENTS:
        started = time.perf_counter()
        try:
            measured[name] = (MEASUREMENTS | LONG)[name](effort)
        except Exception as error:  # noqa: BLE001 - the others are worth minutes, and the row says what happened
            traceback.print_exc()
            failed.append(name)
            measured[name] = [Row(name, Side(OURS, "", []), note=f"failed: {type(error).__name__}: {error}")]
        print(f"{name}: {time.perf_counter() - started:.0f} s", file=sys.stderr)
    results = [result for results in measured.values() for result in results]
    curves = [result for result in results if isinstance(result, Curve)]
    console = Console(width=None if sys.stdout.isatty() else 200)
    console.print(_table([result for result in results if isinstance(result, Row)]), *map(_curve_table, curves))
    if options.json:
        document = {**machine(), "quick": options.quick, **_by_name(measured)}
        options.json.write_text(json.dumps(document, indent=1, ensure_ascii=False) + "\n")
    if options.json and curves:
        options.json.with_suffix(".svg").write_text(picture.svg(curves))
    if options.write_baseline:
        baseline.write(measured, machine())
    elif not options.quick:
        print("slower than the baseline, of the rows in it:", *(baseline.slower(measured) or ["none"]), sep="\n  ")
    if failed:
        sys.exit(f"failed: {', '.join(failed)}")


def machine() -> dict[str, Any]:
    """Return facts about the machine that the figures depend on."""
    models = [line for line in Path("/proc/cpuinfo").read_text().splitlines() if line.startswith("model name")]
    return {
        "machine": f"{models[0].partition(':')[2].strip() if models else platform.machine()}, {os.cpu_count()} cores",
        "load_average": os.getloadavg()[0],
        "memory_gb": round(psutil.virtual_memory().total / 1e9),
        "kernel": platform.release(),
        "python": platform.python_version(),
        "versions": {
            "rlm-broker": __version__,
            **{name: version(name) for name in ("litellm", "msgspec", "pydantic")},
            **peer.versions(),
        },
    }


def _by_name(measured: dict[str, Sequence[Row | Curve]]) -> dict[str, Any]:
    named = [(name, result) for name, results in measured.items() for result in results]
    return {
        "rows": [{"name": name, **result.as_json()} for name, result in named if isinstance(result, Row)],
        "curves": [{"name": name, **result.as_json()} for name, result in named if isinstance(result, Curve)],
    }


def _table(rows: Sequence[Row]) -> Table:
    table = Table("what", "target", "met", "measured", "beside it, same run (ours / theirs)", "note", show_lines=True)
    for row in rows:
        beside = "\n".join(_beside(row.ours, other) for other in row.others)
        table.add_row(row.what, row.target, MET[row.met], number(row.ours.median, row.ours.unit), beside, row.note)
    return table


def _beside(ours: Side, other: Side) -> str:
    ratio = ours.times(other)
    if ratio is None:
        return f"{other.name}: {other.problem or 'nothing measured'}"
    return f"{other.name}: {number(other.median, other.unit)} ({ratio:.2g} x)"


def _curve_table(curve: Curve) -> Table:
    along = sorted({x for line in curve.lines.values() for x, _ in line})
    table = Table(f"{curve.what}, {curve.unit}", *(f"{x:,g}" for x in along), title=f"by {curve.along}")
    for name, line in curve.lines.items():
        found = dict(line)
        table.add_row(name, *(number(found.get(x), "").strip() for x in along))
    return table


if __name__ == "__main__":
    main()
