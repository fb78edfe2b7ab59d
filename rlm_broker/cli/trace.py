"""`rlm-broker trace show FILE`: the runs of a trace, as a tree, in full, or as JSON."""

import json
import sys
from pathlib import Path

import click

from rlm_broker.cli.failing import failures
from rlm_broker.cli.parameters import Group
from rlm_broker.cli.terminal import say


class _Traces(Group):
    """The commands for traces. If a file stands in the place of a command, the error names `trace show`."""

    def suggested(self, ctx: click.Context, name: str) -> str:
        return f"; did you mean trace show {name}?" if Path(name).exists() else super().suggested(ctx, name)


@click.group("trace", cls=_Traces)
def command() -> None:
    """Look at a trace that `ask --trace FILE` wrote."""


@command.command("show", epilog="exit codes: 0 shown, 2 the file is no trace")
@click.argument("file", type=click.Path(path_type=Path))
@click.option("--full", is_flag=True, help="Show each reply, code, output, and call with its prompt and reply.")
@click.option("--json", "as_json", is_flag=True, help="Print the runs as one JSON list; a trace itself is JSON lines.")
def show(file: Path, full: bool, as_json: bool) -> None:
    """Print the tree of runs: question, turns, blocks, calls, tokens and cost of each."""
    if full and as_json:
        raise click.UsageError("give either --full or --json: the lines of the trace are JSON, and have everything")
    with failures("trace", as_json=as_json):
        from rlm_broker.trace import tree  # imports msgspec, which --help need not wait for

        if as_json:
            say(json.dumps(tree.runs(file)))
        elif full:
            from rlm_broker.trace.verbose import VerbosePrinter

            show_event = VerbosePrinter(sys.stdout, is_whole=True)
            for event in tree.events(file):
                show_event(event)
        else:
            for line in tree.tree(file):
                say(line)
