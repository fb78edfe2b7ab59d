"""`rlm-broker batch INPUT --out OUT`: settings, one batch, and what the user is told of it."""

import json
import sys
import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack, closing, contextmanager, nullcontext
from pathlib import Path
from typing import Any, NamedTuple

import click
from click.core import ParameterSource

from rlm_broker.batch.batch import Batch
from rlm_broker.batch.items import BatchResult
from rlm_broker.batch.items_file import ItemsFile
from rlm_broker.batch.progress import BatchProgress
from rlm_broker.batch.shards import merge as merge_shards
from rlm_broker.batch.shards import shard_of
from rlm_broker.cli import signals
from rlm_broker.cli.batch_progress import BatchLine, by_kind, show_status, used
from rlm_broker.cli.composition import rlm_of
from rlm_broker.cli.models import say_stand_in
from rlm_broker.cli.parameters import exists
from rlm_broker.cli.settings.settings import Settings, assigned
from rlm_broker.cli.settings.user_files import function_of, schema_of
from rlm_broker.cli.sources import STDIN
from rlm_broker.cli.spans import sent_spans
from rlm_broker.cli.terminal import say, say_if_typed
from rlm_broker.errors import ConfigurationError, LimitReached, ModelFailed, RunCancelled
from rlm_broker.limits import BatchLimits
from rlm_broker.values.words import counted
from rlm_broker.watch.server import ControlSocket

LIMITS = {"max_budget_usd": "--batch-budget-usd", "max_tokens": "--batch-tokens", "timeout_s": "--batch-timeout"}
"""Limit of a batch -> its option."""
ARGUMENTS = ("max_concurrent", "fail_fast", "trajectories", "retry_failed", "settings_changed", "samples")
"""Options that are arguments of `RLM.batch` as they are."""
GO_ON = "the same command goes on"
STOPPING = "stopping: calls under way have 20 s to end; once more ends them at once"


class _Ended(NamedTuple):
    """An end before all items were done."""

    kind: str
    sentence: str
    exit_code: int


def run(
    input: str | None, *, out: Path | None, status: Path | None, merge: Path | None, as_json: bool, **options: Any
) -> int:
    """Ask the questions of a file and write their results to another, or look at the files of a batch.

    Args:
        input: File of questions, `-` for stdin.
        out: File of results.
        status: File of results of a batch to show; it stands alone.
        merge: File for the results of all shards; it stands alone.
        options: As `_answered` has them.

    Returns:
        The exit code.

    Raises:
        ConfigurationError: An option, a setting or a line cannot be used, or OUT belongs to another batch.
    """
    if (looked_at := status or merge) is not None:
        _require_alone(input, "status" if status else "merge")
        merged = 0 if merge is None else merge_shards(merge)
        shown = show_status(looked_at, as_json=as_json, of_shards=merge is not None)
        if merge is None:
            return 0
        if left := shown.done - merged:
            say(f"rlm-broker batch: {counted(left, 'result')} of killed shards left out: go on with these", err=True)
        return int(bool(left) or shown.shards is None or shown.shards[0] < shown.shards[1])
    if input is None:
        raise click.UsageError("Missing argument 'INPUT': name a file of JSON lines, or - for stdin.")
    if out is None:
        raise click.UsageError("Missing option '--out': name the file of results.")
    return _answered(input, out, as_json=as_json, **options)


def _answered(
    input: str,
    out: Path,
    *,
    root: str | None,
    shard: str | None,
    score: str | None,
    system: str | None,
    assignments: tuple[str, ...],
    quiet: bool,
    as_json: bool,
    **flags: Any,
) -> int:
    """Run the batch, and return the exit code.

    Args:
        flags: Settings, limits of the batch, and further arguments of `RLM.batch`.
    """
    _require_apart(input, out)
    arguments = {name: flags.pop(name) for name in ARGUMENTS}
    bounds = {name: flags.pop(option[2:].replace("-", "_")) for name, option in LIMITS.items()}
    limits = BatchLimits.from_dict(bounds, {name: f" ({option})" for name, option in LIMITS.items()})
    settings = Settings(assigned(assignments, **flags))
    schema = settings.path("output_type")
    part = None if shard is None else shard_of(shard)
    out = out if part is None else part.file(out)
    items = ItemsFile(input, root, settings["encoding"], "strict" if settings["strict_text"] else "replace", part)
    items.check()
    if input == STDIN:
        say_if_typed()
    with ExitStack() as stack:
        told = stack.enter_context(sent_spans())
        rlm = rlm_of(settings, system_prompt=system, on_event=told)
        batch = rlm.batch(
            items,
            out=out,
            root=items.folder,
            limits=limits,
            output_type=None if schema is None else schema_of(schema),
            score=None if score is None else function_of(score, "score"),
            **arguments,
        )
        if not quiet:
            say_stand_in("batch", settings)
        counts = _Counts()
        ended = _followed(batch, counts, fails_fast=arguments["fail_fast"], is_quiet=quiet)
    return _told(batch, counts, ended, out, is_quiet=quiet, as_json=as_json)


# -- before it -----------------------------------------------------------------------------------------------------


def _require_alone(input: str | None, option: str) -> None:
    """Refuse options of a batch beside --status or --merge: they would have no effect.

    Raises:
        click.UsageError: There is an argument or another option.
    """
    if input is not None:
        raise click.UsageError(f"give either INPUT or --{option} FILE: --{option} asks nothing.")
    context = click.get_current_context()
    for parameter in context.command.params:
        if parameter.name in ("input", option, "as_json", "debug", None):
            continue
        if context.get_parameter_source(str(parameter.name)) is ParameterSource.COMMANDLINE:
            raise click.UsageError(f"{parameter.opts[-1]} has no effect beside --{option}: leave it out.")


def _require_apart(input: str, out: Path) -> None:
    """Refuse to write the results into the input, or to stdout: no journal can lie beside it."""
    if str(out) == STDIN:
        raise ConfigurationError("--out - names no file: name one, since the journal of a batch lies beside it")
    if input != STDIN and exists(out) and exists(input) and out.samefile(input):
        raise ConfigurationError(f"--out {out} is the file that is read: name another one for the results")


# -- while it goes on ----------------------------------------------------------------------------------------------


class _Counts:
    """Counts of the results of this process."""

    def __init__(self) -> None:
        self.answered = 0
        self.failed = Counter[str]()
        self.limited = Counter[str]()
        self.last_failed: BatchResult | None = None
        self.unscored = 0
        self.score_error: str | None = None

    def add(self, result: BatchResult) -> None:
        """Count a result."""
        if result.score_error is not None:
            self.unscored += 1
            self.score_error = self.score_error or result.score_error
        if result.status == "failed":
            self.failed[result.error_kind or "failed"] += 1
            self.last_failed = result
        elif result.status == "limited":
            self.limited[result.limit or "stopped"] += 1
        else:
            self.answered += 1


def _followed(batch: Batch, counts: _Counts, *, fails_fast: bool, is_quiet: bool) -> _Ended | None:
    """Take all results, and return why the batch ended before all items were done, or None."""
    was_stopped = was_signalled = False
    line: BatchLine | None = None

    async def stop(now: bool) -> None:
        nonlocal was_stopped
        was_stopped = True
        (batch.cancel if now else batch.stop)()

    def stop_by_signal() -> None:
        nonlocal was_signalled
        if not batch.is_open:  # nothing is under way yet
            raise signals.EndedBySignal
        batch.stop()
        is_first, was_signalled = not was_signalled, True  # before the line: the second signal may interrupt this one
        if line is not None and is_first:  # on another thread, since the signal may have come within a print
            threading.Thread(target=line.note, args=(STOPPING,), daemon=True).start()

    try:
        with (
            ControlSocket("batch", stop),
            nullcontext() if is_quiet else _line(batch) as line,
            signals.calling(stop_by_signal),
        ):
            for result in batch:
                counts.add(result)
                if line is not None and result.status == "failed":
                    line.note(f"{result.id} failed: {result.error}")
    except (Exception, KeyboardInterrupt) as error:
        ended = _end_of(error, counts.last_failed if fails_fast else None, was_stopped=was_stopped)
        if ended is None:
            raise
        return ended
    return None


def _end_of(error: BaseException, failed: BatchResult | None, *, was_stopped: bool) -> _Ended | None:
    """Return how the batch ended, in words; None for an error that is no such end.

    Args:
        error: Error that ended the batch.
        failed: Failed item that ended it, if the first failure does.
        was_stopped: Whether `rlm-broker runs stop` has come.
    """
    match error:
        case RunCancelled() | KeyboardInterrupt():
            exit_code = LimitReached.exit_code if was_stopped and not signals.has_come() else signals.exit_code()
            return _Ended(RunCancelled.kind, f"stopped; {GO_ON}", exit_code)
        case LimitReached():
            return _Ended(error.kind, f"{error}: raise {LIMITS[error.limit]}, and {GO_ON}", error.exit_code)
        case _ if failed is not None:
            return _Ended("items_failed", f"{failed.id} failed: {failed.error}", 1)
        case ModelFailed(is_lasting=True):
            return _Ended(error.kind, f"{error}; {GO_ON} once that is put right", error.exit_code)
    return None


@contextmanager
def _line(batch: Batch) -> Iterator[BatchLine]:
    with closing(BatchLine(sys.stderr, lambda: batch.progress)) as line:
        yield line


# -- after it ------------------------------------------------------------------------------------------------------


def _told(batch: Batch, counts: _Counts, ended: _Ended | None, out: Path, *, is_quiet: bool, as_json: bool) -> int:
    """Say how the batch ended, and return the exit code."""
    progress = batch.progress
    failed = sum(counts.failed.values()) + progress.failed_before
    if ended is None and failed:
        have = "has" if failed == 1 else "have"
        sentence = f"{counted(failed, 'item')} {have} failed: {out} says why, and --retry-failed asks again"
        ended = _Ended("items_failed", sentence, 1)
    if ended is None and counts.unscored:
        sentence = f"{counted(counts.unscored, 'score')} failed, the first with {counts.score_error}: see {out}"
        ended = _Ended("scores_failed", sentence, 1)
    if not is_quiet:
        say(_summary(progress, counts), err=True)
    if as_json:
        error = {} if ended is None else {"error": {"kind": ended.kind, "message": ended.sentence}}
        say(json.dumps(_in_json(progress, counts) | error, ensure_ascii=False))
    elif ended is not None:
        say(f"rlm-broker batch: {ended.sentence}", err=True)
    return 0 if ended is None else ended.exit_code


def _summary(progress: BatchProgress, counts: _Counts) -> str:
    """Return one line: items by their end, those of earlier processes, and what all processes together have used."""
    ends = {
        "answered": str(counts.answered),
        "at a limit": by_kind(counts.limited) if counts.limited else "",
        "failed": by_kind(counts.failed) if counts.failed else "",
    }
    done = ", ".join(f"{number} {end}" for end, number in ends.items() if number not in ("", "0"))
    before = f"; {progress.skipped:,} done before" if progress.skipped else ""
    left = 0 if progress.total is None else progress.total - progress.done - progress.skipped
    before += f"; {left:,} left" if left > 0 else ""
    return f"{counted(progress.done, 'item')}{done and ': '}{done}{before}; {progress.seconds:.1f} s, {used(progress)}"


def _in_json(progress: BatchProgress, counts: _Counts) -> dict[str, Any]:
    """Return the summary for programs. Names that `--status --json` has too mean the same, for this process alone."""
    return {
        "total": progress.total,
        "done": progress.done,
        "answered": counts.answered,
        "failed": dict(counts.failed),
        "limited": dict(counts.limited),
        "done_before": progress.skipped,
        "failed_before": progress.failed_before,
        "usage": progress.usage.to_dict(),
        "replayed": progress.replayed.to_dict(),
        "seconds": round(progress.seconds, 3),
    }
