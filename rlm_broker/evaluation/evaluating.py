"""The run of an evaluation: each arm is a batch of all questions, whose results are scored.

The plain arm is a batch of an `RLM` with `max_depth=0`, whose runs have no REPL. So all arms share the model, the
broker, the journal and the form of results. A batch keeps its results in a folder. The scores are made of these files
alone, and are the same for an evaluation that was killed and went on.
"""

import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TypeVar

import msgspec

from rlm_broker.batch.batch import Batch
from rlm_broker.batch.budget import BatchLimits
from rlm_broker.batch.items import BatchItem, ItemStatus
from rlm_broker.errors import LimitReached
from rlm_broker.evaluation.arms import Arm
from rlm_broker.evaluation.questions import Question
from rlm_broker.evaluation.report import Ended, Outcome
from rlm_broker.evaluation.scoring import Key, score
from rlm_broker.rlm import RLM
from rlm_broker.run.conversation import says_too_long
from rlm_broker.usage import Usage

N = TypeVar("N", int, float)
Told = Callable[[Arm, Batch], None]
"""Called with an arm and its batch, each time that an item of it has ended."""


class Used(msgspec.Struct, frozen=True, omit_defaults=True):
    """Usage of calls of one model, in the shape of `Usage.to_dict`."""

    total_calls: int = 0
    total_input_tokens: int = 0
    total_output_tokens: int = 0
    total_cost: float | None = None
    stored_calls: int = 0
    cached_input_tokens: int = 0

    def usage(self) -> Usage:
        """Return the usage."""
        return Usage(*msgspec.structs.astuple(self))


class _Error(msgspec.Struct):
    kind: str = ""
    message: str = ""


class _Row(msgspec.Struct):
    """The part of a line of results that is scored."""

    id: str
    status: ItemStatus
    answer: str | None = None
    error: _Error | None = None
    usage: dict[str, Used] = {}
    seconds: float = 0.0


@dataclasses.dataclass(frozen=True, slots=True)
class Evaluation:
    """Questions, and how they are asked.

    Attributes:
        questions: Questions of all arms.
        folder: Folder of the files of results: `plain.jsonl` and its like.
        rlm: Returns the `RLM` of an arm.
        max_concurrent: Runs at the same time.
        max_budget_usd, max_tokens: Limits of all arms together; None means no limit.
        retry_failed: Whether items that failed in an earlier process are asked again.
    """

    questions: Sequence[Question]
    folder: Path
    rlm: Callable[[Arm], RLM]
    max_concurrent: int = 16
    max_budget_usd: float | None = None
    max_tokens: int | None = None
    retry_failed: bool = False
    _asked: dict[str, tuple[str, Key]] = dataclasses.field(default_factory=dict)

    def run(self, arms: Sequence[Arm], told: Told | None = None) -> LimitReached | None:
        """Ask all questions in each arm, one arm after the other, and return the limit that ended it, or None.

        Questions that have a result in the folder are not asked again.

        Raises:
            ConfigurationError: The folder belongs to other questions, settings or models.
            OSError: The folder cannot be written.
        """
        self.folder.mkdir(parents=True, exist_ok=True)
        for arm in arms:
            try:
                limits = self._left_for(arm)
                with self.rlm(arm).batch(
                    self._items(),
                    max_concurrent=self.max_concurrent,
                    out=self.file(arm),
                    limits=limits,
                    retry_failed=self.retry_failed,
                ) as batch:
                    for _ in batch:
                        if told is not None:
                            told(arm, batch)
            except LimitReached as limit:
                return limit
        return None

    def file(self, arm: Arm) -> Path:
        """Return the file of an arm's results."""
        return self.folder / arm.file_name

    def outcomes(self, arms: Sequence[Arm]) -> list[Outcome]:
        """Return the scored results of the arms, in the order of the questions."""
        found = []
        for arm in arms:
            rows = self._rows(arm)
            found += [self._outcome(arm, each, rows[each.id]) for each in self.questions if each.id in rows]
        return found

    def _items(self) -> Iterator[BatchItem]:
        for question in self.questions:
            problem = question.problem()
            self._asked[question.id] = problem.question, problem.key
            about = {"task": question.task, "length": question.length}
            yield BatchItem(question.id, problem.context, problem.question, about)

    def _left_for(self, arm: Arm) -> BatchLimits:
        """Return what the other arms have left of the limits for an arm; its own batch counts what it has used itself.

        Raises:
            LimitReached: They have left nothing.
        """
        used = Usage()
        others = {journal.with_suffix("") for journal in self.folder.glob("*.jsonl.journal")} - {self.file(arm)}
        for row in (row for file in sorted(others) for row in _read(file)):
            used += _usage(row.usage)
        tokens = used.total_input_tokens + used.total_output_tokens
        return BatchLimits(
            max_budget_usd=_left("max_budget_usd", self.max_budget_usd, used.total_cost or 0.0),
            max_tokens=_left("max_tokens", self.max_tokens, tokens),
        )

    def _rows(self, arm: Arm) -> dict[str, _Row]:
        """Return the results of an arm by their ids. Of an item that was asked again, the last result counts."""
        return {row.id: row for row in _read(self.file(arm))}

    def _outcome(self, arm: Arm, question: Question, row: _Row) -> Outcome:
        if question.id not in self._asked:
            problem = question.problem()
            self._asked[question.id] = problem.question, problem.key
        text, key = self._asked[question.id]
        error = None if row.error is None else row.error.message
        ended: Ended = row.status
        if ended == "failed" and arm.max_depth == 0 and says_too_long(error or ""):
            ended = "does_not_fit"
        said = None if row.answer is None else row.answer.replace(text, "")  # a repeated question is no answer
        return Outcome(
            arm.name,
            question.id,
            question.task,
            question.length,
            0.0 if ended in ("failed", "does_not_fit") else score(said, key),
            ended,
            row.answer,
            error,
            key.expected,
            _usage(row.usage),
            row.seconds,
        )


def _read(file: Path) -> list[_Row]:
    """Return the results in a file; none if there is no file. A last line that is not whole is left out."""
    try:
        lines = file.read_bytes().split(b"\n")[:-1]
    except FileNotFoundError:
        return []
    return [msgspec.json.decode(line, type=_Row) for line in lines]


def _left(name: str, limit: N | None, used: N) -> N | None:
    """Return what is left of a limit.

    Raises:
        LimitReached: It is used up.
    """
    if limit is not None and used >= limit:
        raise LimitReached(name, used, limit)
    return None if limit is None else limit - used


def _usage(by_model: Mapping[str, Used]) -> Usage:
    return sum((used.usage() for used in by_model.values()), Usage())
