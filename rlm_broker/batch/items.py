"""The items of a batch: questions about contexts, the result of each, and its line in the file of results."""

from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from rlm_broker.batch.item_calls import ItemCalls, Turns
from rlm_broker.errors import LimitReached, RlmBrokerError, RunFailed
from rlm_broker.results import Call, ChatMessage, Completion
from rlm_broker.usage import Usage, UsageSummary
from rlm_broker.values.text import jsonable
from sandbox_worker.wire.text_json import encode_escaped

ROOT_RUN = "1"
"""Name of the root run of an item; its children are "1.1", "1.2" and so on."""
ItemStatus = Literal["answered", "limited", "failed"]
"""End of an item: an answer; a partial answer or none, at a limit; or an error."""


@dataclass(frozen=True, slots=True)
class BatchItem:
    """One question of a batch.

    Example:
        ```python
        items = [BatchItem(path.name, path, "Which service failed?") for path in Path("logs").iterdir()]
        print({result.id: result.answer for result in rlm.batch(items)})
        ```

    Attributes:
        id: Text, unique in the batch.
        context: Context, in any form that `RLM.start` takes.
        question: Question; None: the task is in the context.
        metadata: JSON values of the user's. The result has them unchanged.
    """

    id: str
    context: object
    question: str | None = None
    metadata: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class BatchResult:
    """Outcome of one item.

    Example:
        ```python
        for result in rlm.batch(items):
            print(result.id, result.error or result.answer, result.usage.total_cost)
        ```

    Attributes:
        id, metadata: Those of the item.
        sample: Number of the sample, from 0, if the item is asked several times.
        status: End of the item, see `ItemStatus`.
        answer: Answer as text; the best answer so far if a limit ended the run; else None.
        parsed: Answer as a value of the wanted `output_type`, or None.
        limit: Name of the limit that ended the run, or at which the model was asked for its best answer; else None.
        error: Sentence saying why there is no answer, or None.
        error_kind: `kind` of the error, for example "provider", or None.
        usage, usage_by_depth: Usage of the item over all attempts to answer it.
        replayed: The part of it taken from the journal: an earlier process or attempt has paid it.
        seconds: Duration of the last attempt.
        score: Value returned by the function `score`, as JSON has it; None if there is none.
        score_error: Sentence saying why the function failed, or None.
        completion: Outcome of the run; None if it failed.
        failure: Error that ended the run, with its conversation; None if it did not fail.
    """

    id: str
    status: ItemStatus
    answer: str | None = None
    sample: int = 0
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


def result_of(item: BatchItem, sample: int, outcome: Completion | Exception, calls: ItemCalls) -> BatchResult:
    """Return the result of an item.

    Args:
        item: The item.
        sample: Number of its sample.
        outcome: Completion of its run, or the error that ended it.
        calls: Its calls.
    """
    more: dict[str, Any] = {
        "sample": sample,
        "usage": calls.summary,
        "usage_by_depth": calls.by_depth,
        "replayed": calls.replayed,
        "metadata": item.metadata,
    }
    if isinstance(outcome, Completion):
        return BatchResult(
            item.id,
            "limited" if outcome.limit or outcome.is_stopped else "answered",
            outcome.response,
            parsed=outcome.parsed,
            limit=outcome.limit,
            seconds=outcome.execution_time,
            completion=outcome,
            **more,
        )
    failure = outcome if isinstance(outcome, RunFailed) else None
    limit = outcome.limit if isinstance(outcome, LimitReached) else None
    return BatchResult(
        item.id,
        "failed" if limit is None else "limited",
        outcome.partial_answer if isinstance(outcome, LimitReached) else None,
        limit=limit,
        error=str(outcome) or type(outcome).__name__,
        error_kind=outcome.kind if isinstance(outcome, RlmBrokerError) else RlmBrokerError.kind,
        seconds=0.0 if failure is None else failure.execution_time,
        failure=failure,
        **more,
    )


def result_line(
    result: BatchResult, digest: bytes, turns: Mapping[str, Turns] | None, more: Mapping[str, Any] | None = None
) -> bytes:
    """Return the line of a result.

    Args:
        result: The result.
        digest: Digest of the item.
        turns: Turns of each run by its name, for conversations; None leaves them out.
        more: Further keys, for example `sample`.
    """
    said = {
        "parsed": None if result.parsed is None else jsonable(result.parsed),
        "limit": result.limit,
        "error": None if result.error is None else {"kind": result.error_kind, "message": result.error},
        "usage": {model: usage.to_dict() for model, usage in result.usage.model_usage_summaries.items()},
        "usage_by_depth": {str(depth): usage.to_dict() for depth, usage in result.usage_by_depth.items()},
        "replayed": result.replayed.to_dict() if result.replayed.total_calls else None,
        "seconds": round(result.seconds, 3),
        "score": result.score,
        "score_error": result.score_error,
        "metadata": result.metadata or None,
    }
    line: dict[str, Any] = {"id": result.id, **(more or {}), "status": result.status, "answer": result.answer}
    line |= {name: value for name, value in said.items() if value is not None}
    if turns is not None:
        root = turns.get(ROOT_RUN)
        line["messages"] = _conversation(messages_of(result), () if root is None else root.answers)
        children = {run: of for run, of in turns.items() if run != ROOT_RUN}
        line["children"] = [
            {"run": run, "depth": of.depth, "messages": _conversation(of.messages, of.answers)}
            for run, of in children.items()
        ]
    line["digest"] = digest.hex()
    return encode_escaped(line) + b"\n"


def messages_of(result: BatchResult) -> tuple[ChatMessage, ...]:
    """Return the conversation of a result's run with the root model, also if it failed."""
    if result.completion is not None:
        return result.completion.messages
    return result.failure.messages if result.failure is not None else ()


def _conversation(messages: Iterable[ChatMessage], answers: Iterable[Call]) -> list[dict[str, Any]]:
    """Return messages as JSON values, each answer with what the server gave beside its text."""
    extras = defaultdict[str, list[Mapping[str, Any]]](list)
    for answer in answers:
        if answer.extra:
            extras[answer.response].append(answer.extra)
    shown = []
    for each in messages:
        message = {"role": each.role, "content": jsonable(each.content)}
        is_answer = each.role == "assistant" and isinstance(each.content, str)
        if is_answer and (given := extras.get(str(each.content))):
            message |= given.pop(0)
        shown.append(message)
    return shown
