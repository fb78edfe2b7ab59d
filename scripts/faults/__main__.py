"""Injects faults into runs, each in every phase where it can come, and prints what was lost, left and told.

    .venv/bin/python -m scripts.faults                      # all of them, some minutes
    .venv/bin/python -m scripts.faults "SIGKILL" "closing"  # those whose names contain one of these
    .venv/bin/python -m scripts.faults --quick              # the short form that the tests run

Each fault is played in a process of its own. The exit code is 1 if something was lost or left that must not be, or if
the caller got no sensible message.
"""

import argparse
import sys
from collections.abc import Sequence

from rich.console import Console
from rich.table import Table
from rich.text import Text

from scripts.faults.cell import Cell, Result
from scripts.faults.engine import play_all
from scripts.faults.table import cells

TOLD_CHARS = 160


def main(arguments: list[str] | None = None) -> None:
    """Play the faults that the command line names."""
    parser = argparse.ArgumentParser(prog="scripts.faults", description="Inject faults; say what was lost, left, told.")
    parser.add_argument("names", nargs="*", help="parts of names of faults and phases; none is all")
    parser.add_argument("--quick", action="store_true", help="the short form")
    parser.add_argument("--list", action="store_true", help="print the names, and play nothing")
    options = parser.parse_args(arguments)
    chosen = [cell for cell in cells() if _is_chosen(cell, options.names, options.quick)]
    if not chosen:
        parser.error(f"no fault is called {', '.join(options.names)}: --list prints the names")
    if options.list:
        print("\n".join(cell.name for cell in chosen))
        return
    results = []
    for result in play_all(cell for cell in chosen if not cell.needs):
        verdict = "; ".join(result.problems) or "as it must be"
        print(f"{result.seconds:5.1f} s  {result.cell.name}: {verdict}", file=sys.stderr)
        results.append(result)
    for cell in chosen:
        if cell.needs:
            print(f"not played: {cell.name}: {cell.needs}", file=sys.stderr)
    Console(width=None if sys.stdout.isatty() else 200).print(_table(results))
    bad = [result for result in results if result.problems]
    faults = len({result.cell.fault for result in results})
    print(f"{faults} faults in {len(results)} cells: {len(bad)} not as they must be")
    sys.exit(1 if bad else 0)


def _is_chosen(cell: Cell, names: Sequence[str], quick: bool) -> bool:
    return (cell.is_quick or not quick) and (not names or any(name in cell.name for name in names))


def _table(results: Sequence[Result]) -> Table:
    table = Table("fault", "phase", "lost", "left", "told", "as it must be", show_lines=True)
    for result in results:
        report = result.report
        told = report.told if len(report.told) <= TOLD_CHARS else f"{report.told[:TOLD_CHARS]}..."
        verdict = "NO: " + "; ".join(result.problems) if result.problems else "yes"
        row = (result.cell.fault, result.cell.phase, ", ".join(report.lost), ", ".join(report.left), told, verdict)
        table.add_row(*map(Text, row))
    return table


if __name__ == "__main__":
    main()
