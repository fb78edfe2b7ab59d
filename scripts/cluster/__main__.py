"""Builds three nodes on one machine, plays the faults that a cluster has to bear, and prints what they cost.

    python -m scripts.cluster                              # all faults, some minutes
    python -m scripts.cluster "node killed" "link cut"     # those whose names contain one of these
    python -m scripts.cluster --quick                      # two nodes, few runs, no bounds of time: as the tests run it
    python -m scripts.cluster --simulate 1000              # agents that only speak the protocol, against one broker

The nodes are network namespaces. They live in namespaces of the script's own, so that whatever ends the script removes
them with all processes. That needs root, or user namespaces. The exit code is 1 if an item was lost, a call was paid
twice, a loss was noticed too late, or a process was left; 2 if no nodes can be made here.
"""

import argparse
import math
import os
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console
from rich.table import Table
from rich.text import Text

from scripts.cluster import network, stage
from scripts.cluster.director import Counts, NotAsPlanned, Play
from scripts.cluster.faults import FAULTS, Outcome, judge

NODES, RUNS, DELAY_S = 3, 150, 0.2
QUICK_NODES, QUICK_RUNS, QUICK_DELAY_S = 2, 12, 0.1


@dataclass
class Row:
    """One row of the table."""

    fault: str
    outcome: Outcome
    runs: int
    done: int
    calls: int
    counts: Counts | None
    lost_runs: int
    replayed: int
    seconds: float


def main(arguments: Sequence[str] | None = None) -> int:
    """Play the faults that the command line names, and return the exit code."""
    options = _options(sys.argv[1:] if arguments is None else arguments)
    if options.list:
        print("\n".join(FAULTS))
        return 0
    if options.simulate:
        from scripts.cluster.simulation import simulate

        print(simulate(options.simulate).told())
        return 0
    if not stage.is_inside():
        if missing := stage.what_is_missing():
            print(f"no nodes can be made here: {missing}", file=sys.stderr)
            return 2
        return stage.enter("scripts.cluster", sys.argv[1:] if arguments is None else arguments)
    stage.prepare()
    nodes = network.build(QUICK_NODES if options.quick else NODES)
    runs = options.runs or (QUICK_RUNS if options.quick else RUNS)
    chosen = [name for name in FAULTS if not options.names or any(part in name for part in options.names)]
    rows = []
    for name in chosen:
        outcome = Outcome(within_s=math.inf) if options.quick else Outcome()
        row = _played(name, outcome, nodes, runs, QUICK_DELAY_S if options.quick else DELAY_S)
        verdict = "; ".join(row.outcome.problems) or "as it must be"
        print(f"{row.seconds:5.1f} s  {name}: {verdict}", file=sys.stderr)
        rows.append(row)
    Console(width=None if sys.stdout.isatty() else 160).print(_table(rows))
    bad = sum(bool(row.outcome.problems) for row in rows)
    print(f"{len(rows)} faults, {os.cpu_count()} cores, load {os.getloadavg()[0]:.1f}: {bad} not as they must be")
    return 1 if bad else 0


def _options(arguments: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="scripts.cluster", description="Play the faults of a cluster.")
    parser.add_argument("names", nargs="*", metavar="NAME", help="parts of names of faults; none is all")
    parser.add_argument("--quick", action="store_true", help="two nodes and few runs")
    parser.add_argument("--runs", type=int, metavar="N", help="runs of each batch")
    parser.add_argument("--simulate", type=int, metavar="AGENTS", help="light agents against one broker")
    parser.add_argument("--list", action="store_true", help="print the names of the faults, and play none")
    options = parser.parse_args(arguments)
    if unknown := [part for part in options.names if not any(part in name for name in FAULTS)]:
        parser.error(f"no fault is called {', '.join(unknown)}: --list prints the names")
    return options


def _played(name: str, outcome: Outcome, nodes: list[network.Node], runs: int, delay_s: float) -> Row:
    started = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="rlm-broker-cluster-") as folder:
        play = Play(nodes, Path(folder), runs, delay_s)
        counts = None
        with play.playing():
            try:
                FAULTS[name](play, outcome)
                judge(play, outcome)
            except NotAsPlanned as error:
                outcome.problems.append(str(error))
            counts = play.counts()
    lost, replayed = (play.over.lost_runs, play.over.replayed_calls) if play.over else (0, 0)
    taken = time.monotonic() - started
    return Row(name, outcome, runs, len(play.done), play.wanted_calls, counts, lost, replayed, taken)


def _table(rows: Sequence[Row]) -> Table:
    columns = (
        "fault",
        "runs wanted, done",
        "attempts lost",
        "calls wanted, paid",
        "replayed",
        "noticed",
        "ended there",
        "left",
        "",
    )
    table = Table(*columns, show_lines=True)
    for row in rows:
        outcome, counts = row.outcome, row.counts
        cells = (
            row.fault,
            f"{row.runs}, {row.done}",
            str(row.lost_runs),
            "-" if counts is None else f"{row.calls}, {counts.paid}",
            str(row.replayed),
            _seconds(outcome.noticed_s),
            _seconds(outcome.ended_s),
            " ".join(map(str, outcome.left.values())),
            "NO: " + "; ".join(outcome.problems) if outcome.problems else "as it must be",
        )
        table.add_row(*map(Text, cells))
    return table


def _seconds(value: float | None) -> str:
    return "-" if value is None else f"{value:.1f} s"


if __name__ == "__main__":
    sys.exit(main())
