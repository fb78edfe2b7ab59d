"""Parts that any number of runs share: a handler, a sandbox whose REPLs connect to it or a cluster, and a recorder."""

import contextlib
import os
import secrets
from collections.abc import AsyncIterator, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from rlm_broker.clients.base import BaseClient
from rlm_broker.clients.recording import FORMAT, RecordedModels, Recorder
from rlm_broker.cluster.described import limits_spec
from rlm_broker.cluster.messages import EngineSpec
from rlm_broker.cluster.nodes import Nodes
from rlm_broker.concurrency.event_loop import EventLoopRef
from rlm_broker.errors import ConfigurationError, ReplayDiverged
from rlm_broker.handler.cache import Cache
from rlm_broker.handler.routing import Routing
from rlm_broker.limits import Limits, with_set
from rlm_broker.lm_handler import LMHandler
from rlm_broker.models.model import Given
from rlm_broker.models.models import Models
from rlm_broker.models.registry import Registry, require_priced
from rlm_broker.sandbox.packages import chosen_packages
from rlm_broker.sandbox.sandbox import SEED_BITS, Sandbox, require_seed
from rlm_broker.sandbox.workers.levels import AUTO, candidates


@dataclass(frozen=True, slots=True)
class OwnSandbox:
    """Settings of a sandbox that an `RLM` makes for itself; see `Sandbox`.

    Raises:
        ConfigurationError: The level, the seed or the environment does not exist, or the level cannot allow
            `allow_exec`.
    """

    isolation: str = AUTO
    allow_exec: bool | None = None
    seed: int | None = None
    python: str | os.PathLike[str] | None = None
    packages: Sequence[str] | None = None

    def __post_init__(self) -> None:
        candidates(self.isolation, self.allow_exec)
        require_seed(self.seed)
        chosen_packages(self.python, self.packages)


@dataclass(frozen=True, slots=True)
class RunningCluster:
    """An open cluster, and the settings of the sandboxes that its nodes open for these runs."""

    nodes: Nodes
    spec: EngineSpec


@dataclass(frozen=True, slots=True)
class Engine:
    """A listening handler, an open sandbox or cluster, and the recorder of their calls if there is one.

    Attributes:
        place: Where the REPLs of runs are.
    """

    handler: LMHandler
    place: Sandbox | RunningCluster
    recorder: Recorder | None

    @property
    def level(self) -> str:
        """The isolation level of REPLs: the level in force, or the one that nodes are asked for, such as "auto"."""
        return self.place.level if isinstance(self.place, Sandbox) else self.place.spec.isolation

    @property
    def sandbox(self) -> Sandbox:
        """The sandbox.

        Raises:
            ConfigurationError: The REPLs are on the nodes of a cluster.
        """
        if isinstance(self.place, Sandbox):
            return self.place
        raise ConfigurationError("with a cluster the sandboxes are on its nodes: this RLM has none")


class EngineParts:
    """Parts of an engine: those that the caller lends, and settings for the others.

    A lent part is used as it is. The others are made when the engine starts and closed when it ends.

    Args:
        registry: Makes the handler; None if the caller lends one.
        handler: Handler that the caller lends, or None.
        models: Settings of the cache and the recording.
        sandbox: Sandbox that the caller lends, or the settings of one to make. A lent sandbox that is closed is opened
            while the engine runs.
        limits: Limits of calls and REPLs. A field that is not set is taken from a lent sandbox, else has its default.
        cluster: Cluster whose nodes have the sandboxes; None has one here. A closed one is opened likewise.

    Attributes:
        limits: Limits that hold.

    Raises:
        ConfigurationError: The recording's seed differs from that of the lent sandbox, or a seed is given beside it; or
            one of the parts does not go with a cluster.
    """

    def __init__(
        self,
        registry: Registry | None,
        handler: LMHandler | None,
        models: Models,
        sandbox: Sandbox | OwnSandbox,
        limits: Limits | None,
        cluster: Nodes | None = None,
    ) -> None:
        if cluster is not None:
            _require_fit_for_cluster(models, sandbox)
        self.registry = registry
        self._cluster = cluster
        self._handler = handler
        self._models = models
        self._sandbox = sandbox
        lent = sandbox if isinstance(sandbox, Sandbox) else None
        given = Limits() if limits is None else limits
        self.limits = given if lent is None else with_set(lent.limits, given)
        self._seed = self._required_seed()

    @property
    def seed(self) -> int | None:
        """Seed of the sandbox; None if it has none."""
        return self._seed

    @contextlib.contextmanager
    def seeded(self, seed: int) -> Iterator[None]:
        """Give a sandbox that has no seed this one, if it is made before the context manager exits."""
        before = self._seed
        if before is None and isinstance(self._sandbox, OwnSandbox):
            self._seed = seed
        try:
            yield
        finally:
            self._seed = before

    @property
    def diverged(self) -> ReplayDiverged | None:
        """Error of the first call that the recording which is replayed has no reply to; None if there is none."""
        replay = self.registry.replay if self.registry else None
        return ReplayDiverged(replay.diverged) if replay is not None and replay.diverged else None

    @property
    def event_loop(self) -> EventLoopRef | None:
        """Event loop of the lent parts; None if none of them is bound to a loop yet."""
        parts = (self._sandbox, self._handler, self._cluster)
        lent = [part for part in parts if isinstance(part, Sandbox | LMHandler | Nodes)]
        return next((part.event_loop for part in lent if part.event_loop is not None), None)

    @contextlib.asynccontextmanager
    async def running(self, event_loop: EventLoopRef) -> AsyncIterator[Engine]:
        """Run an engine until the context manager exits.

        Raises:
            ModelFailed, UnknownModel: A preflight failed: every call would fail in the same way.
            ConfigurationError: A file cannot be used, or a limit in US dollars needs a price that is not known.
            IsolationUnavailable, SandboxFailed: No sandbox can be started.
        """
        async with contextlib.AsyncExitStack() as own:
            handler = self._handler or await self._own_handler(own, event_loop)
            recorder = None
            if self._models.record is not None:
                for client in handler.routing.clients:  # context windows are known only once clients are loaded
                    await client.loaded()
                recorded = recorded_models(handler, self._seed)
                recorder = own.enter_context(contextlib.closing(Recorder(Path(self._models.record), recorded)))
            yield Engine(handler, await self._place(own, handler, event_loop), recorder)

    async def routing(self, engine: Engine, model: Given | None, sub_model: Given | None, limits: Limits) -> Routing:
        """Return the routes of one run: those of the handler, or with other models if the run was given any.

        Raises:
            ConfigurationError: The handler is lent, and a model is not the name of one of its own; or a limit in US
                dollars is set, and the price of a model is not known.
        """
        routing = engine.handler.routing
        if (model is not None or sub_model is not None) and self.registry is not None:
            routing = await self.registry.routing_for(engine.handler, model, sub_model, limits)
        elif model is not None or sub_model is not None:
            clients: list[BaseClient | None] = []
            for name in (model, sub_model):
                if not isinstance(name, str | None):
                    raise ConfigurationError("the handler brings its own models: give the name of one of them")
                clients.append(None if name is None else routing.pick(name, 0))
            routing = routing.instead(*clients)
        if limits.max_budget_usd is not None:
            await require_priced("max_budget_usd", filter(None, (routing.root, routing.sub)))
        return routing

    async def _own_handler(self, own: contextlib.AsyncExitStack, event_loop: EventLoopRef) -> LMHandler:
        assert self.registry is not None
        cache = self._models.cache
        if cache is not None and not isinstance(cache, Cache):
            cache = own.enter_context(contextlib.closing(Cache(Path(cache))))
        return await own.enter_async_context(self.registry.opened(self.limits, cache, event_loop))

    async def _place(
        self, own: contextlib.AsyncExitStack, handler: LMHandler, event_loop: EventLoopRef
    ) -> Sandbox | RunningCluster:
        """Open where the REPLs are."""
        if isinstance(self._sandbox, Sandbox):
            await own.enter_async_context(self._sandbox.borrowed())
            return self._sandbox
        if self._cluster is None:
            return await own.enter_async_context(self._own_sandbox(self._sandbox, handler, event_loop))
        await own.enter_async_context(self._cluster.borrowed())
        said = self._sandbox
        python = None if said.python is None else os.fspath(said.python)
        packages = None if said.packages is None else tuple(said.packages)
        limits = limits_spec(self.limits)
        spec = EngineSpec(limits, said.isolation, said.allow_exec, self._seed, python, packages)
        return RunningCluster(self._cluster, spec)

    def _own_sandbox(self, said: OwnSandbox, handler: LMHandler, event_loop: EventLoopRef) -> Sandbox:
        return Sandbox(
            self.limits,
            said.isolation,
            allow_exec=said.allow_exec,
            seed=self._seed,
            python=said.python,
            packages=said.packages,
            listener=handler.listener,
            event_loop=event_loop,
        )

    def _required_seed(self) -> int | None:
        """Return the sandbox's seed: that of a replayed recording, else the given one, else one drawn to record."""
        replayed = self.registry.replay if self.registry else None
        if replayed is None:
            is_repeated = self._models.record or self._cluster is not None  # a lost run is repeated elsewhere
            is_drawn = self._sandbox.seed is None and isinstance(self._sandbox, OwnSandbox) and is_repeated
            return secrets.randbits(SEED_BITS) if is_drawn else self._sandbox.seed
        seed = replayed.models.seed
        if isinstance(self._sandbox, OwnSandbox) and self._sandbox.seed is not None:
            raise ConfigurationError("seed must be None for a replay: the recording brings its own seed")
        if isinstance(self._sandbox, Sandbox) and self._sandbox.seed != seed:
            raise ConfigurationError(
                f"the recording was made with seed={seed}, but the sandbox has {self._sandbox.seed}: give it that seed"
            )
        return seed


def _require_fit_for_cluster(models: Models, sandbox: Sandbox | OwnSandbox) -> None:
    """Refuse what cannot be had on the nodes of a cluster.

    Raises:
        ConfigurationError: A part cannot.
    """
    if isinstance(sandbox, Sandbox):
        raise ConfigurationError(
            "a cluster opens sandboxes on its nodes: give RLM the level and its options (isolation=, allow_exec=, "
            "seed=, python=, packages=) in place of a Sandbox"
        )
    if models.record is not None or models.replay is not None:
        raise ConfigurationError("record and replay are for runs on this machine: leave them out, or the cluster")


def recorded_models(handler: LMHandler, seed: int | None) -> RecordedModels:
    """Return the first line of a recording: names that a replay needs, the windows of its models, and the seed."""
    root, sub = handler.get_client(depth=0), handler.get_client(depth=1)
    routing = handler.routing
    routes = [(route.to, route.match, route.depths) for route in routing.routes]
    own_sub = None if sub is root else sub.model_name
    windows = {client.model_name: client.context_tokens for client in routing.clients if client.context_tokens}
    names = list(routing.names)
    return RecordedModels(FORMAT, root.model_name, own_sub, names, routes, routing.policy, seed, windows)
