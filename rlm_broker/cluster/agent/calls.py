"""Calls of models that a node has completed by the orchestrator. Every call of every run on the node passes here."""

import time
from collections.abc import Hashable

from rlm_broker.broker.broker import CALL_TIMEOUT_S
from rlm_broker.broker.client_queue import OnRetry
from rlm_broker.broker.clients.base import Client, LMRequest
from rlm_broker.broker.routing import Routing
from rlm_broker.cluster.agent.exchange import Exchange
from rlm_broker.cluster.messages import Ask, Reply, ReplyText, Retried
from rlm_broker.errors import ModelFailed, UnknownModel
from rlm_broker.results import Call
from rlm_broker.usage import Usage
from sandbox_worker.wire.errors import FrameTooLarge


class RemoteCalls:
    """Completes the calls of one run by asking the orchestrator. It is a `Completing`.

    Attributes:
        routing: Routes of the run.
    """

    def __init__(self, exchange: Exchange, routing: Routing) -> None:
        self.routing = routing
        self._exchange = exchange

    async def complete(
        self,
        client: Client,
        request: LMRequest,
        timeout_s: float | None = None,
        *,
        session: Hashable = None,
        on_retry: OnRetry | None = None,
    ) -> Call:
        """Have one call made, as `Broker.complete` makes it. The orchestrator picks the client again, by its routes.

        Raises:
            ModelFailed: The call failed, or is too large to be sent.
            UnknownModel: Code may not use the model that it named.
            LinkLost: The orchestrator cannot be asked any more.
        """
        started = time.monotonic()
        exchange = self._exchange
        asked = Ask(
            exchange.run,
            exchange.number(),
            str(session) if request.id is None else request.id.run,
            tuple([(message.role, message.content) for message in request.messages]),
            timeout_s or CALL_TIMEOUT_S,
            request.model,
            request.max_completion_tokens,
            request.depth,
            request.question,
            request.is_loop,
            request.sample,
            request.id,
            request.has_own_prompt,
            request.temperature,
            request.on_text is not None,
        )
        try:
            reply = await exchange.asked(asked, Reply, _teller(request, on_retry))
        except FrameTooLarge as too_large:
            raise ModelFailed(f"the prompt cannot be sent to {client.model_name}: {too_large}", "request") from None
        if reply.failure is None:
            usage = Usage(*reply.used, reply.stored, reply.cached_tokens)
            taken_s = time.monotonic() - started
            return Call(reply.model, reply.text, usage, taken_s, reply.requested, reply.problem)
        if reply.cause == "unknown_model":
            raise UnknownModel(reply.failure)
        raise ModelFailed(reply.failure, reply.cause)


def _teller(request: LMRequest, on_retry: OnRetry | None) -> "_Teller | None":
    return None if request.on_text is None and on_retry is None else _Teller(request, on_retry)


class _Teller:
    """Tells the run of what comes before the answer to a call: pieces of it, and further attempts."""

    __slots__ = ("_on_retry", "_request")

    def __init__(self, request: LMRequest, on_retry: OnRetry | None) -> None:
        self._request = request
        self._on_retry = on_retry

    def __call__(self, message: ReplyText | Retried) -> None:
        if isinstance(message, ReplyText):
            if self._request.on_text is not None:
                self._request.on_text(message.text)
        elif self._on_retry is not None:
            self._on_retry(message.number, message.after_s, message.why)
