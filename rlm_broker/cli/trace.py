"""`rlm-broker runs show|view|export`: a trace as a tree, as JSON, as a page, and as spans of OpenTelemetry."""

import importlib
import json
import webbrowser
from pathlib import Path

import click

from rlm_broker.cli.terminal import has_display, say
from rlm_broker.values.extras import require_extra
from rlm_broker.watch.trace_tree import Trace


def show(file: Path, *, full: bool, as_json: bool) -> None:
    """Print the tree of runs, or all that they said and did."""
    if full and as_json:
        raise click.UsageError("give either --full or --json: the lines of the trace are JSON, and have everything")
    trace = Trace(file)
    if full:
        trace.show()
    else:
        for line in [json.dumps(trace.runs())] if as_json else trace.tree():
            say(line)


def view(file: Path | None, *, out: Path | None, no_open: bool, port: int, host: str) -> None:
    """Write a trace as one page, open it in the browser, and print its link; without one serve the runs of here."""
    if file is None:
        if out is not None:
            raise click.UsageError("--out is for the page of a trace: name the trace, too.")
        with require_extra("serve", "`rlm-broker runs view`"):
            live = importlib.import_module("rlm_broker.cli.view")
        live.run(port=port, host=host, no_open=no_open)
        return
    page = out or file.parent / f"{file.stem}.html"  # `with_suffix` raises for a path without a name
    for note in Trace(file).write_page(page):
        say(f"note: {note}", err=True)
    link = page.resolve().as_uri()
    say(link)
    if not no_open and has_display():
        webbrowser.open(link)


def export(file: Path, *, formats: tuple[str, ...], out: Path | None) -> None:
    """Write the trace in the format of other programs. The trace itself is JSON lines."""
    for each in formats:
        if each != "--otlp":
            raise click.UsageError(f"{each} is no longer written: give --otlp, or read the trace, which is JSON lines")
    if out is not None:
        Trace(file).write_otlp(out)
        return
    for line in Trace(file).otlp():
        say(line)
