"""`rlm-broker ask QUESTION PATH...`: settings, one run, and what the user learns of it."""

import json
import shlex
import sys
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, closing, contextmanager, nullcontext
from pathlib import Path
from typing import Any, NoReturn

import click

from rlm_broker.broker.models.models import Models
from rlm_broker.cli import signals
from rlm_broker.cli.chat import AskedBefore, last_asked
from rlm_broker.cli.composition import models_of, rlm_of
from rlm_broker.cli.failures import fail
from rlm_broker.cli.models import say_stand_in
from rlm_broker.cli.parameters import exists, is_folder
from rlm_broker.cli.settings.settings import BUILT_IN, Settings, assigned
from rlm_broker.cli.settings.user_files import schema_of
from rlm_broker.cli.sources import STDIN, stored
from rlm_broker.cli.spans import sent_spans
from rlm_broker.cli.terminal import say
from rlm_broker.context.stored_context import StoredContext
from rlm_broker.errors import ConfigurationError, LimitReached, RunCancelled, RunFailed
from rlm_broker.events.event import Emit, all_of
from rlm_broker.events.trace import TraceWriter
from rlm_broker.limits import Limits
from rlm_broker.results import BestOf, Completion
from rlm_broker.rlm import RLM
from rlm_broker.run.earlier import from_trace
from rlm_broker.values.host_files import refusal_told
from rlm_broker.values.text import jsonable
from rlm_broker.values.words import counted
from rlm_broker.watch.progress_line import ProgressLine
from rlm_broker.watch.server import ControlSocket


def run(
    question: str,
    paths: tuple[str, ...],
    *,
    go_on: bool,
    as_json: bool,
    quiet: bool,
    verbose: bool,
    out: Path | None,
    **options: Any,
) -> int:
    """Answer a question about paths, print the answer, and return the exit code.

    Args:
        question: Question; empty with the option `resume`, since the trace has it.
        go_on: Whether it goes on from the last question, and is about the same paths if none are named.
        options: The traces, the recording, the number of runs and the settings.

    Raises:
        ConfigurationError: Two options contradict each other, or a path, a setting or a file cannot be used.
        RunFailed: The run ended without an answer. What it used has been printed.
    """
    if options["resume"]:
        _require_alone("resume", {**options, "continue": go_on}, ("continue", "best_of", "record", "replay"))
    if options["best_of"] is not None:
        _require_alone("best-of", options, ("record", "replay"))
    question = question.encode(errors="replace").decode()  # bytes that are no UTF-8 came as lone surrogates
    before = last_asked(paths) if go_on else AskedBefore(paths, [])
    if not before.paths and sys.stdin.isatty():
        raise click.UsageError("Missing argument 'PATH...': name files or folders, or pipe a text in.")
    _require_new(out)
    try:
        with ExitStack() as stack:
            line = None if quiet else ProgressLine(sys.stderr, is_verbose=verbose, runs=options["best_of"] or 1)
            progress = line and stack.enter_context(closing(line))
            outcome = _completion(before.with_question(question), before.paths, progress, **options)
    except (LimitReached, RunCancelled) as stopped:
        if stopped.partial_answer and not as_json:
            say(stopped.partial_answer)
        raise
    completion = outcome.chosen if isinstance(outcome, BestOf) else outcome
    answer = completion.response if completion.parsed is None else json.dumps(completion.parsed, ensure_ascii=False)
    if answer is None:
        _fail_without_answer(completion, as_json=as_json)
    _print(_in_json(completion, outcome) if as_json else answer, out)
    if sys.stderr.isatty():
        before.and_now(question or completion.root_prompt or "", answer).remember()
    if completion.limit is None and not completion.is_stopped:
        return 0
    if not as_json:
        why = "the run was stopped" if completion.is_stopped else f"{completion.limit} was reached"
        say(f"rlm-broker ask: {why}: that is the best answer so far", err=True)
    return 3


def _fail_without_answer(completion: Completion, *, as_json: bool) -> NoReturn:
    if completion.is_stopped:
        fail("ask", "stopped", "the run was stopped before it had an answer", 3, as_json=as_json)
    if completion.limit is not None:
        why = f"{completion.limit} was reached before there was an answer: raise it by --limit {completion.limit}=N"
        fail("ask", LimitReached.kind, why, LimitReached.exit_code, as_json=as_json)
    fail("ask", "no_answer", "the model gave no answer", 1, as_json=as_json)


def _completion(
    question: str,
    paths: tuple[str, ...],
    progress: ProgressLine | None,
    *,
    assignments: tuple[str, ...],
    system: str | None,
    trace: Path | None,
    record: Path | None,
    replay: Path | None,
    best_of: int | None,
    resume: tuple[Path, ...],
    **flags: Any,
) -> Completion | BestOf:
    """Run the question, with the traces and the recording named by the options.

    Args:
        best_of: Number of runs; None is one.
        resume: Traces of the run to go on with; empty for a new run.
        progress: Follows the run, and is closed when the run has ended. None is `--quiet`.
        flags: Settings.
    """
    given = assigned(assignments, **flags)
    if replay is not None and any(given.get(name) for name in ("model", "sub_model", "base_url", "model_policy")):
        raise ConfigurationError("give either models or a recording to replay: it brings its own models")
    _require_fit(question, paths, {"trace": trace, "record": record, "replay": replay})
    settings = _settings_like(resume, given) if resume else Settings(given)
    schema = settings.path("output_type")
    output_type = None if schema is None else schema_of(schema)
    try:
        with ExitStack() as stack:
            stack.enter_context(ControlSocket("ask"))
            watchers: list[Emit] = []
            if trace is not None:
                watchers.append(stack.enter_context(_writer(trace)))
            if (spans := stack.enter_context(sent_spans())) is not None:
                watchers.append(spans)
            models = Models(record=record, replay=replay) if replay else models_of(settings, record)
            told = all_of(watchers)
            rlm = rlm_of(settings, models=models, system_prompt=system, on_event=told)
            if progress is not None:
                watchers.append(stack.enter_context(closing(progress)))
            typed = progress is not None and STDIN in paths and sys.stdin.isatty()
            with progress.paused() if progress is not None and typed else nullcontext():
                context = stack.enter_context(stored(paths, settings))
            if progress is not None and replay is None:
                with progress.paused():
                    say_stand_in("ask", settings)
            outcome = _answered(rlm, context, question, output_type, best_of, resume)
    except RunFailed as failed:
        if progress is not None:
            _say_used(failed)
            _say_how_to_go_on(() if trace is None or best_of else (*resume, trace))
        raise
    if progress is not None:
        _say_used(outcome)
    return outcome


def _answered(
    rlm: RLM, context: StoredContext, question: str, output_type: Any, best_of: int | None, resume: tuple[Path, ...]
) -> Completion | BestOf:
    if best_of is not None:
        return rlm.best_of(best_of, context, question, output_type=output_type)
    if not resume:
        return rlm.completion(context, question, output_type=output_type)
    run = rlm.resume(resume, context, output_type=output_type)
    with signals.calling(run.cancel):
        return run.result()


def _settings_like(traces: tuple[Path, ...], given: Mapping[str, Any]) -> Settings:
    """Return the settings, with the models and limits of the run to go on with where none are set."""
    settings = Settings(given)
    facts = from_trace(traces).metadata
    limits, default = facts.get("limits"), jsonable(Limits().to_dict())
    limits = limits if isinstance(limits, dict) else {}
    kept = {name: limits[name] for name in default if limits.get(name) not in (None, default[name])}
    blocks = kept.pop("max_blocks", None)
    if blocks != Limits.from_dict(kept).max_blocks:  # else it follows from the turns
        kept |= {"max_blocks": blocks} if blocks else {}
    if not settings.names_model and facts.get("model"):
        kept["model"] = facts["model"]
        kept |= {"sub_model": facts["sub_model"]} if facts.get("sub_model") not in (None, facts["model"]) else {}
    told = settings.all()
    return Settings({name: value for name, value in kept.items() if told[name].source == BUILT_IN} | dict(given))


def _require_alone(option: str, options: Mapping[str, Any], others: tuple[str, ...]) -> None:
    """Refuse options that have no meaning beside another one."""
    for name in others:
        if options[name]:
            other = name.replace("_", "-")
            raise ConfigurationError(f"--{option} and --{other} cannot be combined: leave one of them out")


@contextmanager
def _writer(trace: Path) -> Iterator[TraceWriter]:
    with TraceWriter(trace) as writer:
        yield writer
        if writer.lost:
            say(f"warning: the trace {trace} is not whole: {writer.lost}", err=True)


def _require_fit(question: str, paths: tuple[str, ...], files: Mapping[str, Path | None]) -> None:
    """Refuse a question and paths in the wrong order or cannot be read, and files in their way."""
    _require_no_address(paths)
    _require_apart(files["trace"], files["record"])
    for option, file in files.items():
        _require_elsewhere(option, file, paths)
    _require_order(question, paths)


def _require_no_address(paths: tuple[str, ...]) -> None:
    """Refuse an address before it becomes a `Path`: that drops one of its two slashes, and the error would show one."""
    for path in paths:
        if "://" in path and not exists(path):
            raise ConfigurationError(f"{path!r} is an address, and ask reads files: download it, and name the file")


def _require_new(out: Path | None) -> None:
    """Refuse to write the answer over a file: until 0.1 `-o` named a schema. Its folder must be there."""
    if out is not None and exists(out):
        raise ConfigurationError(f"{out} exists: remove it, or name another file; --output-type names a schema")
    if out is not None and not is_folder(out.parent):
        raise ConfigurationError(f"cannot write {out}: there is no folder {out.parent}")


def _print(text: str, out: Path | None) -> None:
    """Print the answer, and write it to the file of `-o`."""
    say(text)
    if out is not None:
        with refusal_told(f"cannot write {out}"):
            out.write_text(f"{text}\n", errors="backslashreplace")


def _require_apart(trace: Path | None, record: Path | None) -> None:
    """Refuse one file for both: the recording is opened second, and would be refused because the file exists."""
    if trace is not None and record is not None and trace.resolve() == record.resolve():
        raise ConfigurationError(f"--trace and --record name the same file, {trace}: give each its own")


def _require_elsewhere(option: str, file: Path | None, paths: tuple[str, ...]) -> None:
    """Refuse a trace or a recording within the context: a second run of the same command would read it, too."""
    for path in paths if file is not None else ():
        if file is not None and exists(path) and file.resolve().is_relative_to(Path(path).resolve()):
            raise ConfigurationError(f"--{option} {file} lies in what you ask about, {path}: name a file elsewhere")


def _require_order(question: str, paths: tuple[str, ...]) -> None:
    """Refuse a path as the question, unless one of the paths exists: then a file may be called like the question."""
    if exists(question) and STDIN not in paths and not any(map(exists, paths)):
        raise ConfigurationError(f"{question} is a path: the question comes first, then what it is about")


def _say_used(ended: Completion | BestOf | RunFailed) -> None:
    """Print what a run took and used in one line, and a table by model and by depth if there are several."""
    if isinstance(ended, BestOf):
        say(f"{ended.votes} of {counted(len(ended.runs), 'run')} gave this answer, {ended.usage} in all", err=True)
        ended = ended.chosen
    if not ended.execution_time:  # no run had begun
        return
    turns = counted(len(ended.trajectory), "turn")
    say(f"{ended.execution_time:.1f} s, {turns}, {ended.usage_summary.total}", err=True)
    if not any(usage.total_tokens for usage in ended.usage_by_depth.values()):
        return
    models = list(ended.usage_summary.model_usage_summaries.items())
    depths = [(f"depth {depth}", usage) for depth, usage in ended.usage_by_depth.items()]
    rows = [*(models if len(models) > 1 else []), *(depths if len(depths) > 1 else [])]
    width = max((len(name) for name, _ in rows), default=0)
    for name, usage in rows:
        say(f"  {name:{width}}  {usage}", err=True)


def _say_how_to_go_on(traces: tuple[Path, ...]) -> None:
    """Print how a failed run goes on from its traces. Without any it cannot."""
    if traces:
        named = " ".join(f"--resume {shlex.quote(str(each))}" for each in traces)
        say(f"it can go on, about the same paths: rlm-broker ask {named}", err=True)


def _in_json(completion: Completion, outcome: Completion | BestOf) -> str:
    """Return a completion as one JSON object, without the context and without the conversation, which a trace holds."""
    shown = completion.to_dict()
    if isinstance(outcome, BestOf):
        shown["best_of"] = {"runs": len(outcome.runs), "votes": outcome.votes}
    for each in (shown, *shown["child_traces"]):
        del each["messages"], each["trajectory"]
    del shown["prompt"]
    return json.dumps(shown, ensure_ascii=False)
