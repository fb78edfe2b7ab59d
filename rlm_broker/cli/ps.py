"""`rlm-broker runs`: the runs and REPLs of this user's processes, as a table or as JSON."""

import asyncio
import json
import shutil
import sys
import time
from collections.abc import Sequence

import click
import msgspec

from rlm_broker.cli.terminal import say
from rlm_broker.values.text import printable
from rlm_broker.watch.client import MachineRuns
from rlm_broker.watch.messages import ProcessStatus, ReplStatus, RunStatus

NONE_RUNS = "no process of rlm-broker runs"
HEADINGS = ("PROCESS", "RUN", "QUESTION", "TURN", "DOING", "FOR", "REPLS", "MEMORY", "TOKENS", "DOLLARS")
QUESTION = HEADINGS.index("QUESTION")
TO_THE_RIGHT = frozenset(HEADINGS.index(name) for name in ("TURN", "FOR", "REPLS", "MEMORY", "TOKENS", "DOLLARS"))
FEWEST_CHARS = 12
"""Least columns of the question, however narrow the terminal is."""
MOST_CHARS = 60
"""Most columns of the question, and of what a run does."""
WIDTH = 160
"""Columns of a table printed to no terminal."""
REDRAWN_S = 1.0

Row = tuple[str, ...]


def run(*, as_json: bool, watch: bool) -> None:
    """Print the table or the JSON object; with `watch` again each second, until Ctrl+C."""
    if as_json and watch:
        raise click.UsageError("--watch shows a table: leave out --json.")
    if watch:
        _watch()
        return
    found = asyncio.run(MachineRuns().processes())
    if as_json:
        say(json.dumps({"processes": msgspec.to_builtins(found)}, ensure_ascii=False))
    else:
        say("\n".join(table(found)))


def table(found: Sequence[ProcessStatus], width: int | None = None) -> list[str]:
    """Return the lines of the table. Each character that could steer a terminal is an escape.

    Args:
        found: Processes.
        width: Columns; None takes the terminal's.
    """
    if not found:
        return [NONE_RUNS]
    now = time.time()
    rows = [HEADINGS, *(row for process in found for row in _rows(process, now))]
    widths = [max(len(row[place]) for row in rows) for place in range(len(HEADINGS))]
    if width is None:
        width = shutil.get_terminal_size().columns if sys.stdout.isatty() else WIDTH
    too_wide = sum(widths) + 2 * (len(widths) - 1) - width
    widths[QUESTION] = max(FEWEST_CHARS, widths[QUESTION] - max(0, too_wide))
    return ["  ".join(map(_cell, range(len(row)), row, widths)).rstrip() for row in rows]


def _cell(place: int, text: str, width: int) -> str:
    return text.rjust(width) if place in TO_THE_RIGHT else cut(text, width).ljust(width)


def _rows(process: ProcessStatus, now: float) -> list[Row]:
    name = printable(f"{process.command} {process.pid}")
    if process.is_hung:
        return [(name, "", "", "", "does not answer: hung or suspended", *[""] * 5)]
    of_runs = [_of_run(process, run, now) for run in process.runs]
    alone = [_of_repl(repl, now) for repl in process.repls if repl.run is None]
    rows = [*of_runs, *alone] or [("", "", "", "has no run", "", "0", "", "", "")]
    return [(name, *map(printable, row)) for row in rows]


def _of_run(process: ProcessStatus, run: RunStatus, now: float) -> Row:
    repls = [repl for repl in process.repls if repl.run == run.id]
    since = run.ended or run.doing_since
    return (
        run.id,
        cut(" ".join((run.question or "").split()), MOST_CHARS),
        str(run.turn),
        cut(run.doing or run.state, MOST_CHARS),
        seconds(now - since),
        str(len(repls)),
        _megabytes(sum(repl.memory_bytes for repl in repls)),
        f"{run.tokens:,}",
        "?" if run.cost_usd is None else f"{run.cost_usd:.4f}",
    )


def _of_repl(repl: ReplStatus, now: float) -> Row:
    return (repl.id, "", "", repl.state, seconds(now - repl.since), "1", _megabytes(repl.memory_bytes), "", "")


def cut(text: str, chars: int) -> str:
    """Return a text of at most this many characters. The end of a longer one is left out."""
    return text if len(text) <= chars else f"{text[: chars - 1]}…"


def seconds(number: float) -> str:
    """Return a time in a few characters, for example 4 s, 3 min or 2.5 h."""
    if number < 120:
        return f"{max(0, round(number))} s"
    return f"{number / 60:.0f} min" if number < 7200 else f"{number / 3600:.1f} h"


def _megabytes(number: int) -> str:
    return f"{number / 1e6:.0f} MB" if number else ""


def _watch() -> None:
    """Draw the table again each second, in place on a terminal, below each other elsewhere."""
    if not sys.stdout.isatty():
        while True:
            say("\n".join(table(asyncio.run(MachineRuns().processes()))))
            sys.stdout.flush()
            time.sleep(REDRAWN_S)
    from rich.live import Live
    from rich.text import Text

    with Live(Text(), auto_refresh=False, vertical_overflow="ellipsis") as live:
        while True:
            lines = table(asyncio.run(MachineRuns().processes()))
            live.update(Text("\n".join(lines), no_wrap=True, overflow="ellipsis"), refresh=True)
            time.sleep(REDRAWN_S)
