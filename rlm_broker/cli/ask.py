"""`rlm-broker ask QUESTION PATH...`: the main job."""

import dataclasses
import json
import sys
from pathlib import Path
from typing import Any

import click

from rlm_broker.cli.failing import fail, failures
from rlm_broker.cli.limiting import limits_from
from rlm_broker.cli.progress import Progress
from rlm_broker.context import Paths
from rlm_broker.errors import ConfigurationError, LimitReached, RunCancelled
from rlm_broker.rlm import RLM
from rlm_broker.trace.events import Event
from rlm_broker.trace.writer import TraceWriter
from rlm_broker.types import Completion

EXIT_CODES = """\b
exit codes: 0 answered (NOT FOUND is an answer), 1 failed, 2 the command line or configuration is wrong,
3 a limit ended it (the partial answer is printed), 4 the isolation cannot be had or the sandbox failed,
5 the model provider failed, 130 stopped by Ctrl+C (the partial answer is printed)"""


@click.command("ask", epilog=EXIT_CODES)
@click.argument("question")
@click.argument("paths", nargs=-1, required=True, metavar="PATH...")
@click.option("--model", default="offline", show_default=True, metavar="NAME", help="The root model.")
@click.option("--sub-model", metavar="NAME", help="Answers what the REPL asks; default: the root model.")
@click.option("--max-depth", type=int, metavar="N", help="Levels that have a REPL (default 1).")
@click.option("--isolation", default="auto", metavar="LEVEL", help="auto, strict, or process (no protection).")
@click.option("--limit", "assignments", multiple=True, metavar="NAME=VALUE", help="Any other limit.")
@click.option("--system", metavar="TEXT", help="A system prompt in place of ours.")
@click.option("--trace", type=click.Path(path_type=Path), metavar="FILE", help="Write what happens, as JSON lines.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
@click.option("-q", "--quiet", is_flag=True, help="No progress.")
@click.option("--debug", is_flag=True, help="Show tracebacks of rlm-broker itself.")
def command(question: str, paths: tuple[str, ...], *, as_json: bool, debug: bool, **options: Any) -> None:
    """Ask QUESTION about files, folders or globs (- is stdin). The answer goes to stdout, all else to stderr."""
    with failures("ask", as_json=as_json, debug=debug):
        try:
            completion = _ask(question, paths, **options)
        except (LimitReached, RunCancelled) as stopped:
            if stopped.partial_answer and not as_json:
                click.echo(stopped.partial_answer)
            raise
        if completion.response is None:
            fail("ask", "no_answer", "the model gave no answer", 1, as_json=as_json)
        click.echo(_as_json(completion) if as_json else completion.response)


def _ask(
    question: str,
    paths: tuple[str, ...],
    model: str,
    sub_model: str | None,
    max_depth: int | None,
    isolation: str,
    assignments: tuple[str, ...],
    system: str | None,
    trace: Path | None,
    quiet: bool,
) -> Completion:
    limits = limits_from(assignments, max_depth=max_depth)
    progress = None if quiet else Progress(sys.stderr)
    writer = TraceWriter(trace) if trace else None

    def on_event(event: Event) -> None:
        if writer is not None:
            writer(event)
        if progress is not None:
            progress(event)

    try:
        rlm = RLM(model, sub_model, limits=limits, isolation=isolation, system_prompt=system, on_event=on_event)
        return rlm.completion(_context(paths), question)
    finally:
        if progress is not None:
            progress.close()
        if writer is not None:
            writer.close()


def _context(paths: tuple[str, ...]) -> object:
    if "-" not in paths:
        return Paths(paths)
    if len(paths) > 1:
        raise ConfigurationError("- is stdin, and cannot be combined with other paths")
    try:
        text = sys.stdin.buffer.read().decode()
    except UnicodeDecodeError as error:
        raise ConfigurationError(f"stdin is not UTF-8 text: byte at offset {error.start}") from None
    if not text:
        raise ConfigurationError("stdin is empty: there is nothing to ask about")
    return text


def _as_json(completion: Completion) -> str:
    shown = dataclasses.asdict(dataclasses.replace(completion, messages=(), trajectory=()))
    del shown["messages"], shown["trajectory"]
    shown["usage_summary"] = completion.usage_summary.to_dict()
    return json.dumps(shown, ensure_ascii=False)
