"""`rlm-broker trace`: a trace as a tree, as JSON, as a page in the browser, and as spans of OpenTelemetry."""

import json
import webbrowser
from pathlib import Path

import click

from rlm_broker.cli.terminal import has_display, say
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


def view(file: Path, *, out: Path | None, no_open: bool) -> None:
    """Write the trace as one page, open it in the browser, and print its link."""
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
    for part in Trace(file).otlp(out):
        say(part)
