"""The result of an item, from the end of its run; and its line in the file of results."""

from typing import Any

from rlm_broker.batch.items import BatchItem, BatchResult, ItemStatus
from rlm_broker.errors import LimitReached, RlmBrokerError, RunFailed
from rlm_broker.journal.lines import line_of
from rlm_broker.journal.paid import PaidCalls
from rlm_broker.results import ChatMessage, Completion
from rlm_broker.run.calls import in_words
from rlm_broker.values.text import jsonable


def result_of(item: BatchItem, outcome: Completion | Exception, paid: PaidCalls) -> BatchResult:
    """Return the result of an item.

    Args:
        item: The item.
        outcome: Completion of its run, or the error that ended it.
        paid: Calls of all attempts.
    """
    more: dict[str, Any] = {
        "usage": paid.summary,
        "usage_by_depth": paid.by_depth,
        "replayed": paid.replayed.usage,
        "metadata": item.metadata,
    }
    if isinstance(outcome, Completion):
        return BatchResult(
            item.id,
            "limited" if outcome.limit or outcome.is_stopped else "answered",
            outcome.response,
            outcome.parsed,
            outcome.limit,
            seconds=outcome.execution_time,
            completion=outcome,
            **more,
        )
    failure = outcome if isinstance(outcome, RunFailed) else None
    limit = outcome.limit if isinstance(outcome, LimitReached) else None
    status: ItemStatus = "failed" if limit is None else "limited"
    return BatchResult(
        item.id,
        status,
        outcome.partial_answer if isinstance(outcome, LimitReached) else None,
        None,
        limit,
        in_words(outcome),
        outcome.kind if isinstance(outcome, RlmBrokerError) else RlmBrokerError.kind,
        seconds=0.0 if failure is None else failure.execution_time,
        failure=failure,
        **more,
    )


def result_line(result: BatchResult, digest: bytes, *, trajectories: bool) -> bytes:
    """Return the line of a result.

    Args:
        result: The result.
        digest: Digest of the item.
        trajectories: Whether the line has the conversation as chat messages.
    """
    line: dict[str, Any] = {"id": result.id, "status": result.status, "answer": result.answer}
    if result.parsed is not None:
        line["parsed"] = jsonable(result.parsed)
    if result.limit is not None:
        line["limit"] = result.limit
    if result.error is not None:
        line["error"] = {"kind": result.error_kind, "message": result.error}
    line["usage"] = {model: usage.to_dict() for model, usage in result.usage.model_usage_summaries.items()}
    line["usage_by_depth"] = {str(depth): usage.to_dict() for depth, usage in result.usage_by_depth.items()}
    if result.replayed.total_calls:
        line["replayed"] = result.replayed.to_dict()
    line["seconds"] = round(result.seconds, 3)
    if result.score is not None:
        line["score"] = result.score
    if result.score_error is not None:
        line["score_error"] = result.score_error
    if result.metadata:
        line["metadata"] = result.metadata
    if trajectories:
        line["messages"] = [{"role": each.role, "content": jsonable(each.content)} for each in messages_of(result)]
    line["digest"] = digest.hex()
    return line_of(line)


def messages_of(result: BatchResult) -> tuple[ChatMessage, ...]:
    """Return the conversation of a result's run with the root model, also if it failed."""
    if result.completion is not None:
        return result.completion.messages
    return result.failure.messages if result.failure is not None else ()
