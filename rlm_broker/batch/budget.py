"""The means of a whole batch: each call is held against its limits before it is sent, and counted after it.

A call that may not be sent waits, and never fails: the batch is about to end, and an error would become the result of
an item that a further process could answer. A call with a lasting failure waits, too: every further call would meet
that failure, such as that of a wrong key.
"""

import asyncio
from collections.abc import Awaitable, Callable, Mapping

from rlm_broker.broker.clients.base import LMRequest
from rlm_broker.errors import ConfigurationError, LimitReached, ModelFailed
from rlm_broker.limits import BatchLimits, Limits
from rlm_broker.results import Call
from rlm_broker.run.ledger import Ledger
from rlm_broker.usage import Usage

MOST_LASTING = 10
"""Lasting failures in a row that end a batch which had answers before. Without an answer before, one is enough."""


class Spending:
    """Means shared by all items of a batch. Lives on one event loop.

    Args:
        limits: Limits of the batch.
        earlier: Usage by model of earlier processes.
        end: Called with the error that ends the batch: a limit is reached, or every further call would fail.

    Attributes:
        usage: Usage of all processes so far. It may be read from any thread.
    """

    def __init__(self, limits: BatchLimits, earlier: Mapping[str, Usage], end: Callable[[Exception], object]) -> None:
        bounds = Limits(max_budget_usd=limits.max_budget_usd, max_tokens=limits.max_tokens, max_llm_calls=None)
        self._ledger = Ledger(bounds)
        self.usage = sum(earlier.values(), Usage())
        self._end = end
        self._is_ended = self._was_answered = False
        self._lasting = 0
        self._sent = 0
        self._idle = asyncio.Event()
        self._idle.set()
        for model, usage in earlier.items():
            self._ledger.add_earlier(model, usage)

    def require_means(self) -> None:
        """Refuse to begin where a limit is reached already.

        Raises:
            LimitReached: Earlier processes have spent all.
        """
        self._ledger.require_means()

    def stop(self) -> None:
        """Send no further call. Calls under way go on."""
        self._is_ended = True

    def hurry(self) -> None:
        """Wait no longer for calls under way."""
        self._idle.set()

    async def drained(self, timeout_s: float) -> None:
        """Wait for the calls under way, but no longer than this."""
        try:
            async with asyncio.timeout(timeout_s):
                await self._idle.wait()
        except TimeoutError:
            return

    async def made(self, request: LMRequest, call: Callable[[], Awaitable[Call]]) -> Call:
        """Make a call, and count it. If it may not be sent, or none can succeed, wait for the end of the batch.

        The batch does not end here if a limit is reached, but with the next call: this one may be the last of its item.

        Raises:
            ModelFailed: The call failed.
        """
        try:
            hold = await self._ledger.hold(request.chars, request.max_completion_tokens)
        except (LimitReached, ConfigurationError) as error:
            await self._ends(error)
            raise
        try:
            if self._is_ended:
                await asyncio.Event().wait()
            self._sent += 1
            self._idle.clear()
            try:
                answer = await call()
            finally:
                self._sent -= 1
                if not self._sent:
                    self._idle.set()
        except BaseException as error:
            self._ledger.release(hold)
            if isinstance(error, ModelFailed) and error.is_lasting and request.model is None:
                await self._fail(error)
            raise
        self._was_answered, self._lasting = True, 0
        self.usage += answer.usage
        self._ledger.settle(hold, "", answer.root_model, request.depth, answer.usage, len(answer.response))
        return answer

    async def _fail(self, error: ModelFailed) -> None:
        """Count a failure that every further call would meet, and end the batch if that is certain by now."""
        self._lasting += 1
        if not self._was_answered or self._lasting >= MOST_LASTING:
            await self._ends(ModelFailed(f"every call would fail: {error}", error.cause, is_lasting=True))

    async def _ends(self, error: Exception) -> None:
        self._end(error)
        await asyncio.Event().wait()
