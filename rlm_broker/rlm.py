"""The front door: composes everything, the one module that knows all rooms."""

import asyncio
import contextlib
import inspect
import secrets
import time
import warnings
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Mapping, Sequence
from dataclasses import dataclass
from os import PathLike
from pathlib import Path
from typing import Any, Literal

from rlm_broker import __version__
from rlm_broker.clients.recording import FORMAT, Recorder, Recording
from rlm_broker.clients.recording import Models as RecordedModels
from rlm_broker.concurrency.event_loop import AsyncResource, EventLoopRef
from rlm_broker.context.store import StoredContext, refuse_a_name, store
from rlm_broker.errors import ConfigurationError, ReplayDiverged, RunCancelled
from rlm_broker.handler.cache import Cache
from rlm_broker.handler.handler import LMHandler
from rlm_broker.handler.routing import ModelPolicy, Route
from rlm_broker.limits import Limits
from rlm_broker.models.registry import Given, Models
from rlm_broker.results import Completion
from rlm_broker.run.calls import Caller, TreeCalls
from rlm_broker.run.ledger import Ledger
from rlm_broker.run.output_type import OutputType
from rlm_broker.run.persistent_repl import PersistentRepl
from rlm_broker.run.prompts import Instructions, Profile
from rlm_broker.run.queries import needs_repl, open_run
from rlm_broker.run.runner import QueryHandlerFactory, Runner, Tree
from rlm_broker.run.tools import Tools
from rlm_broker.sandbox.levels.level import candidates
from rlm_broker.sandbox.sandbox import SEED_BITS, Sandbox, require_seed
from rlm_broker.trace.events import Emit, Event, RunStarted

ROOT_RUN = "1"
ORDER = "the context comes first, then the question"
LONG_QUESTION_CHARS = 10_000
"""Characters from which on a question beside a shorter context that ends with "?" is taken for the context."""


class RLM(AsyncResource):
    """A language model whose context is a variable in a sandboxed REPL.

    As a context manager it keeps its handler and its fork server between calls; otherwise each call starts its own and
    ends them.

    Args:
        model: The root model: a name ("offline", "openai/gpt-5-mini", or one of `models`), a `Model`, a client object
            (one with the field's `completion`, too), or a function, see `FunctionClient`. None is "offline".
        sub_model: Answers what the REPL asks; None is the root model.
        models: Further models that code may name.
        routes: Which names and depths go to which of the models; see `Route`.
        limits: Bounds of each run tree; None takes those of `sandbox`, or the defaults.
        isolation: See `Sandbox`.
        allow_exec: See `Sandbox`.
        model_policy: What a model is worth that code names; see `ModelPolicy`.
        recursion: "always" gives each child that may have one a REPL; "auto" only where its prompt is too long for its
            model, or asks for code.
        system_prompt: In place of our own: for every run of the tree, or a function from the depth to it.
        prompt_profile: Which way to end a run our own prompt tells; see `prompts.Profile`.
        user_prologue: Put before the first user message.
        on_event: Called with everything that happens (`Callbacks` makes the field's callbacks of it); what it raises is
            dropped. It must not block.
        tools: Name → a function of yours that code may call, a value, or `{"tool": either, "description": text}`.
            Functions run here, sync ones in threads, with their arguments validated by their annotations.
        sub_tools: The same for child runs; None is `tools`, `{}` is none.
        persistent: Keep the REPL between calls, within `with`: variables live on, each call adds its context as
            `context_1` and so on, and its messages as `history_0` and so on.
        query_handler: Replaces the recursion: from a run's name, its depth and the handler that it would have, makes
            what answers its REPL.
        cache: A file, or a `Cache`, that keeps replies of providers; None keeps none.
        record: A new file for all model calls; see `recording`.
        replay: Such a file: its replies, and no model. Its seed, if it has one, is the sandbox's.
        seed: See `Sandbox`. None: another one for each recording, and none without a recording.
        handler: To be shared by several RLMs: its models serve, in place of `model` and its like. It stays its
            owner's to open and close, as client objects do.
        sandbox: To be shared by several RLMs: its limits of one REPL, isolation and `allow_exec` hold.

    Raises:
        ConfigurationError: A model, key or level that there is not, or models beside a handler.
    """

    def __init__(  # noqa: PLR0913 - a front door names what can be brought in
        self,
        model: Given | None = None,
        sub_model: Given | None = None,
        *,
        models: Mapping[str, Given] | None = None,
        routes: Sequence[Route] = (),
        limits: Limits | None = None,
        isolation: str = "auto",
        allow_exec: bool | None = None,
        model_policy: ModelPolicy = "allow",
        recursion: Literal["always", "auto"] = "always",
        system_prompt: str | Callable[[int], str] | None = None,
        prompt_profile: Profile = "both",
        user_prologue: str | None = None,
        on_event: Emit | None = None,
        tools: Mapping[str, Any] | None = None,
        sub_tools: Mapping[str, Any] | None = None,
        persistent: bool = False,
        query_handler: QueryHandlerFactory | None = None,
        cache: str | Path | Cache | None = None,
        record: str | Path | None = None,
        replay: str | Path | None = None,
        seed: int | None = None,
        handler: LMHandler | None = None,
        sandbox: Sandbox | None = None,
    ) -> None:
        brings_models = not (model is None and sub_model is None and not models)
        if handler is not None and (brings_models or routes or cache or replay):
            raise ConfigurationError("give either models or a handler: a handler brings its own models")
        if replay is not None and (brings_models or routes):
            raise ConfigurationError("give either models or a recording to replay: it brings its own models")
        _require_types(limits=limits, handler=handler, sandbox=sandbox, models=models, on_event=on_event)
        candidates(isolation, allow_exec)  # an unknown level is refused here and not in the first call
        self.limits = limits or (sandbox.limits if sandbox else Limits())
        self._models: Models | None = None
        if handler is None:
            replayed = None if replay is None else Recording(replay)
            self._models = Models(model, sub_model, models or {}, routes, model_policy, replayed)
        self._cache, self._record = cache, record
        recording = self._models.replay if self._models else None
        self._seed = _seed(seed, recording, sandbox, is_recorded=record is not None)
        self._isolation = isolation
        self._allow_exec = allow_exec
        if recursion not in ("always", "auto"):
            raise ConfigurationError(f"there is no recursion {recursion!r}; choose always or auto")
        if prompt_profile not in ("both", "final", "answer"):
            raise ConfigurationError(f"there is no prompt profile {prompt_profile!r}; choose both, final or answer")
        self._needs_repl = needs_repl if recursion == "auto" else None
        self._instructions = Instructions(system_prompt, prompt_profile, user_prologue)
        self._on_event = on_event
        self._tools = Tools(tools, sub_tools)
        self._query_handler = query_handler
        self._persistent = persistent
        self._persistent_repl: PersistentRepl | None = None
        self._handler, self._sandbox = handler, sandbox
        lent = sandbox or handler
        self._event_loop = lent._event_loop if lent else None
        self._kept: _Machinery | None = None
        self._keeping = contextlib.AsyncExitStack()

    def completion(self, prompt: object, root_prompt: str | None = None, *, output_type: Any = None) -> Completion:
        """Answer a question about a context.

        Args:
            prompt: The context: text, a dict or list of plain values, or a path; see `context.store`.
            root_prompt: The question. None: the task is in the context.
            output_type: What the answer has to be: a pydantic model, or whatever else pydantic validates. The value is
                the completion's `parsed`.

        Raises:
            OutputInvalid: The answer was not of that type, `max_output_retries` times and once more.
            LimitReached: A limit ended it.
            RunCancelled: Ctrl+C ended it.
            ModelFailed, SandboxFailed: What their names say. These five are `RunFailed`, with the run's messages,
                trajectory, usage and partial answer.
            ContextRefused, IsolationUnavailable: The run did not begin.
        """
        attempt = _Attempt()
        try:
            return (self._event_loop or EventLoopRef.background()).run(
                self._complete(prompt, root_prompt, attempt, output_type)
            )
        except KeyboardInterrupt:
            stopped = RunCancelled()
            if attempt.runner is not None:
                attempt.runner.hand_to(stopped)
            raise stopped from None

    async def acompletion(
        self, prompt: object, root_prompt: str | None = None, *, output_type: Any = None
    ) -> Completion:
        """`completion`, awaited. Cancelling it ends the run and everything below it."""
        return await (self._event_loop or EventLoopRef.here()).arun(
            self._complete(prompt, root_prompt, _Attempt(), output_type)
        )

    async def stream(
        self, prompt: object, root_prompt: str | None = None, *, output_type: Any = None
    ) -> AsyncGenerator[Event | Completion, None]:
        """`acompletion` as it happens: each event of the run, then the completion.

        Leaving the loop (use `contextlib.aclosing`) ends the run and everything below it.
        """
        loop = asyncio.get_running_loop()
        happened: asyncio.Queue[Event | None] = asyncio.Queue()

        def emit(event: Event) -> None:
            self._emit(event)
            loop.call_soon_threadsafe(happened.put_nowait, event)  # the run may live on another thread's loop

        work = self._complete(prompt, root_prompt, _Attempt(), output_type, emit)
        run = loop.create_task((self._event_loop or EventLoopRef.here()).arun(work))
        run.add_done_callback(lambda _: happened.put_nowait(None))
        try:
            while (event := await happened.get()) is not None:
                yield event
            yield await run
        finally:
            run.cancel()
            await asyncio.wait({run})
            if not run.cancelled():
                run.exception()  # who left the loop does not wait for it: else asyncio prints that it is not retrieved

    # -- what a run needs --------------------------------------------------------------------------------------------

    async def _open(self) -> None:
        self._kept = await self._keeping.enter_async_context(self._machinery())
        if self._persistent:
            self._persistent_repl = PersistentRepl(self._kept.sandbox)
            self._keeping.push_async_callback(self._persistent_repl.close)

    async def _close(self) -> None:
        self._kept = None
        await self._keeping.aclose()

    @contextlib.asynccontextmanager
    async def _machinery(self) -> AsyncIterator["_Machinery"]:
        """A handler, and a sandbox whose REPLs connect to it: lent ones, or our own until this is left."""
        event_loop = self._event_loop or EventLoopRef.here()
        async with contextlib.AsyncExitStack() as own:
            handler, sandbox = self._handler, self._sandbox
            if handler is None:
                handler = await self._own_handler(own, event_loop)
            recorder = None
            if self._record is not None:
                recorder = own.enter_context(contextlib.closing(Recorder(self._record, _told(handler, self._seed))))
            if sandbox is None:
                port = handler.listener
                sandbox = await own.enter_async_context(
                    Sandbox(
                        self.limits,
                        self._isolation,
                        allow_exec=self._allow_exec,
                        seed=self._seed,
                        listener=port,
                        event_loop=event_loop,
                    )
                )
            yield _Machinery(handler, sandbox, recorder)

    async def _own_handler(self, own: contextlib.AsyncExitStack, event_loop: EventLoopRef) -> LMHandler:
        assert self._models is not None
        cache = self._cache
        if isinstance(cache, str | Path):
            cache = own.enter_context(contextlib.closing(Cache(cache)))
        return await own.enter_async_context(self._models.opened(self.limits, cache, event_loop))

    # -- one run -----------------------------------------------------------------------------------------------------

    async def _complete(
        self, prompt: object, question: str | None, attempt: "_Attempt", output_type: Any, emit: Emit | None = None
    ) -> Completion:
        if question is not None and not isinstance(question, str):
            order = f": {ORDER}" if isinstance(question, PathLike | dict | list) else ""
            raise ConfigurationError(f"the question is text or None, and not {type(question).__name__}{order}")
        if question is not None and not question.strip():
            raise ConfigurationError("the question is empty: say what you want to know")
        attempt.output_type = None if output_type is None else OutputType(output_type)
        attempt.emit, attempt.is_followed = emit or self._emit, emit is not None
        if isinstance(prompt, StoredContext):
            return await self._run(prompt, question, attempt)
        with await asyncio.to_thread(_stored, prompt, question) as context:
            return await self._run(context, question, attempt)

    async def _run(self, context: StoredContext, question: str | None, attempt: "_Attempt") -> Completion:
        if self._persistent and self._kept is None:
            raise ConfigurationError("a persistent RLM keeps its REPL within `with RLM(...) as rlm:`: use it so")
        if self._kept is not None:
            return await self._started(self._kept, context, question, attempt)
        async with self._machinery() as machinery:
            return await self._started(machinery, context, question, attempt)

    async def _started(
        self, machinery: "_Machinery", context: StoredContext, question: str | None, attempt: "_Attempt"
    ) -> Completion:
        limits, emit = self.limits, attempt.emit
        ledger = Ledger(limits)
        calls = TreeCalls(machinery.handler, ledger, emit, machinery.recorder, tells_text=attempt.is_followed)
        instructions, asks = self._instructions, self._query_handler
        tree = Tree(calls, ledger, machinery.sandbox, emit, instructions, asks, self._needs_repl)
        caller = Caller(ROOT_RUN, 0, question)
        metadata = self._metadata(machinery, context)
        emit(RunStarted(ROOT_RUN, 0, question, metadata["model"], metadata))
        ends_at = None if limits.run_timeout_s is None else time.monotonic() + limits.run_timeout_s
        attempt.runner = open_run(tree, caller, ends_at, self._tools, attempt.output_type, self._persistent_repl)
        completion = await attempt.runner.run(context)
        if self._models and self._models.replay and (difference := self._models.replay.diverged):
            diverged = ReplayDiverged(difference)  # code may have taken the error for an answer
            attempt.runner.hand_to(diverged)
            raise diverged
        return completion

    def _metadata(self, machinery: "_Machinery", context: StoredContext) -> dict[str, Any]:
        info = context.info
        return {
            "version": __version__,
            "model": machinery.handler.get_client(depth=0).model_name,
            "sub_model": machinery.handler.get_client(depth=1).model_name,
            "isolation": machinery.sandbox.level,
            "limits": self.limits.model_dump(),
            "context": {"type": info.type_name, "chars": info.total_chars, "parts": info.parts_total},
        }

    def _emit(self, event: Event) -> None:
        if self._on_event is not None:
            with contextlib.suppress(BaseException):  # a callback is the user's: not even its sys.exit breaks the run
                self._on_event(event)


@dataclass(frozen=True, slots=True)
class _Machinery:
    """What any number of runs share."""

    handler: LMHandler
    sandbox: Sandbox
    recorder: Recorder | None


class _Attempt:
    """What is known of a run from outside while it runs."""

    def __init__(self) -> None:
        self.runner: Runner | None = None
        self.output_type: OutputType | None = None
        self.emit: Emit
        self.is_followed = False


def _stored(prompt: object, question: str | None) -> StoredContext:
    """Store what the user hands in; in a thread, since it reads files. Refuse a name that stands for what it names."""
    if isinstance(prompt, str):
        refuse_a_name(prompt)
        if question and len(question) > LONG_QUESTION_CHARS > len(prompt) and prompt.rstrip().endswith("?"):
            warnings.warn(
                f"the context is a question, and the question {len(question):,} characters: {ORDER}", stacklevel=2
            )
    if question is not None:
        refuse_a_name(question, "the question", ORDER)
    return store(prompt)


def _require_types(limits: object, handler: object, sandbox: object, models: object, on_event: object) -> None:
    for name, value, kind in (
        ("limits", limits, Limits),
        ("handler", handler, LMHandler),
        ("sandbox", sandbox, Sandbox),
        ("models", models, Mapping),
    ):
        if value is not None and not isinstance(value, kind):
            raise ConfigurationError(f"{name} is a {kind.__name__}, and not {type(value).__name__}")
    if on_event is not None and (not callable(on_event) or inspect.iscoroutinefunction(on_event)):
        raise ConfigurationError("on_event is a plain function of one event: it is called, and never awaited")


def _seed(seed: int | None, replayed: Recording | None, sandbox: Sandbox | None, is_recorded: bool) -> int | None:
    """The seed of the sandbox that runs will be in.

    Raises:
        ConfigurationError: It is no seed, or a recording or a sandbox has another one.
    """
    require_seed(seed)
    if seed is not None and (replayed is not None or sandbox is not None):
        whose = "the recording" if replayed else "the sandbox"
        raise ConfigurationError(f"seed must be None here: the seed of {whose} holds")
    if replayed is not None:
        seed = replayed.models.seed
        if sandbox is not None and sandbox.seed != seed:
            raise ConfigurationError(f"the recording was made with seed={seed}, and the sandbox has {sandbox.seed}")
        return seed
    if sandbox is not None:
        return sandbox.seed
    return secrets.randbits(SEED_BITS) if seed is None and is_recorded else seed


def _told(handler: LMHandler, seed: int | None) -> RecordedModels:
    """What a recording says of the models, the names that a replay has to have, and of the sandbox."""
    root, sub = handler.get_client(depth=0), handler.get_client(depth=1)
    routing = handler.routing
    routes = [(route.to, route.match, route.depths) for route in routing.routes]
    own_sub = None if sub is root else sub.model_name
    return RecordedModels(FORMAT, root.model_name, own_sub, list(routing.names), routes, routing.policy, seed)
