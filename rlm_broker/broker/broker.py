"""The broker: one TCP port for all REPLs and callers, and the model clients behind it."""

import logging
import socket
import time
from collections import defaultdict
from collections.abc import Callable, Hashable, Sequence
from typing import TYPE_CHECKING, Any, Protocol

import msgspec

from rlm_broker.broker.client_queue import ClientQueue, OnRetry, PendingCall, Serving
from rlm_broker.broker.clients.adapters import FieldLike, adapted, original
from rlm_broker.broker.clients.base import BaseClient, Client, LMReply, LMRequest
from rlm_broker.broker.routing import ModelPolicy, Routing
from rlm_broker.broker.transport import one_shot
from rlm_broker.broker.transport.listener import Listener
from rlm_broker.concurrency.event_loop import EventLoopRef
from rlm_broker.concurrency.resource import AsyncResource
from rlm_broker.concurrency.turns import bounded_map
from rlm_broker.errors import ConfigurationError, ModelFailed, RlmBrokerError, UnknownModel, require_kind
from rlm_broker.results import Call, ChatMessage
from rlm_broker.usage import Tally, Usage, UsageSummary, totals_by
from rlm_broker.values.stats import HandlerStats

if TYPE_CHECKING:
    from rlm_broker.broker.cache import Cache

_log = logging.getLogger("rlm_broker")

CALL_TIMEOUT_S = 120.0
"""Default limit of a call in seconds. Waiting for its turn does not count."""
CANCELLED_ITSELF = "the client cancelled its own call"
"""Error of a call in a batch whose client cancelled the call's task."""
STRANGERS = "strangers"
"""Session of all one-shot requests. Together they have the share of one run of each client's places."""


class Completing(Protocol):
    """Completes calls of runs: `Broker`, or a batch with its journal."""

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


class Broker(AsyncResource):
    """Routes completions to clients, and holds the port of the REPLs. `LMHandler` adds the answers to REPLs.

    Args: See `LMHandler`.

    Attributes:
        queues: Queue before each client, by the client's identity. Handlers on one loop may share them, so that bounds
            and rates hold for all their calls.
    """

    def __init__(
        self,
        client: Client | FieldLike,
        host: str = "127.0.0.1",
        port: int = 0,
        other_backend_client: Client | FieldLike | None = None,
        batch_max_concurrent: int = 16,
        *,
        one_shot: bool = False,
        insecure_bind: bool = False,
        model_policy: ModelPolicy = "allow",
        open_client: Callable[[str], Client] | None = None,
        call_timeout_s: float = CALL_TIMEOUT_S,
        cache: "Cache | None" = None,
        event_loop: EventLoopRef | None = None,
    ) -> None:
        self.routing = Routing(client, other_backend_client, model_policy=model_policy, open_client=open_client)
        self.listener = Listener(
            host, port, one_shot=self._answer_one_shot if one_shot else None, insecure_bind=insecure_bind
        )
        self._asked_address = (host, port)
        self._batch_max_concurrent = batch_max_concurrent
        self._call_timeout_s = call_timeout_s
        self._cache = cache
        self.queues: dict[int, ClientQueue] = {}
        self._usage = defaultdict[tuple[str, int], Tally](Tally)
        self._event_loop = event_loop
        self._replaced: set[int] = set()
        """Identities of clients with a fallback in their place just now. Each was logged once."""

    # -- the field's names -------------------------------------------------------------------------------------------

    def register_client(self, model_name: str, client: Client | FieldLike) -> None:
        """Make `client` available under `model_name`.

        Example:
            ```python
            handler.register_client("judge", ScriptedClient(["good"]))
            print(handler.completion("How is it?", model="judge"))  # good
            ```
        """
        self.routing.register(model_name, client)

    def serve(self, client: Client, serving: Serving) -> None:
        """Set how `client` is called, before its first call. Without this it is called with the defaults of
        `Serving`."""
        served = adapted(client)
        self.queues[id(served)] = ClientQueue(served, serving)

    def get_client(self, model: str | None = None, depth: int = 0) -> Client:
        """Return the client for a call: a registered name decides first, then the depth.

        Raises:
            UnknownModel: No client has the name `model`; the error lists the known ones.
        """
        require_kind("model", model, str, type(None))
        return original(self.routing.pick(model, depth))

    def start(self) -> tuple[str, int]:
        """Listen in the background; return host and port. A second call returns the same."""
        self.__enter__()
        return self.address

    def stop(self) -> None:
        """Close the port. Harmless when repeated."""
        self.close()

    @property
    def default_client(self) -> Client:
        """Client for depth 0."""
        return original(self.routing.root)

    @property
    def other_backend_client(self) -> Client | None:
        """Client for depth 1 and deeper; None if the default client serves these, too."""
        return None if self.routing.sub is None else original(self.routing.sub)

    @property
    def clients(self) -> dict[str, Client]:
        """A new dict of the clients by name: the default client, the other one, and the registered ones."""
        return {name: original(client) for name, client in self.routing.by_name.items()}

    @property
    def address(self) -> tuple[str, int]:
        """Host and port in use; the arguments `host` and `port` while the port is closed."""
        return self.listener.address or self._asked_address

    @property
    def host(self) -> str:
        """Host of `address`."""
        return self.address[0]

    @property
    def port(self) -> int:
        """Port of `address`."""
        return self.address[1]

    def completion(self, prompt: str | dict[str, Any] | list[Any], model: str | None = None) -> str:
        """Ask a model, on behalf of the orchestrator's own code; return the text of the reply.

        Example:
            ```python
            print(handler.completion("Say a word."))  # an answer
            ```

        Args:
            prompt: Text, a message as a dict, or a list of messages.
            model: As for `get_client`.

        Raises:
            ModelFailed: The call failed.
            UnknownModel: No client has that name.
        """
        return self.bind_loop().run(self._completion(prompt, model))

    async def acompletion(self, prompt: str | dict[str, Any] | list[Any], model: str | None = None) -> str:
        """Do the same as `completion`, awaited."""
        return await self.bind_loop().arun(self._completion(prompt, model))

    def batch_completion(
        self,
        prompts: Sequence[str | dict[str, Any] | list[Any]],
        model: str | None = None,
        *,
        max_concurrent: int | None = None,
    ) -> list[Call]:
        """Ask a model many prompts at the same time, on behalf of the orchestrator's own code. Ctrl+C ends all calls.

        Example:
            ```python
            calls = handler.batch_completion(["Say a word.", "Say two words."], max_concurrent=2)
            print([call.response for call in calls])  # ['an answer', 'an answer']
            ```

        Args:
            prompts: Prompts, each as for `completion`.
            model: As for `get_client`.
            max_concurrent: Calls at the same time; None takes `batch_max_concurrent`. The client's own bound holds,
                too.

        Returns:
            A call for each prompt, in their order. A failed one has an empty response, and its reason in `problem`.

        Raises:
            ConfigurationError: `prompts` is not a list of prompts. No call was made.
            UnknownModel: No client has that name.
        """
        return self.bind_loop().run(self._batch_completion(prompts, model, max_concurrent))

    async def abatch_completion(
        self,
        prompts: Sequence[str | dict[str, Any] | list[Any]],
        model: str | None = None,
        *,
        max_concurrent: int | None = None,
    ) -> list[Call]:
        """Do the same as `batch_completion`, awaited. Cancelling it ends all calls."""
        return await self.bind_loop().arun(self._batch_completion(prompts, model, max_concurrent))

    async def _completion(self, prompt: one_shot.Prompt, model: str | None) -> str:
        require_kind("the prompt", prompt, str, dict, list)
        request = LMRequest(messages=one_shot.to_messages(prompt), model=model)
        return (await self.complete(self.get_client(model), request)).response

    async def _batch_completion(
        self, prompts: Sequence[one_shot.Prompt], model: str | None, max_concurrent: int | None
    ) -> list[Call]:
        require_kind("max_concurrent", max_concurrent, int, type(None))
        if max_concurrent is not None and max_concurrent < 1:
            raise ConfigurationError(f"max_concurrent must be 1 or more, not {max_concurrent}")
        requests = [LMRequest(messages, model=model) for messages in _conversations(prompts)]
        client, session = self.get_client(model), object()

        async def call(request: LMRequest) -> Call:
            started = time.monotonic()
            try:
                return await self.complete(client, request, session=session)
            except RlmBrokerError as failed:
                return Call(client.model_name, "", Usage(), time.monotonic() - started, problem=str(failed))

        calls = await bounded_map(requests, call, max_concurrent or self._batch_max_concurrent)
        return [each or Call(client.model_name, "", Usage(), 0.0, problem=CANCELLED_ITSELF) for each in calls]

    def get_usage_summary(self) -> UsageSummary:
        """Return the usage so far, by model.

        Example:
            ```python
            handler.completion("Say a word.")
            handler.get_usage_summary().total_calls  # 1
            ```
        """
        return UsageSummary(totals_by((model, used) for (model, _), used in self._usage.items()))

    def usage_by_depth(self) -> dict[int, Usage]:
        """Return the usage so far, by the depth of the calls: 0 is a root's own loop, 1 the queries of its REPL."""
        return dict(sorted(totals_by((depth, used) for (_, depth), used in self._usage.items()).items()))

    def stats(self) -> HandlerStats:
        """Return counts of connections and calls now, and the usage so far."""
        clients = tuple(queue.stats() for queue in self.queues.values())
        return HandlerStats(self.listener.connections, clients, self.get_usage_summary())

    def attach(self, connected: socket.socket) -> None:
        """Serve a connected stream socket like one from the port."""
        self.bind_loop().run(self.listener.attach(connected))

    async def aattach(self, connected: socket.socket) -> None:
        """Do the same as `attach`, awaited."""
        await self.bind_loop().arun(self.listener.attach(connected))

    # -- calls -------------------------------------------------------------------------------------------------------

    async def complete(
        self,
        client: Client,
        request: LMRequest,
        timeout_s: float | None = None,
        *,
        session: Hashable = None,
        on_retry: OnRetry | None = None,
    ) -> Call:
        """Make one call, within `timeout_s` seconds of its turn. Cancelling it ends it at the provider, too.

        A reply in the cache is taken first. Otherwise the clients are tried in order, see `handler.client_queue`.

        Args:
            session: Run of the call: sessions take turns at a client.

        Raises:
            ModelFailed: The call failed or took too long, and so did those of its fallbacks.
        """
        started = time.monotonic()
        queue = self.queues.get(id(client)) or self._queue_of(client)
        cache = self._cache
        key = None if cache is None else cache.key(queue.client, request)
        reply = None if cache is None or key is None else await cache.get(key)
        if reply is None:
            pending = PendingCall(request, timeout_s or self._call_timeout_s, session, on_retry)
            reply = await (self._through_queues(queue, pending) if queue.serving.fallbacks else queue.run(pending))
            if cache is not None and key is not None:
                await cache.put(key, reply)
        model = reply.model or queue.client.model_name
        self._usage[model, request.depth].add(reply.usage)
        requested = request.model if request.model and request.model != model else None
        taken_s = time.monotonic() - started
        return Call(model, reply.text, reply.usage, taken_s, requested, reply.problem, reply.extra)

    async def _through_queues(self, queue: ClientQueue, pending: PendingCall) -> LMReply:
        """Ask the client, then its fallbacks, until one replies. Cooling ones are asked last."""
        queues = sorted([queue, *map(self._queue_of, queue.serving.fallbacks)], key=lambda each: each.is_cooling)
        failures: list[ModelFailed] = []
        for number, each in enumerate(queues, 1):
            try:
                reply = await each.run(pending, others=len(queues) - number)
            except ModelFailed as failed:
                if failed.cause == "request":
                    raise
                failures.append(failed)
            else:
                self._note_who_answers(queue, each, failures)
                if each is queue:
                    return reply
                return msgspec.structs.replace(reply, model=reply.model or each.client.model_name)
        is_lasting = all(failed.is_lasting for failed in failures)
        raise ModelFailed("; ".join(map(str, failures)), failures[-1].cause, is_lasting=is_lasting)

    def _note_who_answers(self, queue: ClientQueue, answers: ClientQueue, failures: Sequence[ModelFailed]) -> None:
        """Log that a fallback answers, once until the client itself answers again."""
        if answers is queue:
            self._replaced.discard(id(queue.client))
        elif id(queue.client) not in self._replaced:
            self._replaced.add(id(queue.client))
            name, other = queue.client.model_name, answers.client.model_name
            why = failures[0] if failures else "its last calls failed"
            _log.warning(
                "%s answers in the place of %s; until that answers, this is not logged again: %s", other, name, why
            )

    def _queue_of(self, client: Client) -> ClientQueue:
        own = adapted(client)
        queue = self.queues.get(id(own))
        if queue is None:
            queue = self.queues[id(own)] = ClientQueue(own, Serving())
        return queue

    # -- the one-shot protocol ---------------------------------------------------------------------------------------

    async def _answer_one_shot(self, payload: bytes) -> bytes:
        try:
            request = one_shot.parse_request(payload)
            client = self._client_for_stranger(request.model, request.depth)
            if not request.is_batch:
                return one_shot.single_reply(request, await self._one(client, request, request.prompts[0]))
            outcomes = await self._batch(client, request)
            return one_shot.batch_reply(request, outcomes, client.model_name)
        except RlmBrokerError as error:
            return one_shot.error_reply(str(error))

    def _client_for_stranger(self, model: str | None, depth: int) -> BaseClient:
        """Return the client for a one-shot request. As in the field's server, an unknown name is served by depth."""
        try:
            return self.routing.pick(model, max(depth, 0))
        except UnknownModel:
            return self.routing.pick(None, max(depth, 0))

    async def _batch(self, client: BaseClient, request: one_shot.OneShotRequest) -> Sequence[Call | str]:
        async def outcome(prompt: one_shot.Prompt) -> Call | str:
            try:
                return await self._one(client, request, prompt)
            except RlmBrokerError as error:
                return str(error)

        outcomes = await bounded_map(request.prompts, outcome, self._batch_max_concurrent)
        return [each or CANCELLED_ITSELF for each in outcomes]

    async def _one(self, client: BaseClient, request: one_shot.OneShotRequest, prompt: one_shot.Prompt) -> Call:
        asked = LMRequest(one_shot.to_messages(prompt), model=request.model, depth=max(request.depth, 0))
        return await self.complete(client, asked, session=STRANGERS)

    # -- its life ----------------------------------------------------------------------------------------------------

    async def _open(self) -> None:
        await self.listener.start()

    async def _close(self) -> None:
        await self.listener.stop()


def _conversations(prompts: Sequence[one_shot.Prompt]) -> list[tuple[ChatMessage, ...]]:
    """Return the messages of each prompt.

    Raises:
        ConfigurationError: `prompts` is not a list of prompts.
    """
    if isinstance(prompts, str | bytes | dict) or not isinstance(prompts, Sequence):
        raise ConfigurationError(f"prompts must be a list of prompts, not {type(prompts).__name__}")
    conversations = []
    for number, prompt in enumerate(prompts):
        require_kind(f"prompts[{number}]", prompt, str, dict, list)
        try:
            conversations.append(one_shot.to_messages(prompt))
        except one_shot.OneShotRefused as refused:
            raise ConfigurationError(f"prompts[{number}]: {refused}") from None
    return conversations
