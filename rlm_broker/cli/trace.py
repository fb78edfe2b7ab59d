"""`rlm-broker trace show FILE`: the tree of runs that a trace holds."""

from pathlib import Path

import click

from rlm_broker.cli.failing import failures
from rlm_broker.cli.terminal import say


@click.group("trace")
def command() -> None:
    """Look at a trace that `ask --trace FILE` wrote."""


@command.command("show", epilog="exit codes: 0 shown, 2 the file is no trace")
@click.argument("file", type=click.Path(path_type=Path))
def show(file: Path) -> None:
    """Print the tree of runs: question, turns, blocks, calls, tokens and cost of each."""
    with failures("trace", as_json=False):
        from rlm_broker.trace.tree import tree  # what --help need not pay for

        for line in tree(file):
            say(line)
