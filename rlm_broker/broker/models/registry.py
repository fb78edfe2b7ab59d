"""The clients of one `RLM`, made from its settings, and the handlers that call them."""

import asyncio
import contextlib
import functools
import weakref
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterable
from typing import TYPE_CHECKING, Generic, TypeVar

from rlm_broker.broker.broker import Broker
from rlm_broker.broker.client_queue import ClientQueue, Serving
from rlm_broker.broker.clients.adapters import client_for, client_of
from rlm_broker.broker.clients.base import BaseClient, LMReply, LMRequest
from rlm_broker.broker.models.model import Given, Model
from rlm_broker.broker.models.models import FilePath, Models
from rlm_broker.broker.routing import ModelPolicy, Route, Routing
from rlm_broker.concurrency.deadline import to_its_end
from rlm_broker.concurrency.event_loop import EventLoopRef
from rlm_broker.errors import ConfigurationError, ModelFailed, UnknownModel
from rlm_broker.limits import Limits
from rlm_broker.values.validation import did_you_mean

if TYPE_CHECKING:
    from rlm_broker.broker.cache import Cache
    from rlm_broker.broker.clients.recording import Recording

B = TypeVar("B", bound=Broker)


class Registry(Generic[B]):
    """Clients of one `RLM`, and the source of the handlers that call them.

    Args:
        model: Root model. None is "offline".
        sub_model: Model for queries of REPLs. None is the root model.
        models: Further models and rules. A recording to replay brings its own models and routes.
        kind: Class of the handlers.
        lists: Whether the models are only listed: a model without its key is then accepted.

    Attributes:
        replay: Recording whose replies are used, or None.

    Raises:
        ConfigurationError: A model, key, route or policy cannot be used.
    """

    def __init__(
        self, model: Given | None, sub_model: Given | None, models: Models, kind: type[B], *, lists: bool = False
    ) -> None:
        self._kind = kind
        self.replay = None if models.replay is None else _recording(models.replay)
        self._lists = lists
        self._policy: ModelPolicy = models.policy
        self._made: dict[int, tuple[BaseClient, Model]] = {}
        self._fallbacks: dict[int, tuple[BaseClient, ...]] = {}
        self._opened: dict[str, BaseClient] = {}
        self._queues: weakref.WeakKeyDictionary[asyncio.AbstractEventLoop, dict[int, ClientQueue]]
        self._queues = weakref.WeakKeyDictionary()
        self._users = Counter[int]()
        if self.replay is None:
            self._routes = tuple(models.routes)
            self._open: Callable[[str], BaseClient] = client_for
            self.named = {name: self._client_or_why_not(given, name) for name, given in models.named.items()}
            self.root = self._known("offline" if model is None else model)
            self.sub = None if sub_model is None else self._known(sub_model)
            for client, described in list(self._made.values()):
                self._fallbacks[id(client)] = tuple(map(self._known, described.fallbacks))
        else:
            from rlm_broker.broker.clients.recording import RecordedClient

            recorded = self.replay.models
            self._policy = recorded.policy
            self._routes = tuple(Route(*route) for route in recorded.routes)
            self._open = functools.partial(RecordedClient, self.replay)
            self.named = {name: self._open(name) for name in recorded.others}
            self.root = self._open(recorded.root)
            self.sub = None if recorded.sub is None else self._open(recorded.sub)
        self.handler(Limits())  # raises now if a route is wrong

    def handler(self, limits: Limits, cache: "Cache | None" = None, event_loop: EventLoopRef | None = None) -> B:
        """Return a new handler that calls the clients."""
        handler = self._kind(
            self.root,
            other_backend_client=self.sub,
            model_policy=self._policy,
            open_client=self._open_once,
            call_timeout_s=limits.call_timeout_s,
            cache=cache,
            event_loop=event_loop,
        )
        for name, client in self.named.items():
            handler.register_client(name, client)
        for route in self._routes:
            handler.routing.add(route)
        return handler

    def described(self, client: BaseClient) -> Model | None:
        """Return how the user has described the model of a client; None for a client of the user's own."""
        made = self._made.get(id(client))
        return None if made is None else made[1]

    @contextlib.asynccontextmanager
    async def opened(self, limits: Limits, cache: "Cache | None", event_loop: EventLoopRef) -> AsyncIterator[B]:
        """Open a handler, after a preflight of its clients. Bounds and rates hold for all open handlers together.

        Raises:
            ModelFailed, UnknownModel: A preflight failed: every call would fail in the same way.
            ConfigurationError: A limit in US dollars is set, and the price of a model is not known.
        """
        loop = asyncio.get_running_loop()
        self._users[id(loop)] += 1
        try:
            await self._preflight(limits, self.root, self.sub)
            handler = self.handler(limits, cache, event_loop)
            handler.queues = self._queues.setdefault(loop, {})
            self._serve_with(handler)
            async with handler:
                yield handler
        finally:
            self._users[id(loop)] -= 1
            if self._users[id(loop)] == 0:
                await to_its_end(self._close_clients)

    async def _close_clients(self) -> None:
        """Close the clients that are the registry's own. A client of the user stays open."""
        for client in [*(made for made, _ in self._made.values()), *self._opened.values()]:
            await client.aclose()

    async def routing_for(
        self, handler: Broker, model: Given | None, sub_model: Given | None, limits: Limits
    ) -> Routing:
        """Return the routing of one run whose own models replace the root and the sub-model.

        Raises:
            ConfigurationError, ModelFailed, UnknownModel: As for the models of the `RLM`.
        """
        if self.replay is not None:
            raise ConfigurationError("give either models or a recording to replay: it brings its own models")
        root, sub = (None if given is None else self._of_a_run(given) for given in (model, sub_model))
        await self._preflight(limits, root, sub)
        self._serve_with(handler)
        return handler.routing.instead(root, sub)

    def _serve_with(self, handler: Broker) -> None:
        for identity, (client, described) in self._made.items():
            if identity not in handler.queues:
                if identity not in self._fallbacks:
                    self._fallbacks[identity] = tuple(map(self._known, described.fallbacks))
                handler.serve(client, _serving(described, self._fallbacks[identity]))

    async def _preflight(self, limits: Limits, *models: BaseClient | None) -> None:
        own = [client for client in models if client is not None]  # a run need not call the named ones
        every = [*own, *(fallback for client in own for fallback in self._fallbacks.get(id(client), ()))]
        clients = {id(client): client for client in every}.values()
        await asyncio.gather(*(client.preflight() for client in clients))
        if limits.max_budget_usd is not None:
            await require_priced("max_budget_usd", clients)

    def _open_once(self, name: str) -> BaseClient:
        if name not in self._opened:
            self._opened[name] = self._open(name)
        return self._opened[name]

    def _client_or_why_not(self, given: Given, name: str = "") -> BaseClient:
        """Return the client of a model; for an unusable one, a placeholder with the error: a run may never call it.

        Raises:
            UnknownModel: It has no name among the models, and is unknown.
        """
        try:
            return self._client(given, name)
        except ConfigurationError as error:
            own = given.name if isinstance(given, Model) else str(given)
            if isinstance(error, UnknownModel) and not name:
                raise UnknownModel(f"{error}{did_you_mean(own, self.named)}") from None
            return _Unusable(name or own, error)

    def _known(self, given: Given) -> BaseClient:
        """Return the client of a model or of one of the names."""
        is_named = isinstance(given, str) and given in self.named
        client = self.named[str(given)] if is_named else self._client_or_why_not(given)
        if client.why_unusable is not None and not self._lists:
            raise client.why_unusable
        return client

    def _of_a_run(self, given: Given) -> BaseClient:
        """Return the client of a run's own model. Equal descriptions share one client, so that its rates hold."""
        if isinstance(given, str) and given and given not in self.named:
            given = Model(name=given)
        for client, described in self._made.values():
            if isinstance(given, Model) and described == given:
                return client
        return self._known(given)

    def _client(self, given: Given, name: str) -> BaseClient:
        if isinstance(given, str):
            if not given:
                raise ConfigurationError("the model's name is empty: give a name, or leave the argument out")
            given = Model(name=given)
        if isinstance(given, Model):
            model = given if given.name else given.replace(name=name)
            client = model.client()
            self._made[id(client)] = client, model
        else:
            client = client_of(given)
        if not self._lists:
            client.start_loading()  # takes seconds, while the context is read and the sandbox starts
        return client


def _recording(path: FilePath) -> "Recording":
    from rlm_broker.broker.clients.recording import Recording

    return Recording(path)


class _Unusable(BaseClient):
    """Placeholder for a model that cannot be called."""

    def __init__(self, name: str, why: ConfigurationError) -> None:
        self.model_name = name
        self.why_unusable = why

    async def complete(self, request: LMRequest) -> LMReply:
        """Raise `ModelFailed` with the reason."""
        del request
        raise ModelFailed(str(self.why_unusable))


def _serving(model: Model, fallbacks: tuple[BaseClient, ...]) -> Serving:
    return Serving(
        max_concurrent=model.max_concurrent,
        requests_per_minute=model.requests_per_minute,
        tokens_per_minute=model.tokens_per_minute,
        max_retries=model.max_retries,
        attempt_timeout_s=model.attempt_timeout_s,
        fallbacks=fallbacks,
        cooldown_s=model.cooldown_s,
    )


async def require_priced(limit: str, clients: Iterable[BaseClient]) -> None:
    """Refuse a limit in US dollars if the price of a client is not known.

    Args:
        limit: Name of the limit.
        clients: Clients that may be called.

    Raises:
        ConfigurationError: There is such a client.
    """
    for client in clients:
        await client.loaded()
        if client.is_priced is False:
            raise ConfigurationError(
                f"{limit} cannot be kept: the price of model {client.model_name!r} is not known; give its "
                "usd_per_million_tokens, or bound max_tokens or max_llm_calls instead"
            )
