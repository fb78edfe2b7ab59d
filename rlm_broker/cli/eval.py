"""The command line of `rlm-broker eval`. Its work is in `evaluating`, which `--help` does not import."""

import sys
from pathlib import Path
from typing import Any

import click

from rlm_broker.cli import signals
from rlm_broker.cli.failing import fail, failures
from rlm_broker.cli.parameters import API_KEY, BASE_URL, FILE, FOLDER, run_options, sandbox_options
from rlm_broker.cli.terminal import say
from rlm_broker.errors import RunCancelled

EXIT_CODES = """\b
tasks: needle, needles, absent (facts in much text), count, classify (sums over lines), pairs (a join of two lists)
arms:  plain (the context is in the prompt), rlm1, rlm2 (runs with a REPL, and their children with one); an arm may
       have settings of its own, such as rlm1:max_iterations=10 or rlm1:recursion=auto

\b
exit codes: 0 all items have ended, 1 all items of an arm failed, 2 the command line or configuration is wrong,
3 a limit ended it (the same command goes on), 4 the isolation cannot be had, 130, 143, 129 stopped by Ctrl+C, SIGTERM,
SIGHUP (the same command with --out goes on)"""


@click.command("eval", epilog=EXIT_CODES)
@click.option("-m", "--model", metavar="NAME", help="The root model (default offline).")
@click.option("-s", "--sub-model", metavar="NAME", help="The model that code asks; default: the root model.")
@BASE_URL
@API_KEY
@click.option("--tasks", metavar="LIST", help="Generated tasks, with commas between (default all).")
@click.option("--lengths", metavar="LIST", help="Lengths of the contexts, such as 8k,1m (default 8k,64k).")
@click.option(
    "--length-unit", type=click.Choice(("tokens", "chars")), help="Unit of the lengths (default tokens, estimated)."
)
@click.option(
    "--samples",
    type=click.IntRange(1, 10_000),
    metavar="N",
    help="Questions of each task at each length (default 5).",
)
@click.option("--seed", type=int, metavar="N", help="Seed of the generated questions (default 0).")
@click.option(
    "--data", type=FILE, metavar="FILE", help="Your own questions with answers, as JSON lines, in place of the tasks."
)
@click.option(
    "--arms", default="plain,rlm1,rlm2", metavar="LIST", help="Ways to ask each question (default plain,rlm1,rlm2)."
)
@click.option("--max-concurrent", type=click.IntRange(1), default=16, metavar="N", help="Runs at a time (default 16).")
@click.option("--batch-budget-usd", type=float, metavar="USD", help="Maximum cost of the whole evaluation.")
@click.option("--batch-tokens", type=int, metavar="N", help="Maximum tokens of the whole evaluation.")
@click.option("--retry-failed", is_flag=True, help="Ask again what failed in an earlier process.")
@sandbox_options
@run_options
@click.option("--limit", "assignments", multiple=True, metavar="NAME=VALUE", help="A limit of runs: run_timeout_s=10m.")
@click.option("--out", type=FOLDER, metavar="FOLDER", help="Keep the results, so that a killed evaluation goes on.")
@click.option("--picture", type=click.Path(path_type=Path), metavar="FILE", help="Write the scores as an SVG file.")
@click.option("--dry-run", is_flag=True, help="Say how many runs there would be, and end.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
@click.option("-q", "--quiet", is_flag=True, help="Print no progress and no advice.")
@click.option("--debug", is_flag=True, help="Show tracebacks of rlm-broker itself.")
def command(*, as_json: bool, debug: bool, dry_run: bool, **options: Any) -> None:
    """Measure whether an RLM is worth it for a model: questions with known answers, asked in several ways.

    Each question is asked in each arm. A table has the score of each with an interval, cost, tokens and seconds.
    """
    with failures("eval", as_json=as_json, debug=debug):
        from rlm_broker.cli import evaluating  # pydantic and aiohttp: half a second

        planned = evaluating.plan(**options)
        if dry_run:
            say(planned.in_json() if as_json else planned.estimate())
            return
        try:
            done = planned.run()
        except RunCancelled:
            again = "the same command goes on" if options["out"] else "its results are lost, since there is no --out"
            fail("eval", "cancelled", f"stopped: {again}", signals.exit_code(), as_json=as_json)
        say(done.in_json() if as_json else done.table())
        if done.limit is not None:
            if as_json:
                sys.exit(3)
            again = "the same command with a higher limit goes on" if options["out"] else "--out would keep the results"
            fail("eval", "limit", f"{done.limit}: {again}", 3, as_json=False)
        if done.all_failed is not None:
            if as_json:
                sys.exit(1)
            fail("eval", "failed", done.all_failed, 1, as_json=False)
