"""The command line of `rlm-broker batch INPUT --out OUT`. Its work is in `batching`, which `--help` does not import."""

import sys
from pathlib import Path
from typing import Any

import click
from click.core import ParameterSource

from rlm_broker.cli.failing import failures
from rlm_broker.cli.parameters import API_KEY, BASE_URL, FILE, FOLDER, cluster_options, run_options, sandbox_options

EXIT_CODES = """\b
a line of INPUT is one of these, with "metadata": {...} for values of your own:
  {"id": "a1", "question": "Which disk failed?", "context": "a text, an object or a list"}
  {"id": "a2", "question": "Which disk failed?", "path": "logs/a2.log"}

\b
exit codes: 0 each item has a result, and none failed, 1 some items failed, 2 the command line, the input or
the configuration is wrong, or it does not fit OUT, 3 a limit of the batch or `rlm-broker stop` ended it,
4 the isolation cannot be had or the sandbox failed, 5 the model provider failed before the first item,
130, 143, 129 stopped by Ctrl+C, SIGTERM, SIGHUP.
After 3, 4, 5, 130, 143, 129 and a kill the same command goes on with the items that have no result."""
OF_STATUS = ("input", "status", "as_json", "debug")
"""Parameters that may stand beside --status."""
MOST_RUNS = 4_096
"""Runs at the same time, at most."""


@click.command("batch", epilog=EXIT_CODES)
@click.argument("input", required=False, type=click.Path(), metavar="INPUT")
@click.option("--out", type=click.Path(path_type=Path), metavar="FILE", help="File of results, as JSON lines.")
@click.option("--status", type=click.Path(path_type=Path), metavar="FILE", help="Show how far the batch of FILE is.")
@click.option(
    "--max-concurrent",
    type=click.IntRange(1, MOST_RUNS),
    default=16,
    show_default=True,
    metavar="N",
    help="Runs at the same time.",
)
@click.option("--fail-fast", is_flag=True, help="End the batch when an item fails; default: a failure is a result.")
@click.option("--retry-failed", is_flag=True, help="Ask items again that have failed in an earlier batch.")
@click.option(
    "--batch-budget-usd", type=click.FloatRange(min=0, min_open=True), metavar="USD", help="Dollars of the whole batch."
)
@click.option("--batch-tokens", type=click.IntRange(1), metavar="N", help="Tokens of the whole batch.")
@click.option("--batch-timeout", metavar="TIME", help="Time of the whole batch, such as 90s or 1h30m.")
@click.option("--trajectories", is_flag=True, help="Write the conversation of each item, as chat messages.")
@click.option(
    "--score",
    metavar="PLACE:FUNCTION",
    help="Function (item, result) whose value each line has; PLACE is a FILE.py or a module. No sandbox.",
)
@click.option("--root", type=FOLDER, metavar="DIR", help="Folder of the paths in lines (default: that of INPUT).")
@click.option(
    "--encoding", metavar="NAME", help="Encoding of text without a byte order mark, such as cp1252 (default utf-8)."
)
@click.option(
    "--strict-text", is_flag=True, help="Refuse text with bytes that cannot be decoded; default: replace them."
)
@click.option("-m", "--model", metavar="NAME", help="The root model (default offline).")
@click.option("-s", "--sub-model", metavar="NAME", help="The model that code asks; default: the root model.")
@BASE_URL
@API_KEY
@click.option("--max-depth", type=int, metavar="N", help="Levels of runs that have a REPL (default 1).")
@sandbox_options
@click.option(
    "--tools",
    type=FILE,
    metavar="FILE",
    help="Python file whose functions and values code may use. It runs without a sandbox.",
)
@click.option("-o", "--output-type", type=FILE, metavar="FILE", help="A JSON Schema of the answers.")
@run_options
@cluster_options
@click.option(
    "--limit", "assignments", multiple=True, metavar="NAME=VALUE", help="Any limit of each item: max_budget_usd=0.1."
)
@click.option("--system", metavar="TEXT", help="System prompt, in place of the built-in one.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object about the batch at its end.")
@click.option("-q", "--quiet", is_flag=True, help="Print no progress.")
@click.option("--debug", is_flag=True, help="Show tracebacks of rlm-broker itself.")
@click.pass_context
def command(
    context: click.Context,
    /,
    input: str | None,
    *,
    out: Path | None,
    status: Path | None,
    as_json: bool,
    quiet: bool,
    debug: bool,
    **options: Any,
) -> None:
    """Ask the questions of INPUT, one JSON object a line, and write each result to OUT as soon as there is one.

    If INPUT is -, lines are read from stdin. The same command goes on after a kill: finished items are not asked again,
    and calls that were paid are not paid again. Limits of the whole batch hold for all of its processes together.
    """
    with failures("batch", as_json=as_json, debug=debug):
        if status is not None:
            _require_alone(context, input)
            from rlm_broker.cli import batch_status

            batch_status.show(status, as_json=as_json)
            return
        if input is None:
            raise click.UsageError("Missing argument 'INPUT': name a file of JSON lines, or - for stdin.")
        if out is None:
            raise click.UsageError("Missing option '--out': name the file of results.")
        from rlm_broker.cli import batching  # pydantic and aiohttp: half a second, and more on a busy machine

        exit_code = batching.run(input, out, is_quiet=quiet, as_json=as_json, **options)
    sys.exit(exit_code)


def _require_alone(context: click.Context, input: str | None) -> None:
    """Refuse options of a batch beside --status, which would have no effect.

    Raises:
        click.UsageError: There is an argument or another option.
    """
    if input is not None:
        raise click.UsageError("give either INPUT or --status FILE: --status asks nothing.")
    for parameter in context.command.params:
        if parameter.name in OF_STATUS or parameter.name is None:
            continue
        if context.get_parameter_source(parameter.name) is ParameterSource.COMMANDLINE:
            raise click.UsageError(f"{parameter.opts[-1]} has no effect beside --status: leave it out.")
