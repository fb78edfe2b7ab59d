"""`rlm-broker trace`: a trace as a tree, as JSON, as a page in the browser, and as spans of OpenTelemetry."""

import json
import os
import sys
from pathlib import Path

import click

from rlm_broker.cli.failing import failures
from rlm_broker.cli.parameters import Group, exists
from rlm_broker.cli.terminal import say

TRACE = click.Path(path_type=Path)


class _Traces(Group):
    """The commands for traces. If a file stands in the place of a command, the error names `trace show`."""

    def suggested(self, ctx: click.Context, name: str) -> str:
        return f"; did you mean trace show {name}?" if exists(name) else super().suggested(ctx, name)


@click.group("trace", cls=_Traces)
def command() -> None:
    """Look at a trace that `ask --trace FILE` wrote."""


@command.command("show", epilog="exit codes: 0 shown, 2 the file is no trace")
@click.argument("file", type=TRACE)
@click.option("--full", is_flag=True, help="Show each reply, code, output, and call with its prompt and reply.")
@click.option("--json", "as_json", is_flag=True, help="Print the runs as one JSON list; a trace itself is JSON lines.")
def show(file: Path, full: bool, as_json: bool) -> None:
    """Print the tree of runs: question, turns, blocks, calls, tokens and cost of each."""
    if full and as_json:
        raise click.UsageError("give either --full or --json: the lines of the trace are JSON, and have everything")
    with failures("trace", as_json=as_json):
        from rlm_broker.watch import trace_tree as tree  # imports msgspec, which --help need not wait for

        if as_json:
            say(json.dumps(tree.runs(file)))
        elif full:
            from rlm_broker.events.story import Story
            from rlm_broker.events.trace import events
            from rlm_broker.watch.terminal import StoryPrinter

            show_event = StoryPrinter(Story("all"), sys.stdout, has_no_bound=True)
            for event in events(file):
                show_event(event)
        else:
            for line in tree.tree(file):
                say(line)


@command.command("view", epilog="exit codes: 0 written, 2 the file is no trace, or the page cannot be written")
@click.argument("file", type=TRACE)
@click.option("--out", type=TRACE, metavar="FILE.html", help="The page (default: beside the trace, with .html).")
@click.option("--no-open", is_flag=True, help="Only write the page; do not open the browser.")
def view(file: Path, out: Path | None, no_open: bool) -> None:
    """Write the trace as one page that needs no network, open it in the browser, and print its link."""
    with failures("trace", as_json=False):
        from rlm_broker.watch.viewer.page import write_page

        page = out or file.parent / f"{file.stem}.html"  # `with_suffix` raises for a path without a name
        for note in write_page(file, page).notes:
            say(f"note: {note}", err=True)
        link = page.resolve().as_uri()
        say(link)
        if not no_open and has_display():
            import webbrowser

            webbrowser.open(link)


@command.command("export", epilog="exit codes: 0 written, 2 the file is no trace, or the output cannot be written")
@click.argument("file", type=TRACE)
@click.option("--otlp", is_flag=True, help="Spans as OTLP in JSON, for OpenTelemetry's collectors (the default).")
@click.option("--chrome", "dropped", flag_value="--chrome", hidden=True)
@click.option("--rlm", "dropped", flag_value="--rlm", hidden=True)
@click.option("--out", type=TRACE, metavar="FILE", help="A new file (default: stdout).")
def export(file: Path, otlp: bool, dropped: str | None, out: Path | None) -> None:
    """Write the trace in the format of other programs. The trace itself is JSON lines."""
    del otlp
    if dropped:
        raise click.UsageError(f"{dropped} is no longer written: give --otlp, or read the trace, which is JSON lines")
    with failures("trace", as_json=False):
        from rlm_broker.watch.otlp import export

        for part in export(file, out):
            say(part)


def has_display() -> bool:
    """Whether a browser could show a page here."""
    return bool(os.environ.get("DISPLAY") or os.environ.get("WAYLAND_DISPLAY"))
