"""What any number of runs share: a handler, a sandbox whose REPLs connect to it, and a recorder of calls."""

import contextlib
import os
import secrets
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from rlm_broker.clients.recording import FORMAT, RecordedModels, Recorder
from rlm_broker.concurrency.event_loop import EventLoopRef
from rlm_broker.errors import ConfigurationError
from rlm_broker.handler.cache import Cache
from rlm_broker.limits import Limits, with_set
from rlm_broker.lm_handler import LMHandler
from rlm_broker.models.models import Models
from rlm_broker.models.registry import Registry
from rlm_broker.sandbox.levels.level import AUTO, candidates
from rlm_broker.sandbox.packages.packages import chosen_packages
from rlm_broker.sandbox.sandbox import SEED_BITS, Sandbox, require_seed


@dataclass(frozen=True, slots=True)
class OwnSandbox:
    """What is said of a sandbox that an `RLM` makes for itself; see `Sandbox`.

    Raises:
        ConfigurationError: There is no such level, seed or environment, or the level cannot allow what is wanted.
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
class Engine:
    """A handler that listens, a sandbox that is open, and what records their calls."""

    handler: LMHandler
    sandbox: Sandbox
    recorder: Recorder | None


class EngineParts:
    """What an engine is made of: parts that are lent stay their owner's, all others are made and ended with it.

    Args:
        registry: Makes the handler. None where one is lent.
        handler: The handler that is lent.
        models: What is cached and recorded.
        sandbox: A sandbox that is lent, or what is said of one to be made. One that is lent closed is opened for as
            long as it is used.
        limits: Bounds of calls and REPLs. What is not set is that of a sandbox that is lent, or the default.

    Attributes:
        limits: The bounds that hold.

    Raises:
        ConfigurationError: A recording or a seed does not go with a sandbox that is lent.
    """

    def __init__(
        self,
        registry: Registry | None,
        handler: LMHandler | None,
        models: Models,
        sandbox: Sandbox | OwnSandbox,
        limits: Limits | None,
    ) -> None:
        self.registry = registry
        self._handler = handler
        self._models = models
        self._sandbox = sandbox
        lent = sandbox if isinstance(sandbox, Sandbox) else None
        given = Limits() if limits is None else limits
        self.limits = given if lent is None else with_set(lent.limits, given)
        self._seed = self._required_seed()

    @property
    def event_loop(self) -> EventLoopRef | None:
        """Where the parts that are lent live; None where that is not decided."""
        lent = [part for part in (self._sandbox, self._handler) if isinstance(part, Sandbox | LMHandler)]
        return next((part.event_loop for part in lent if part.event_loop is not None), None)

    @contextlib.asynccontextmanager
    async def running(self, event_loop: EventLoopRef) -> AsyncIterator[Engine]:
        """An engine, until this is left.

        Raises:
            ModelFailed, UnknownModel: What every call would raise.
            ConfigurationError: A file cannot be used, or a budget in dollars cannot be kept.
            IsolationUnavailable, SandboxFailed: There is no sandbox to be had.
        """
        async with contextlib.AsyncExitStack() as own:
            handler = self._handler or await self._own_handler(own, event_loop)
            recorder = None
            if self._models.record is not None:
                for client in handler.routing.clients:  # a window is known then, if it ever is
                    await client.loaded()
                recorded = recorded_models(handler, self._seed)
                recorder = own.enter_context(contextlib.closing(Recorder(Path(self._models.record), recorded)))
            if isinstance(self._sandbox, Sandbox):
                sandbox = self._sandbox
                await own.enter_async_context(sandbox.borrowed())
            else:
                sandbox = await own.enter_async_context(self._own_sandbox(self._sandbox, handler, event_loop))
            yield Engine(handler, sandbox, recorder)

    async def _own_handler(self, own: contextlib.AsyncExitStack, event_loop: EventLoopRef) -> LMHandler:
        assert self.registry is not None
        cache = self._models.cache
        if cache is not None and not isinstance(cache, Cache):
            cache = own.enter_context(contextlib.closing(Cache(Path(cache))))
        return await own.enter_async_context(self.registry.opened(self.limits, cache, event_loop))

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
        """Return the seed of the sandbox: a recording that is replayed brings one, and a new one needs one."""
        replayed = self.registry.replay if self.registry else None
        if replayed is None:
            is_drawn = self._sandbox.seed is None and isinstance(self._sandbox, OwnSandbox) and self._models.record
            return secrets.randbits(SEED_BITS) if is_drawn else self._sandbox.seed
        seed = replayed.models.seed
        if isinstance(self._sandbox, OwnSandbox) and self._sandbox.seed is not None:
            raise ConfigurationError("seed must be None here: the seed of the recording holds")
        if isinstance(self._sandbox, Sandbox) and self._sandbox.seed != seed:
            raise ConfigurationError(
                f"the recording was made with seed={seed}, and the sandbox has {self._sandbox.seed}"
            )
        return seed


def recorded_models(handler: LMHandler, seed: int | None) -> RecordedModels:
    """Return what a recording says of the models, whose names a replay has to have, and of the sandbox."""
    root, sub = handler.get_client(depth=0), handler.get_client(depth=1)
    routing = handler.routing
    routes = [(route.to, route.match, route.depths) for route in routing.routes]
    own_sub = None if sub is root else sub.model_name
    windows = {client.model_name: client.context_tokens for client in routing.clients if client.context_tokens}
    names = list(routing.names)
    return RecordedModels(FORMAT, root.model_name, own_sub, names, routes, routing.policy, seed, windows)
