"""`rlm-broker eval`: the plan, its run, and what the user is told of it."""

import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rlm_broker.batch.batch import Batch
from rlm_broker.cli import signals
from rlm_broker.cli.composition import rlm_of
from rlm_broker.cli.failures import fail
from rlm_broker.cli.parameters import is_folder
from rlm_broker.cli.settings.settings import Settings, assigned
from rlm_broker.cli.terminal import say
from rlm_broker.errors import ConfigurationError, LimitReached, RunCancelled
from rlm_broker.evaluation.arms import PLAIN, Arm, arms_of
from rlm_broker.evaluation.evaluating import Evaluation
from rlm_broker.evaluation.lengths import lengths_of
from rlm_broker.evaluation.picture import svg
from rlm_broker.evaluation.questions import Question, generated, own, tasks_of
from rlm_broker.evaluation.report import Report, report
from rlm_broker.evaluation.table import dollars, table
from rlm_broker.limits import RunLimits, with_set
from rlm_broker.rlm import RLM
from rlm_broker.values.text import as_json as to_json
from rlm_broker.values.words import counted
from rlm_broker.watch.server import ControlSocket

GENERATED: dict[str, Any] = {"tasks": "all", "lengths": "8k,64k", "length_unit": "tokens", "samples": 5, "seed": 0}
"""Options of generated questions, with their defaults; the help repeats these."""
REPORT_FILE = "report.json"
PICTURE_FILE = "scores.svg"
OFFLINE = "offline"
OFFLINE_NOTE = (
    "the model offline answers by rules: its scores show that the command works, and say nothing about a model"
)


@dataclass(frozen=True, slots=True)
class Done:
    """An evaluation that has ended.

    Attributes:
        report: Its results.
        limit: Limit that ended it before all items had ended, or None.
    """

    report: Report
    limit: LimitReached | None

    @property
    def all_failed(self) -> str | None:
        """Sentence about the first arm of which each item failed; None if there is none."""
        for arm in self.report.arms:
            of_arm = [each for each in self.report.outcomes if each.arm == arm]
            if of_arm and all(each.ended == "failed" for each in of_arm):
                return f"all {counted(len(of_arm), 'item')} of {arm} failed, the first one because: {of_arm[0].error}"
        return None

    def table(self) -> str:
        """Return the results as lines of text."""
        return table(self.report)

    def in_json(self) -> str:
        """Return the results as one JSON object."""
        limit = {} if self.limit is None else {"limit": self.limit.limit}
        return to_json(self.report.to_dict() | limit)


@dataclass(frozen=True, slots=True)
class Plan:
    """An evaluation that has not begun.

    Attributes:
        questions: Questions of each arm.
        arms: Ways to ask them.
        settings: Settings of each arm, by its name.
        out: Folder that keeps the results; None keeps none.
        picture: File for a picture, or None.
        is_quiet: Whether no progress is printed.
        about: Facts that the report repeats.
        how: Arguments of `Evaluation`.
    """

    questions: list[Question]
    arms: tuple[Arm, ...]
    settings: dict[str, Settings]
    out: Path | None
    picture: Path | None
    is_quiet: bool
    about: dict[str, Any]
    how: dict[str, Any]

    def estimate(self) -> str:
        """Return in words how many runs there are, and what is known of their tokens."""
        tokens = sum(question.tokens for question in self.questions)
        arms = f"{counted(len(self.arms), 'arm')} x {counted(len(self.questions), 'question')}"
        runs = f"{counted(len(self.arms) * len(self.questions), 'run')}: {arms}"
        contexts = f"contexts of about {tokens:,} tokens together"
        sent = ", which the arm plain sends whole" if any(arm.name == PLAIN for arm in self.arms) else ""
        return f"{runs}, with {contexts}{sent}"

    def in_json(self) -> str:
        """Return the same as one JSON object."""
        arms = [arm.name for arm in self.arms]
        tokens = sum(question.tokens for question in self.questions)
        runs = len(arms) * len(self.questions)
        return to_json({"runs": runs, "arms": arms, "questions": len(self.questions), "context_tokens": tokens})

    def run(self) -> Done:
        """Ask all questions, and write the files.

        Raises:
            ConfigurationError: A setting, a file or the folder cannot be used.
        """
        if not self.is_quiet:
            say(f"eval: {self.estimate()}", err=True)
            if any(settings["model"] == OFFLINE for settings in self.settings.values()):
                say(f"eval: {OFFLINE_NOTE}", err=True)
        with ExitStack() as stack:
            stack.enter_context(ControlSocket("eval"))
            folder = stack.enter_context(_folder(self.out))
            evaluation = Evaluation(self.questions, folder, self._rlm, **self.how)
            limit = evaluation.run(self.arms, None if self.is_quiet else _Telling(len(self.questions)))
            names = [arm.name for arm in self.arms]
            wanted = len(self.arms) * len(self.questions)
            done = Done(report(self.about, names, evaluation.outcomes(self.arms), wanted), limit)
            if self.out is not None:
                _write(folder / REPORT_FILE, done.in_json() + "\n")
                _write(folder / PICTURE_FILE, svg(done.report))
        if self.picture is not None:
            _write(self.picture, svg(done.report))
        return done

    def _rlm(self, arm: Arm) -> RLM:
        settings = self.settings[arm.name]
        return rlm_of(settings, limits=with_set(settings.limits, RunLimits(max_depth=arm.max_depth)))


def run(*, as_json: bool, dry_run: bool, **options: Any) -> int:
    """Ask the questions in each arm, print the table, and return the exit code."""
    planned = plan(**options)
    if dry_run:
        say(planned.in_json() if as_json else planned.estimate())
        return 0
    try:
        done = planned.run()
    except RunCancelled:
        again = "the same command goes on" if options["out"] else "its results are lost, since there is no --out"
        fail("eval", "cancelled", f"stopped: {again}", signals.exit_code(), as_json=as_json)
    say(done.in_json() if as_json else done.table())
    if done.limit is not None:
        if as_json:
            return 3
        again = "the same command with a higher limit goes on" if options["out"] else "--out would keep the results"
        fail("eval", "limit", f"{done.limit}: {again}", 3, as_json=False)
    if done.all_failed is not None:
        if as_json:
            return 1
        fail("eval", "failed", done.all_failed, 1, as_json=False)
    return 0


def plan(
    *,
    data: str | None,
    arms: str,
    max_concurrent: int,
    batch_budget_usd: float | None,
    batch_tokens: int | None,
    **rest: Any,
) -> Plan:
    """Return the evaluation that the options of the command line ask for.

    Raises:
        ConfigurationError: An option, a setting or the file of questions cannot be used.
    """
    how = {
        "max_concurrent": max_concurrent,
        "max_budget_usd": _above_0("--batch-budget-usd", batch_budget_usd),
        "max_tokens": _above_0("--batch-tokens", batch_tokens),
        "retry_failed": rest.pop("retry_failed"),
    }
    out, picture = rest.pop("out"), rest.pop("picture")
    if how["retry_failed"] and out is None:
        raise ConfigurationError("--retry-failed needs the results of an earlier process: name their folder by --out")
    is_quiet, assignments = rest.pop("quiet"), rest.pop("assignments")
    if picture is not None and not is_folder(picture.parent):  # it is written last, when all runs have been paid
        raise ConfigurationError(f"cannot write {picture}: {picture.parent} is not a folder")
    questions, source = _questions(data, **{name: rest.pop(name) for name in GENERATED})
    flags = assigned(assignments, **rest)
    asked = arms_of(arms)
    settings = Settings(flags)
    by_arm = {arm.name: Settings(flags | dict(arm.settings)) for arm in asked}
    if "max_depth" in settings.limits.model_fields_set:
        raise ConfigurationError("max_depth is a setting, and each arm has its own: leave it out, and name arms")
    about = {"model": settings["model"], "sub_model": settings["sub_model"], **source}
    folder = None if out is None else Path(out)
    return Plan(questions, asked, by_arm, folder, picture, is_quiet, about, how)


def _questions(data: str | None, **given: Any) -> tuple[list[Question], dict[str, Any]]:
    """Return the questions, and what the report says of their source.

    Args:
        data: File of the user's questions, or None.
        given: Options of generated questions; None for one that was left out.

    Raises:
        ConfigurationError: An option has no effect, or the file or an option cannot be used.
    """
    if data is not None:
        for name in (name for name, value in given.items() if value is not None):
            raise ConfigurationError(f"--data replaces the generated questions: leave out --{name.replace('_', '-')}")
        return own(Path(data)), {"data": data}
    said = GENERATED | {name: value for name, value in given.items() if value is not None}
    lengths = lengths_of(said["lengths"], said["length_unit"])
    return generated(tasks_of(said["tasks"]), lengths, said["samples"], said["seed"]), said


class _Telling:
    """Prints a line each time that a further tenth of an arm has ended.

    Args:
        total: Items of each arm.
    """

    def __init__(self, total: int) -> None:
        self._total = total
        self._told: tuple[str, int] | None = None

    def __call__(self, arm: Arm, batch: Batch) -> None:
        progress = batch.progress
        ended = progress.done + progress.skipped
        tenth = (arm.name, 10 * ended // self._total)
        if tenth != self._told:
            self._told = tenth
            failed = f", {progress.failed:,} failed" if progress.failed else ""
            say(f"eval: {arm.name}: {ended:,} of {self._total:,} items{failed}, {dollars(_cost(batch))}", err=True)


def _cost(batch: Batch) -> float | None:
    usage = batch.progress.usage
    return usage.total_cost if usage.total_calls else 0.0


def _above_0(option: str, value: float | None) -> Any:
    if value is not None and not 0 < value < float("inf"):
        raise ConfigurationError(f"{option} must be above 0, not {value:g}")
    return value


@contextmanager
def _folder(out: Path | None) -> Iterator[Path]:
    """Return the folder of the results; without one, a temporary folder that is removed at the end."""
    if out is None:
        with tempfile.TemporaryDirectory(prefix="rlm-broker-eval-") as folder:
            yield Path(folder)
        return
    try:
        out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigurationError(f"cannot make the folder {out}: {error.strerror}") from None
    yield out


def _write(file: Path, text: str) -> None:
    """Write a file whole or not at all.

    Raises:
        ConfigurationError: It cannot be written.
    """
    beside = file.with_name(f".{file.name}.part")
    try:
        beside.write_text(text, encoding="utf-8")
        beside.replace(file)
    except OSError as error:
        with suppress(OSError):
            beside.unlink()
        raise ConfigurationError(f"cannot write {file}: {error.strerror}") from None
