"""The means of a whole batch: each call is held against its limits before it is sent, and counted after it.

A call that may not be sent waits, and never fails: the batch is about to end, and an error would become the result of
an item that a further process could answer.
"""

import asyncio
from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass, fields

from rlm_broker.broker.broker import Completing
from rlm_broker.broker.client_queue import OnRetry
from rlm_broker.broker.clients.base import Client, LMRequest
from rlm_broker.broker.routing import Routing
from rlm_broker.errors import ConfigurationError, LimitReached, require_kind
from rlm_broker.limits import Limits
from rlm_broker.results import Call
from rlm_broker.run.ledger import Hold, Ledger
from rlm_broker.usage import Tally, Usage


@dataclass(frozen=True, slots=True)
class BatchLimits:
    """Limits of a whole batch, over all processes that have worked on it. None means no limit.

    A limit that is reached ends the batch with `LimitReached`. Calls that are under way then have 20 seconds to end,
    and their answers are kept in the journal. Items that are not finished can be gone on with, under a higher limit.

    Attributes:
        max_budget_usd: Maximum cost in US dollars. The price of each model must be known.
        max_tokens: Maximum tokens, input and output.
        timeout_s: Seconds that processes have worked on it, all together.

    Raises:
        ConfigurationError: A limit is not a number above 0.
    """

    max_budget_usd: float | None = None
    max_tokens: int | None = None
    timeout_s: float | None = None

    def __post_init__(self) -> None:
        for each in fields(self):
            value = getattr(self, each.name)
            kinds = (int,) if each.name == "max_tokens" else (int, float)
            require_kind(f"the limit {each.name} of a batch", value, *kinds, type(None))
            if value is not None and not 0 < value < float("inf"):
                raise ConfigurationError(f"the limit {each.name} of a batch must be above 0, not {value!r}")


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
        self._spent = Tally()
        self._end = end
        self._is_ended = False
        self._sent = 0
        self._idle = asyncio.Event()
        self._idle.set()
        for model, usage in earlier.items():
            self._spent.add(usage)
            self._ledger.add_earlier(model, usage)

    @property
    def usage(self) -> Usage:
        """Usage of all processes so far. It may be read from any thread."""
        return self._spent.usage

    def require_means(self) -> None:
        """Refuse to begin where a limit is reached already.

        Raises:
            LimitReached: Earlier processes have spent all.
        """
        self._ledger.require_means()

    def stop(self) -> None:
        """Send no further call. Those that were sent go on."""
        self._is_ended = True

    def hurry(self) -> None:
        """Wait no longer for the calls that were sent."""
        self._idle.set()

    async def drained(self, timeout_s: float) -> None:
        """Wait until the calls that were sent have ended, but no longer than this."""
        try:
            async with asyncio.timeout(timeout_s):
                await self._idle.wait()
        except TimeoutError:
            return

    async def begin(self, request: LMRequest) -> Hold:
        """Set aside what a call may cost, before it is sent. If it may not be sent, wait for the end of the batch."""
        try:
            hold = await self._ledger.hold(request.chars, request.max_completion_tokens)
        except (LimitReached, ConfigurationError) as error:
            self._end(error)
            await asyncio.Event().wait()
            raise
        if self._is_ended:
            self._ledger.release(hold)
            await asyncio.Event().wait()
        self._sent += 1
        self._idle.clear()
        return hold

    def end(self, hold: Hold, request: LMRequest, call: Call | None) -> None:
        """Count a call that has ended; None is one that was not answered.

        The batch does not end here if a limit is reached, but with the next call: this one may be the last of its item.
        """
        self._sent -= 1
        if not self._sent:
            self._idle.set()
        if call is None:
            self._ledger.release(hold)
            return
        self._spent.add(call.usage)
        self._ledger.settle(hold, "", call.root_model, request.depth, call.usage, len(call.response))


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
        hold = await self._spending.begin(request)
        call: Call | None = None
        try:
            call = await self._broker.complete(client, request, timeout_s, session=session, on_retry=on_retry)
        finally:
            self._spending.end(hold, request, call)
        return call
