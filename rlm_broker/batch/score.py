"""The score of a result, by a function of the user's."""

import asyncio
import inspect
import json
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from rlm_broker.batch.items import BatchItem, BatchResult
from rlm_broker.concurrency.deadline import closed_if_deaf
from rlm_broker.concurrency.threads import DaemonThreads
from rlm_broker.errors import ConfigurationError
from rlm_broker.events.redaction import in_words

Score = Callable[[BatchItem, BatchResult], Any]
"""Function that judges a result: it returns a JSON value, or an awaitable of one. A plain function runs in a thread."""
MAX_THREADS = 8
"""Plain score functions running at the same time; further ones wait."""


class Scoring:
    """Scores results.

    Args:
        score: Function of the user's; None scores none.

    Raises:
        ConfigurationError: `score` is not a function.
    """

    def __init__(self, score: Score | None) -> None:
        if score is not None and not callable(score):
            raise ConfigurationError(f"score must be a function, not {type(score).__name__}")
        self._score = score
        self._threads = DaemonThreads(MAX_THREADS)

    async def scored(self, item: BatchItem, result: BatchResult) -> BatchResult:
        """Return the result with its score, or with the reason why the function has failed."""
        score = self._score
        if score is None:
            return result
        try:
            if inspect.iscoroutinefunction(score) or inspect.iscoroutinefunction(getattr(score, "__call__", None)):  # noqa: B004
                value = await closed_if_deaf(score(item, result))
            else:
                value = await asyncio.wrap_future(self._threads.submit(lambda: score(item, result)))
                if inspect.isawaitable(value):
                    value = await closed_if_deaf(value)
            return replace(result, score=_as_json(value))
        except (Exception, SystemExit, KeyboardInterrupt) as error:  # noqa: BLE001 - the function is the user's
            return replace(result, score_error=in_words(error))

    def close(self) -> None:
        """End the threads."""
        self._threads.close(RuntimeError("the batch has ended"))


def _as_json(value: Any) -> Any:
    """Return the value of a score as JSON has it. Numbers of numpy become Python's.

    Raises:
        TypeError, ValueError: JSON has no such value, or it is NaN or infinite.
    """
    return json.loads(json.dumps(value, allow_nan=False, default=_number))


def _number(value: Any) -> Any:
    if callable(item := getattr(value, "item", None)):
        return item()
    raise TypeError(f"the score must be a JSON value, not {type(value).__name__}")
