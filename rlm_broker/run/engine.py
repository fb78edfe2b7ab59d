"""The engine of runs: their shared parts, and the one way to start one.

Theory of operation. `Engine.begin` makes the job of a run for `RLM`, batches and servers. The job stores the context,
takes the parts of the open engine or opens parts for itself, and composes the root run: its ledger, its calls, its
tree, its loop. Children are composed of the same parts (`queries.open_run`).
"""

import contextlib
import dataclasses
import logging
import os
import secrets
import time
from collections.abc import AsyncIterator, Iterator
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from msgspec import Struct

from rlm_broker.broker.clients.base import BaseClient
from rlm_broker.broker.models.models import Models
from rlm_broker.broker.models.registry import Registry, require_priced
from rlm_broker.broker.routing import Routing
from rlm_broker.concurrency.deadline import Late, StopRequested
from rlm_broker.concurrency.event_loop import EventLoopRef
from rlm_broker.concurrency.resource import AsyncResource
from rlm_broker.concurrency.threads import in_thread
from rlm_broker.context.stored_context import StoredContext, beginning
from rlm_broker.errors import ConfigurationError, LimitReached, ReplayDiverged, SandboxFailed
from rlm_broker.events.event import RunStarted, TreeEvents
from rlm_broker.limits import Limits, with_set
from rlm_broker.results import Completion
from rlm_broker.run.branches import branches_of
from rlm_broker.run.calls import Caller, TreeCalls
from rlm_broker.run.ledger import Ledger
from rlm_broker.run.lm_handler import LMHandler
from rlm_broker.run.persistent_repl import PersistentRepl
from rlm_broker.run.queries import open_run
from rlm_broker.run.request import RunRequest, stored
from rlm_broker.run.run import Run, RunJob
from rlm_broker.run.runner import Runner
from rlm_broker.run.tree import Tree
from rlm_broker.sandbox.sandbox import SEED_BITS, Sandbox, place, seeded
from rlm_broker.sandbox.workers.levels import AUTO, IsolationName, candidates
from rlm_broker.version import __version__
from rlm_broker.watch.board import BOARD, start_if_wanted

if TYPE_CHECKING:
    from rlm_broker.broker.clients.recording import RecordedModels, Recorder, Recording

_log = logging.getLogger("rlm_broker")

TASK_CHARS = 2_000
"""Characters of a context with the task in it, in place of a question in the first event of a run."""
ROOT_RUN = "1"
"""Name of the root run in its tree; its children are "1.1", "1.2" and so on."""


class EngineParts(Struct, frozen=True):
    """The open parts of an engine: a listening handler, a sandbox, a recorder, and the recording of a replay."""

    handler: LMHandler
    sandbox: Sandbox
    recorder: "Recorder | None"
    replay: "Recording | None"


class Engine(AsyncResource):
    """Starts runs, and has their shared parts while it is open: a handler, a sandbox, a recorder.

    A lent part is used as it is. The others are made when the engine is opened, and closed with it. A run on a closed
    engine has parts of its own.

    Args:
        source: Makes the handler; or a lent handler.
        models: Settings of the cache and the recording.
        sandbox: Level of a sandbox to make; or a lent one, opened while it is used.
        limits: Limits of calls and REPLs. An unset field is taken from a lent sandbox, else has its default.
        keeps_repl: Whether one REPL serves all runs, one after the other.

    Attributes:
        registry: The source of the handler; None with a lent one.
        limits: The effective limits.

    Raises:
        ConfigurationError: The recording's seed differs from the lent sandbox's.
    """

    def __init__(
        self,
        source: Registry[LMHandler] | LMHandler,
        models: Models,
        sandbox: Sandbox | IsolationName | None = None,
        limits: Limits | None = None,
        *,
        keeps_repl: bool = False,
    ) -> None:
        self.registry = source if isinstance(source, Registry) else None
        self.keeps_repl = keeps_repl
        self._lent_handler = source if isinstance(source, LMHandler) else None
        self._models = models
        self._level: IsolationName = sandbox if isinstance(sandbox, str) else AUTO
        self._sandbox = sandbox if isinstance(sandbox, Sandbox) else None
        candidates(self._level, None)
        given = Limits() if limits is None else limits
        self.limits = given if self._sandbox is None else with_set(self._sandbox.limits, given)
        self._seed = self._required_seed()
        self._open_parts: EngineParts | None = None
        self._repl: PersistentRepl | None = None
        self._jobs: set[RunJob] = set()
        self._keeping = contextlib.AsyncExitStack()

    # -- its parts ---------------------------------------------------------------------------------------------------

    @property
    def handler(self) -> LMHandler:
        """The handler of the open engine. A closed one raises `SandboxFailed`."""
        return self._opened.handler

    @property
    def sandbox(self) -> Sandbox:
        """The sandbox of the open engine. A closed one raises `SandboxFailed`."""
        return self._opened.sandbox

    @property
    def level(self) -> str:
        """Isolation level of the REPLs of the open engine."""
        return self.sandbox.level

    @property
    def seed(self) -> int | None:
        """Seed of the sandbox; None if it has none."""
        return self._seed

    @contextlib.contextmanager
    def seeded(self, seed: int | None) -> Iterator[None]:
        """Give the sandbox this seed, or a drawn one, if it has none and is not open yet."""
        before = self._seed
        if before is None and (self._sandbox is None or not self._sandbox.is_open):
            self._seed = secrets.randbits(SEED_BITS) if seed is None else seed
        try:
            yield
        finally:
            self._seed = before

    async def require_priced(self, limit: str) -> None:
        """Refuse a limit in US dollars if the price of a model is not known.

        Raises:
            ConfigurationError: There is such a model.
        """
        await require_priced(limit, self.handler.routing.clients)

    @property
    def run_loop(self) -> EventLoopRef | None:
        """Event loop of the open engine, or of lent parts; None before one of them is bound to a loop."""
        parts = (self, self._sandbox, self._lent_handler)
        return next((part.event_loop for part in parts if part is not None and part.event_loop is not None), None)

    # -- its runs ----------------------------------------------------------------------------------------------------

    def start(self, request: RunRequest, *, is_followed: bool = False, outlives_caller: bool = False) -> Run[Any]:
        """Start a run on the event loop of the engine, else on the caller's, else on the background loop.

        Args:
            request: The run.
            is_followed: Whether its events are kept for `Run.events`.
            outlives_caller: Whether it is on the background loop in place of the caller's. A cell of a notebook has a
                running loop, and the next cell may wait for the run in a plain call.
        """
        own = EventLoopRef.background if outlives_caller else EventLoopRef.here_or_background
        loop = self.run_loop or own()
        job = self.begin(request, loop, is_followed=is_followed)
        job.start()
        return job.handle

    def begin(self, request: RunRequest, event_loop: EventLoopRef, *, is_followed: bool = False) -> RunJob:
        """Return the job of a run, to be started."""
        work = lambda job: self._answer(request, job)  # noqa: E731
        branches = partial(branches_of, self, request)
        job = RunJob(event_loop, work, branches, is_followed=start_if_wanted() or is_followed)
        BOARD.add(job, request.question)
        return job

    def require_resumable(self) -> None:
        """Raise `ConfigurationError` if no run of this engine can go on from a trace."""
        if self.keeps_repl:
            raise ConfigurationError("a persistent RLM cannot go on from a trace: make another RLM for it")
        self._refuse_recording("go on from a trace")

    def require_branching(self, request: RunRequest) -> None:
        """Raise `ConfigurationError` for a run that cannot have branches."""
        self._refuse_recording("have branches")
        if self.keeps_repl or request.repl is not None:
            raise ConfigurationError("a run in a persistent REPL has no branches, since it has no REPL of its own")
        if not request.limits.max_depth:
            raise ConfigurationError("a run without a REPL (max_depth = 0) has no branches, since it has no turns")

    def _refuse_recording(self, what: str) -> None:
        if self._models.record is not None or (self.registry is not None and self.registry.replay is not None):
            raise ConfigurationError(f"a run that is recorded or replayed cannot {what}: a recording has whole runs")

    async def _answer(self, request: RunRequest, job: RunJob) -> Completion:
        if self.keeps_repl and self._open_parts is None:
            raise ConfigurationError("a persistent RLM keeps its REPL within `with RLM(...) as rlm:`: call it there")
        if self.keeps_repl and self._jobs:
            raise ConfigurationError("a persistent RLM answers one question at a time: wait for the run before")
        self._jobs.add(job)
        try:
            async with contextlib.AsyncExitStack() as own:
                if request.place is not None:
                    await own.enter_async_context(request.place)
                context, began = request.context, time.monotonic()
                if not isinstance(context, StoredContext):
                    context = own.enter_context(await _stored_in_time(request, job))
                    if request.warns and context.info.skipped:
                        _log.warning("the context has not all of what was given; %s", "; ".join(context.info.remarks()))
                if request.earlier is not None:
                    request.earlier.require_context(context.info)
                spent_s = time.monotonic() - began  # the opening of parts does not count
                parts = self._open_parts
                if parts is None:
                    parts = await own.enter_async_context(self._running())
                routing = await self._routing(parts, request)
                began = time.monotonic() - spent_s
                root = root_run(request, job, context, routing, parts, request.repl or self._repl, began)
                completion = await job.begin(root).run(context)
        finally:
            self._jobs.discard(job)
        if (diverged := self._diverged) is not None:  # raised again: model code may have caught it and answered
            job.hand_to(diverged)
            raise diverged
        return dataclasses.replace(
            completion, prompt=request.prompt, root_prompt=request.question, context=context.info
        )

    # -- its life ----------------------------------------------------------------------------------------------------

    @property
    def _opened(self) -> EngineParts:
        if self._open_parts is None:
            raise SandboxFailed("the RLM is not open: use it as `with RLM(...) as rlm:`")
        return self._open_parts

    async def _open(self) -> None:
        self._open_parts = await self._keeping.enter_async_context(self._running())
        if self.keeps_repl:
            self._repl = await self._keeping.enter_async_context(PersistentRepl(self.sandbox, self.limits))

    async def _close(self) -> None:
        jobs = list(self._jobs)  # they use the parts
        for job in jobs:
            job.cancel()
        for job in jobs:
            await job.at_end()
        self._open_parts = self._repl = None
        await self._keeping.aclose()

    @contextlib.asynccontextmanager
    async def _running(self) -> AsyncIterator[EngineParts]:
        """Open the parts, until the context manager exits.

        Raises:
            ModelFailed, UnknownModel: A preflight failed: every call would fail in the same way.
            ConfigurationError: A file cannot be used, or a limit in US dollars needs a price that is not known.
            IsolationUnavailable, SandboxFailed: No sandbox can be started.
        """
        event_loop = EventLoopRef.here()
        async with contextlib.AsyncExitStack() as own:
            handler = self._lent_handler or await self._own_handler(own, event_loop)
            recorder = None
            if self._models.record is not None:
                from rlm_broker.broker.clients.recording import Recorder

                for client in handler.routing.clients:  # context windows are known only once clients are loaded
                    await client.loaded()
                recorded = recorded_models(handler, self._seed)
                recorder = own.enter_context(contextlib.closing(Recorder(Path(self._models.record), recorded)))
            sandbox = self._sandbox
            if sandbox is None:
                made = Sandbox(self.limits, self._level, seed=self._seed)
                sandbox = await own.enter_async_context(place(made, event_loop, handler.listener))
            else:
                with seeded(sandbox, self._seed):
                    await own.enter_async_context(sandbox.borrowed())
            yield EngineParts(handler, sandbox, recorder, self.registry.replay if self.registry else None)

    async def _own_handler(self, own: contextlib.AsyncExitStack, event_loop: EventLoopRef) -> LMHandler:
        assert self.registry is not None
        cache = self._models.cache
        if isinstance(cache, str | os.PathLike):
            from rlm_broker.broker.cache import Cache  # imports sqlite

            cache = own.enter_context(contextlib.closing(Cache(Path(cache))))
        return await own.enter_async_context(self.registry.opened(self.limits, cache, event_loop))

    async def _routing(self, parts: EngineParts, request: RunRequest) -> Routing:
        """Return the routes of one run: the handler's, or with the run's own models.

        Raises:
            ConfigurationError: The handler is lent, and a model is not the name of one of its own. Or a limit in US
                dollars is set, and the price of a model is not known. Or the root model answers in text, and an answer
                of a type is wanted.
        """
        routing, given = parts.handler.routing, (request.model, request.sub_model)
        if given != (None, None) and self.registry is not None:
            routing = await self.registry.routing_for(parts.handler, *given, request.limits)
        elif given != (None, None):
            clients: list[BaseClient | None] = []
            for name in given:
                if not isinstance(name, str | None):
                    raise ConfigurationError("the handler brings its own models: give the name of one of them")
                clients.append(None if name is None else routing.pick(name, 0))
            routing = routing.instead(*clients)
        if request.limits.max_budget_usd is not None:
            await require_priced("max_budget_usd", filter(None, (routing.root, routing.sub)))
        root = routing.pick(None, 0)
        if request.output_type is not None and not root.answers_types:
            raise ConfigurationError(
                f"the model {root.model_name} answers in text: leave out output_type, or name another model"
            )
        return routing

    @property
    def _diverged(self) -> ReplayDiverged | None:
        """Error of the first unrecorded call in a replay; None if there is none."""
        replay = self.registry.replay if self.registry else None
        return ReplayDiverged(replay.diverged) if replay is not None and replay.diverged else None

    def _required_seed(self) -> int | None:
        """Return the seed of the REPLs: a replayed recording's, else the given one, else one drawn to record."""
        seed = None if self._sandbox is None else self._sandbox.seed
        replayed = self.registry.replay if self.registry else None
        if replayed is None:
            is_drawn = seed is None and self._models.record and (self._sandbox is None or not self._sandbox.is_open)
            return secrets.randbits(SEED_BITS) if is_drawn else seed
        recorded = replayed.models.seed
        is_fixed = seed is not None or (self._sandbox is not None and self._sandbox.is_open)
        if is_fixed and seed != recorded:
            raise ConfigurationError(
                f"the recording was made with seed={recorded}, but the sandbox has {seed}: give it that seed"
            )
        return recorded


def root_run(
    request: RunRequest,
    job: RunJob,
    context: StoredContext,
    routing: Routing,
    parts: EngineParts,
    repl: PersistentRepl | None,
    began: float,
) -> Runner:
    """Return the loop of a root run before its first turn.

    Args:
        routing: Picks the client of each call.
        repl: A REPL for several runs; None opens one for this run.
        began: `time.monotonic()` at the beginning of its time.
    """
    limits, sandbox = request.limits, parts.sandbox
    followers = [] if job.log is None else [job.log.add]
    events = TreeEvents(job.id, [*request.receivers, *followers, *BOARD.receivers(job.id)])
    completing = parts.handler if request.completing is None else request.completing(parts.handler)
    earlier = request.earlier
    ledger = Ledger(limits) if earlier is None else Ledger(limits, earlier.ledger, f"{job.id}/")
    if earlier is not None:
        ledger.go_on(earlier.spent, ROOT_RUN)
    calls = TreeCalls(
        completing,
        ledger,
        events,
        parts.recorder,
        replay=parts.replay,
        routing=routing,
        tells_text=request.tells_text,
        sample=0 if earlier is None else earlier.sample,
    )
    tree = Tree(calls, ledger, sandbox, events, request.instructions, request.query_handler, request.is_auto)
    if events.is_wanted:
        metadata = _metadata(routing, sandbox, limits, context)
        if context is not request.context:  # who stored it has its facts
            metadata["context"]["remarks"] = context.info.remarks(with_names=True)
        has_task = request.question is None and context.info.type_name == "str"
        question = beginning(context, TASK_CHARS).text if has_task else request.question
        metadata["context"] |= {"is_task": has_task, "is_in_kept_repl": repl is not None}
        place = () if earlier is None else (earlier.tree, earlier.turns, not earlier.sample)
        events.of(ROOT_RUN, 0)(RunStarted, question, metadata["model"], metadata, 0, *place)
    caller = Caller(ROOT_RUN, 0, request.question)
    progress = None if earlier is None else earlier.taken_over()
    return open_run(tree, caller, began, None, request.tools, request.output_type, repl, progress)


async def _stored_in_time(request: RunRequest, job: RunJob) -> StoredContext:
    """Store the context within `run_timeout_s`, in a thread: a stream or a file may stall. For a small text the thread
    would cost five times as much as the storing.

    Returns:
        The context. If the run was stopped meanwhile, a text saying so: it ends as it begins.

    Raises:
        LimitReached: It took longer.
        ConfigurationError: As for `RLM.completion`.
    """
    if request.is_small:
        return stored(request.context, request.question)
    limit_s = request.limits.run_timeout_s
    try:
        return await job.before(
            in_thread(lambda _: stored(request.context, request.question), discard=StoredContext.close), limit_s
        )
    except StopRequested:
        return stored("stopped before the context was read", request.question)
    except Late:
        assert limit_s is not None
        raise LimitReached("run_timeout_s", limit_s, limit_s) from None


def _metadata(routing: Routing, sandbox: Sandbox, limits: Limits, context: StoredContext) -> dict[str, Any]:
    """Return the facts of a root run for its first event, without secrets."""
    info = context.info
    return {
        "version": __version__,
        "model": routing.pick(None, 0).model_name,
        "sub_model": routing.pick(None, 1).model_name,
        "isolation": sandbox.level,
        "limits": limits.to_dict(),
        "context": {"type": info.type_name, "chars": info.total_chars, "parts": info.parts_total},
    }


def recorded_models(handler: LMHandler, seed: int | None) -> "RecordedModels":
    """Return the first line of a recording: the models and their windows, the routes, and the seed."""
    from rlm_broker.broker.clients.recording import FORMAT, RecordedModels

    root, sub = handler.get_client(depth=0), handler.get_client(depth=1)
    routing = handler.routing
    routes = [(route.to, route.match, route.depths) for route in routing.routes]
    own_sub = None if sub is root else sub.model_name
    windows = {client.model_name: client.context_tokens for client in routing.clients if client.context_tokens}
    names = list(routing.names)
    return RecordedModels(FORMAT, root.model_name, own_sub, names, routes, routing.policy, seed, windows)
