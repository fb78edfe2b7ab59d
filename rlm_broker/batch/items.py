"""The items of a batch: questions about contexts, each with an id, and the result of each."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from rlm_broker.errors import RunFailed
from rlm_broker.results import Completion
from rlm_broker.usage import Usage, UsageSummary

ItemStatus = Literal["answered", "limited", "failed"]
"""End of an item: an answer; a partial answer or none, at a limit; or an error."""


@dataclass(frozen=True, slots=True)
class BatchItem:
    """One question of a batch.

    Attributes:
        id: Text that no other item of the batch has.
        context: Context, in any form that `RLM.start` takes.
        question: Question; None: the task is in the context.
        metadata: JSON values of the user's, which the result has unchanged.
    """

    id: str
    context: object
    question: str | None = None
    metadata: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class BatchResult:
    """Outcome of one item.

    Attributes:
        id, metadata: Those of the item.
        status: End of the item, see `ItemStatus`.
        answer: Answer as text; the best answer so far if a limit ended the run; else None.
        parsed: Answer as a value of the wanted `output_type`, or None.
        limit: Name of the limit that ended the run, or at which the model was asked for its best answer; else None.
        error: Sentence that says why there is no answer, or None.
        error_kind: `kind` of that error, such as "provider", or None.
        usage, usage_by_depth: Usage of the item over all attempts to answer it.
        replayed: The part of it that an earlier process or attempt paid, and that was taken from the journal.
        seconds: Duration of the last attempt.
        score: Value that the function `score` returned, as JSON has it; None if there is none.
        score_error: Sentence that says why the function failed, or None.
        completion: Outcome of the run; None if it failed.
        failure: Error that ended the run, with its conversation; None if it did not fail.
    """

    id: str
    status: ItemStatus
    answer: str | None = None
    parsed: Any = None
    limit: str | None = None
    error: str | None = None
    error_kind: str | None = None
    usage: UsageSummary = field(default_factory=UsageSummary)
    usage_by_depth: Mapping[int, Usage] = field(default_factory=dict)
    replayed: Usage = field(default_factory=Usage)
    seconds: float = 0.0
    score: Any = None
    score_error: str | None = None
    metadata: Mapping[str, Any] = field(default_factory=dict)
    completion: Completion | None = None
    failure: RunFailed | None = None
