"""The means of a whole batch: each call is held against its limits before it is sent, and counted after it."""

import asyncio
from collections.abc import Callable, Hashable, Mapping

from rlm_broker.batch.limits import BatchLimits
from rlm_broker.clients.base import Client, LMRequest
from rlm_broker.errors import ConfigurationError, LimitReached
from rlm_broker.handler.client_queue import OnRetry
from rlm_broker.handler.completing import Completing
from rlm_broker.handler.routing import Routing
from rlm_broker.limits import Limits
from rlm_broker.results import Call
from rlm_broker.run.ledger import NOTHING, Hold, Ledger
from rlm_broker.usage import Usage


class Spending:
    """Means that all items of a batch share. Lives on one event loop.

    Args:
        limits: Limits of the batch.
        earlier: Usage by model of earlier processes.
        end: Called with the error that ends the batch, when a limit is reached.
    """

    def __init__(self, limits: BatchLimits, earlier: Mapping[str, Usage], end: Callable[[Exception], object]) -> None:
        bounds = Limits(max_budget_usd=limits.max_budget_usd, max_tokens=limits.max_tokens, max_llm_calls=None)
        self._ledger = Ledger(bounds)
        self._end = end
        for model, usage in earlier.items():
            self._ledger.settle(NOTHING, "", model, 0, usage, 0)

    @property
    def usage(self) -> Usage:
        """Usage of all processes so far."""
        return self._ledger.summary().total

    def require_means(self) -> None:
        """Refuse to begin where a limit is reached already.

        Raises:
            LimitReached: Earlier processes have spent all.
        """
        self._ledger.require_means()

    async def hold(self, request: LMRequest) -> Hold:
        """Set aside what a call may cost. Where a limit is reached, the batch ends, and this waits for its end."""
        try:
            return await self._ledger.hold(request.chars, request.max_completion_tokens)
        except (LimitReached, ConfigurationError) as error:
            self._end(error)
        return await asyncio.get_running_loop().create_future()

    def settle(self, hold: Hold, request: LMRequest, call: Call) -> None:
        """Count a call that was answered. The batch ends if that has reached a limit."""
        self._ledger.settle(hold, "", call.root_model, request.depth, call.usage, len(call.response))
        try:
            self._ledger.require_means()
        except (LimitReached, ConfigurationError) as error:
            self._end(error)

    def release(self, hold: Hold) -> None:
        """Give back what a call without an answer has set aside."""
        self._ledger.release(hold)


class Metered:
    """Completes calls by the broker, within the means of a batch.

    Attributes:
        routing: Routes of the broker.
    """

    def __init__(self, spending: Spending, broker: Completing) -> None:
        self._spending = spending
        self._broker = broker
        self.routing: Routing = broker.routing

    async def complete(
        self,
        client: Client,
        request: LMRequest,
        timeout_s: float | None = None,
        *,
        session: Hashable = None,
        on_retry: OnRetry | None = None,
    ) -> Call:
        """Make one call, as `Broker.complete` does, if the batch may spend more."""
        hold = await self._spending.hold(request)
        try:
            call = await self._broker.complete(client, request, timeout_s, session=session, on_retry=on_retry)
        except BaseException:
            self._spending.release(hold)
            raise
        self._spending.settle(hold, request, call)
        return call
