"""The command line of `rlm-broker ask QUESTION PATH...`. Its work is in `answering`, which `--help` does not import."""

import sys
from contextlib import ExitStack, closing
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from rlm_broker.cli.failing import fail, failures
from rlm_broker.cli.parameters import API_KEY, BASE_URL, FILE, cluster_options, run_options, sandbox_options
from rlm_broker.cli.terminal import say
from rlm_broker.errors import LimitReached, RunCancelled

if TYPE_CHECKING:
    from rlm_broker.cli.progress import ProgressLine

EXIT_CODES = """\b
exit codes: 0 answered (NOT FOUND is an answer), 1 failed, 2 the command line or configuration is wrong,
3 a limit or `rlm-broker stop` ended it (the partial answer is printed), 4 the isolation cannot be had or the sandbox
failed, 5 the model provider failed, 130, 143, 129 stopped by Ctrl+C, SIGTERM, SIGHUP (the partial answer is printed)"""


@click.command("ask", epilog=EXIT_CODES)
@click.argument("question")
@click.argument("paths", nargs=-1, type=click.Path(), metavar="[PATH]...")
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
@click.option(
    "-o", "--output-type", type=FILE, metavar="FILE", help="A JSON Schema of the answer, which is printed as JSON."
)
@run_options
@cluster_options
@click.option("--limit", "assignments", multiple=True, metavar="NAME=VALUE", help="Any other limit: run_timeout_s=10m.")
@click.option("--system", metavar="TEXT", help="System prompt, in place of the built-in one.")
@click.option(
    "--trace", type=click.Path(path_type=Path), metavar="FILE", help="Write all events to a new file, as JSON lines."
)
@click.option("--record", type=click.Path(path_type=Path), metavar="FILE", help="Write all model calls to a new file.")
@click.option(
    "--replay",
    type=click.Path(path_type=Path),
    metavar="FILE",
    help="Take replies from such a file; no model is called.",
)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
@click.option("-q", "--quiet", is_flag=True, help="Print no progress and no advice.")
@click.option(
    "-v", "--verbose", is_flag=True, help="Show each turn's reply, code, output and calls, and left-out files."
)
@click.option("--debug", is_flag=True, help="Show tracebacks of rlm-broker itself.")
def command(
    question: str,
    paths: tuple[str, ...],
    *,
    as_json: bool,
    quiet: bool,
    verbose: bool,
    debug: bool,
    **options: Any,
) -> None:
    """Ask QUESTION about files, folders or globs. Without any, or with -, it is about stdin.

    The answer goes to stdout, all else to stderr.
    """
    if not paths and sys.stdin.isatty():
        raise click.UsageError("Missing argument 'PATH...': name files or folders, or pipe a text in.")
    with failures("ask", as_json=as_json, debug=debug):
        try:
            with ExitStack() as stack:
                progress = None if quiet else stack.enter_context(closing(_progress(verbose)))
                from rlm_broker.cli import answering  # pydantic and aiohttp: half a second, and more on a busy machine

                completion = answering.ask(question, paths, progress=progress, is_verbose=verbose, **options)
        except (LimitReached, RunCancelled) as stopped:
            if stopped.partial_answer and not as_json:
                say(stopped.partial_answer)
            raise
        answer = answering.answer_of(completion)
        if answer is None:
            if completion.is_stopped:
                fail("ask", "stopped", "the run was stopped before it had an answer", 3, as_json=as_json)
            fail("ask", "no_answer", "the model gave no answer", 1, as_json=as_json)
        say(answering.in_json(completion) if as_json else answer)
        if completion.limit is not None or completion.is_stopped:
            if not as_json:
                why = "the run was stopped" if completion.is_stopped else f"{completion.limit} was reached"
                say(f"rlm-broker ask: {why}: that is the best answer so far", err=True)
            sys.exit(3)


def _progress(is_verbose: bool) -> "ProgressLine":
    """Return the progress, whose clock begins before the imports and the settings."""
    from rlm_broker.cli.progress import ProgressLine

    return ProgressLine(sys.stderr, is_verbose=is_verbose)
