"""Scores by functions of the user's, which may do anything."""

import asyncio
import math
import threading
from typing import Any

import numpy
import pytest

from rlm_broker.batch.items import BatchItem, BatchResult
from rlm_broker.batch.score import Scoring
from rlm_broker.errors import ConfigurationError

ITEM, RESULT = BatchItem("a", "context", metadata={"answer": "x"}), BatchResult("a", "answered", "x")


async def test_plain_function_runs_in_a_thread() -> None:
    seen: list[threading.Thread] = []

    def score(item: BatchItem, result: BatchResult) -> float:
        seen.append(threading.current_thread())
        return float(item.metadata["answer"] == result.answer)

    assert (await Scoring(score).scored(ITEM, RESULT)).score == 1.0
    assert seen[0] is not threading.main_thread()


async def test_coroutine_function_is_awaited() -> None:
    async def score(_: BatchItem, result: BatchResult) -> dict[str, Any]:
        await asyncio.sleep(0)
        return {"answer": result.answer, "parts": (1, numpy.float32(0.5))}

    assert (await Scoring(score).scored(ITEM, RESULT)).score == {"answer": "x", "parts": [1, 0.5]}
    assert (await Scoring(lambda *given: score(*given)).scored(ITEM, RESULT)).score["answer"] == "x"
    assert await Scoring(None).scored(ITEM, RESULT) is RESULT


@pytest.mark.parametrize("value", [object(), {1}, math.nan, [math.inf]])
async def test_score_that_json_lacks_is_an_error(value: object) -> None:
    """Another value in its place would be taken for the score by a trainer."""
    result = await Scoring(lambda *_: value).scored(ITEM, RESULT)
    assert result.score is None
    assert result.score_error is not None
    assert "JSON" in result.score_error


@pytest.mark.parametrize("error", [ValueError("wrong"), SystemExit("wrong"), KeyboardInterrupt("wrong")])
@pytest.mark.parametrize("is_async", [False, True])
async def test_function_that_raises_leaves_a_sentence(error: BaseException, is_async: bool) -> None:
    def score(*_: object) -> None:
        raise error

    async def ascore(*_: object) -> None:
        raise error

    result = await Scoring(ascore if is_async else score).scored(ITEM, RESULT)
    assert result.score is None
    assert result.score_error == f"{type(error).__name__}: wrong"


def test_value_that_is_no_function_is_refused() -> None:
    with pytest.raises(ConfigurationError, match="score must be a function, not int"):
        Scoring(5)  # type: ignore[arg-type]
