"""The interface by which a run has its calls completed: the broker itself, or a part that stands between both."""

from collections.abc import Hashable
from typing import Protocol

from rlm_broker.broker.client_queue import OnRetry
from rlm_broker.broker.clients.base import Client, LMRequest
from rlm_broker.broker.routing import Routing
from rlm_broker.results import Call


class Completing(Protocol):
    """Completes calls of runs. `Broker` does so, and what answers a call from a journal or asks another machine."""

    @property
    def routing(self) -> Routing:
        """The routes from a model's name and a depth to a client."""
        ...

    async def complete(
        self,
        client: Client,
        request: LMRequest,
        timeout_s: float | None = None,
        *,
        session: Hashable = None,
        on_retry: OnRetry | None = None,
    ) -> Call:
        """Make one call; see `Broker.complete`."""
        ...
