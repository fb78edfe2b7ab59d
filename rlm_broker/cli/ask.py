"""`rlm-broker ask QUESTION PATH...`: its options. What it does is in `answering`, imported when it is done."""

import sys
from pathlib import Path
from typing import Any

import click

from rlm_broker.cli.failing import fail, failures
from rlm_broker.cli.terminal import say
from rlm_broker.errors import LimitReached, RunCancelled

EXIT_CODES = """\b
exit codes: 0 answered (NOT FOUND is an answer), 1 failed, 2 the command line or configuration is wrong,
3 a limit ended it (the partial answer is printed), 4 the isolation cannot be had or the sandbox failed,
5 the model provider failed, 130, 143, 129 stopped by Ctrl+C, SIGTERM, SIGHUP (the partial answer is printed)"""


@click.command("ask", epilog=EXIT_CODES)
@click.argument("question")
@click.argument("paths", nargs=-1, required=True, metavar="PATH...")
@click.option("--encoding", metavar="NAME", help="Of text without a byte order mark (default utf-8), such as cp1252.")
@click.option(
    "--strict-text", is_flag=True, help="Refuse text that cannot be decoded whole; default: replace and count."
)
@click.option("--model", metavar="NAME", help="The root model (default offline).")
@click.option("--sub-model", metavar="NAME", help="Answers what the REPL asks; default: the root model.")
@click.option("--base-url", metavar="URL", help="Of an OpenAI-compatible server that has the models.")
@click.option("--max-depth", type=int, metavar="N", help="Levels that have a REPL (default 1).")
@click.option("--isolation", metavar="LEVEL", help="auto (default), strict, standard, or process (unprotected).")
@click.option("--python", metavar="FOLDER", help="A virtual environment whose packages code has.")
@click.option("--packages", metavar="LIST", help="Packages to make one of, such as 'numpy>=2 six'.")
@click.option(
    "--allow-exec/--no-allow-exec", default=None, help="Whether code may start programs (default: at strict)."
)
@click.option("--tools", metavar="FILE", help="Python whose functions and values code may use; it is run right here.")
@click.option("--output-type", metavar="FILE", help="A JSON Schema of the answer, which is printed as JSON.")
@click.option("--model-policy", metavar="NAME", help="Models that code may name: allow (default), pinned, open.")
@click.option("--recursion", metavar="WHEN", help="Children that get a REPL: always (default), auto.")
@click.option(
    "--prompt-profile", metavar="NAME", help="How the model is told to end: both (default), final, answer; or compact."
)
@click.option("--limit", "assignments", multiple=True, metavar="NAME=VALUE", help="Any other limit: run_timeout_s=10m.")
@click.option("--system", metavar="TEXT", help="A system prompt in place of ours.")
@click.option("--trace", type=click.Path(path_type=Path), metavar="FILE", help="Write what happens, as JSON lines.")
@click.option("--record", type=click.Path(path_type=Path), metavar="FILE", help="Keep every model call, in a new file.")
@click.option("--replay", type=click.Path(path_type=Path), metavar="FILE", help="Take replies from such a file.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
@click.option("-q", "--quiet", is_flag=True, help="No progress.")
@click.option("-v", "--verbose", is_flag=True, help="Show each turn's reply, code, output and calls, on stderr.")
@click.option("--debug", is_flag=True, help="Show tracebacks of rlm-broker itself.")
def command(question: str, paths: tuple[str, ...], *, as_json: bool, debug: bool, **options: Any) -> None:
    """Ask QUESTION about files, folders or globs (- is stdin). The answer goes to stdout, all else to stderr."""
    with failures("ask", as_json=as_json, debug=debug):
        from rlm_broker.cli import answering  # what --help need not pay for

        try:
            completion = answering.ask(question, paths, **options)
        except (LimitReached, RunCancelled) as stopped:
            if stopped.partial_answer and not as_json:
                say(stopped.partial_answer)
            raise
        answer = answering.answer_of(completion)
        if answer is None:
            fail("ask", "no_answer", "the model gave no answer", 1, as_json=as_json)
        say(answering.in_json(completion) if as_json else answer)
        if completion.limit is not None:
            if not as_json:
                say(f"rlm-broker ask: {completion.limit} was reached: that is the best answer so far", err=True)
            sys.exit(3)
