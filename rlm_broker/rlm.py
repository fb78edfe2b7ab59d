"""The front door: `RLM`, which composes all other packages."""

import contextlib
from collections.abc import AsyncGenerator, Callable, Mapping
from typing import Any, Literal, Unpack

from rlm_broker.asked import NOT_GIVEN, Asked, given_once, limits_of_a_run, require_question
from rlm_broker.batch.batch import Batch, Wanted
from rlm_broker.batch.composing import composed_batch
from rlm_broker.batch.feeding import Items
from rlm_broker.batch.limits import BatchLimits
from rlm_broker.batch.scoring import Score
from rlm_broker.callback import Callback
from rlm_broker.composition import answered
from rlm_broker.concurrency.event_loop import EventLoopRef
from rlm_broker.concurrency.resource import AsyncResource
from rlm_broker.engine import Engine, EngineParts
from rlm_broker.errors import ConfigurationError, SandboxFailed
from rlm_broker.events.event import Emit, Event
from rlm_broker.keywords import (
    Keywords,
    cluster_with,
    instructions_with,
    models_with,
    receivers_with,
    require_arguments,
    require_consistent,
    sandbox_with,
    tools_with,
)
from rlm_broker.limits import Limits, ReplLimits, RunLimits
from rlm_broker.lm_handler import LMHandler
from rlm_broker.models.model import Given
from rlm_broker.models.models import FilePath, Models
from rlm_broker.models.registry import Registry
from rlm_broker.prompts.instructions import Instructions
from rlm_broker.results import Completion
from rlm_broker.run.output_type import OutputType
from rlm_broker.run.persistent_repl import PersistentRepl
from rlm_broker.run.run import Run
from rlm_broker.run.tools import Tools
from rlm_broker.run.tree import QueryHandlerFactory
from rlm_broker.sandbox.sandbox import Sandbox
from rlm_broker.watch.board import BOARD
from rlm_broker.watch.server import start_if_wanted


class RLM(AsyncResource):
    """A language model whose context is a variable in a sandboxed REPL.

    Within `with` it keeps its handler and fork server between calls; otherwise each call starts its own and ends them.

    Example:
        ```python
        with RLM("openai/gpt-5", "openai/gpt-5-mini", limits=Limits(max_budget_usd=2)) as rlm:
            print(rlm.completion(Path("logs/"), "Which service failed first?").response)
        ```

    Args:
        model: Root model: a name ("offline", "openai/gpt-5-mini", or one of `models`), a `Model`, a client object or a
            function, see `FunctionClient`. None is "offline".
        sub_model: Model for what code in the REPL asks. None is the root model.
        models: Further models by name, which code may name; or a `Models`, which also has routes, policy and files.
        limits: Limits of each run tree and its REPLs. A field that is not set is taken from `sandbox`, or has its
            default.
        tools: Name → a function for code, a plain value, or `{"tool": either, "description": text}`; or a `Tools`,
            which also has those of child runs. Functions run in this process. Annotations validate their arguments.
        instructions: System prompt that replaces the built-in one, or `Instructions`.
        recursion: "always" gives a REPL to each child that may have one. "auto" does so only if its prompt is too long
            for its model, or asks for code.
        on_event: Called with each event. It must not block. Its first exception is logged.
        persistent: Keep the REPL between calls, within `with`. Variables stay, and each call adds its context as
            `context_1` and so on, and its messages as `history_0` and so on.
        query_handler: Replaces the recursion. It gets a run's name, its depth and its default query handler, and
            returns the query handler of the run's REPL.
        sandbox: Isolation level ("auto", "strict", "standard", "process"), or a `Sandbox`, which several RLMs may
            share. An open sandbox stays open; a closed one is opened while it is used.
        handler: Handler that several RLMs may share, in place of models. Its owner opens and closes it.
        keywords: Short forms of single arguments of `Models`, `Tools`, `Instructions` and `Sandbox`, and `verbose`,
            which prints events; and `cluster`, on whose nodes runs take place; see `Keywords`.

    Attributes:
        limits: Limits that hold.
        tools: Tools that code has.
        instructions: Instructions to the model.

    Raises:
        ConfigurationError: A model, key, level or keyword is unknown, or two arguments contradict each other.
    """

    def __init__(
        self,
        model: Given | None = None,
        sub_model: Given | None = None,
        *,
        models: Models | Mapping[str, Given] | None = None,
        limits: Limits | None = None,
        tools: Tools | Mapping[str, Any] | None = None,
        instructions: Instructions | str | Callable[[int], str] | None = None,
        recursion: Literal["always", "auto"] = "always",
        on_event: Emit | None = None,
        persistent: bool = False,
        query_handler: QueryHandlerFactory | None = None,
        sandbox: Sandbox | str | None = None,
        handler: LMHandler | None = None,
        **keywords: Unpack[Keywords],
    ) -> None:
        require_arguments(keywords, RLM, limits, handler, query_handler, recursion, persistent)
        said = models_with(models, keywords)
        require_consistent(model, sub_model, said, handler, "model_policy" in keywords)
        brought = sandbox_with(sandbox, keywords)
        registry = None if handler is not None else Registry(model, sub_model, said)
        cluster = cluster_with(keywords, persistent, query_handler)
        self._parts = EngineParts(registry, handler, said, brought, limits, cluster)
        self.limits = self._parts.limits
        self._is_auto = recursion == "auto"
        self.instructions = instructions_with(instructions, keywords)
        self.tools = tools_with(tools, keywords)
        self._receivers = receivers_with(on_event, keywords)
        self._query_handler = query_handler
        self._persistent = persistent
        self._persistent_repl: PersistentRepl | None = None
        self._runs: set[Run] = set()
        self._engine: Engine | None = None
        self._keeping = contextlib.AsyncExitStack()

    @property
    def handler(self) -> LMHandler:
        """Handler that all runs share, within `with`. Outside of it, `SandboxFailed` is raised."""
        return self._opened().handler

    @property
    def sandbox(self) -> Sandbox:
        """Sandbox that all runs share, within `with`. Outside of it, `SandboxFailed` is raised."""
        return self._opened().sandbox

    def completion(
        self,
        prompt: object = NOT_GIVEN,
        root_prompt: str | None = None,
        *,
        context: object = NOT_GIVEN,
        question: str | None = None,
        output_type: Any = None,
        model: Given | None = None,
        limits: RunLimits | ReplLimits | None = None,
        timeout_s: float | None = None,
    ) -> Completion:
        """Answer a question about a context, and return the outcome of the run.

        Args:
            prompt, context: Context, under one of its names: text, plain values or a path; see `context.store`.
            root_prompt, question: Question, under one of its names. None: the task is in the context.
            output_type: Type of the answer: a pydantic model, or another type that pydantic can validate. The value is
                `Completion.parsed`.
            model, limits, timeout_s: For this run alone, as in `start`.

        Raises:
            OutputInvalid: The answer was not of the type, also after `max_output_retries` further turns.
            LimitReached, RunCancelled: A limit or Ctrl+C ended the run.
            ModelFailed, SandboxFailed: The model or the sandbox failed. These five are `RunFailed`.
            ContextRefused, IsolationUnavailable: The run did not begin.
        """
        given = given_once(prompt, root_prompt, context, question)
        asked = self._asked(*given, output_type, model=model, limits=limits, timeout_s=timeout_s)
        return self._run(asked, self._loop or EventLoopRef.background()).run()

    async def acompletion(
        self,
        prompt: object = NOT_GIVEN,
        root_prompt: str | None = None,
        *,
        context: object = NOT_GIVEN,
        question: str | None = None,
        output_type: Any = None,
        model: Given | None = None,
        limits: RunLimits | ReplLimits | None = None,
        timeout_s: float | None = None,
    ) -> Completion:
        """Answer as `completion` does, with its arguments. Cancelling it ends the run and everything below it."""
        given = given_once(prompt, root_prompt, context, question)
        asked = self._asked(*given, output_type, model=model, limits=limits, timeout_s=timeout_s)
        return await self._run(asked, self._loop or EventLoopRef.here()).start()

    async def stream(
        self,
        prompt: object = NOT_GIVEN,
        root_prompt: str | None = None,
        *,
        context: object = NOT_GIVEN,
        question: str | None = None,
        output_type: Any = None,
        model: Given | None = None,
        limits: RunLimits | ReplLimits | None = None,
        timeout_s: float | None = None,
    ) -> AsyncGenerator[Event | Completion, None]:
        """Answer as `acompletion` does, and yield each event of the run, then the completion.

        Leaving the loop ends the run and everything below it; use `contextlib.aclosing`. For a partial answer use
        `start`, whose handle outlives the loop.
        """
        given = given_once(prompt, root_prompt, context, question)
        async with self.start(*given, output_type=output_type, model=model, limits=limits, timeout_s=timeout_s) as run:
            async for event in run.events():
                yield event
            yield await run

    def start(
        self,
        context: object,
        question: str | None = None,
        *,
        model: Given | None = None,
        sub_model: Given | None = None,
        instructions: Instructions | str | None = None,
        limits: RunLimits | ReplLimits | None = None,
        timeout_s: float | None = None,
        output_type: Any = None,
        tools: Tools | Mapping[str, Any] | None = None,
        on_event: Emit | None = None,
        place: contextlib.AbstractAsyncContextManager[Any] | None = None,
        repl: PersistentRepl | None = None,
    ) -> Run:
        """Begin to answer a question about a context, and return a handle on the run.

        In a coroutine the run uses the caller's event loop, elsewhere a background loop of this process. Arguments
        replace those of the `RLM` for this run.

        Args:
            context: Text, a dict or list of plain values, or a path; see `context.store`.
            question: Question; None: the task is in the context.
            model, sub_model, instructions, tools: As for `RLM`. With a lent handler, `model` is a name that it knows.
            limits: Fields that were set hold for this run; the others are those of the `RLM`.
            timeout_s: Short for `limits=RunLimits(run_timeout_s=...)`, in seconds.
            output_type: As for `completion`.
            on_event: Called with each event of this run, in addition to that of the `RLM`.
            place: Async context manager that the run enters before it begins, and leaves at its end, such as an
                `asyncio.Semaphore`. The wait for it does not count as time of the run.
            repl: REPL of `persistent_repl` that the run takes in place of one of its own.

        Raises:
            ConfigurationError: An argument cannot be used. Errors of the context or a model are raised by the run.
        """
        asked = self._asked(
            context,
            question,
            output_type,
            limits=limits,
            timeout_s=timeout_s,
            tells_text=True,
            model=model,
            sub_model=sub_model,
            on_event=None if on_event is None else Callback(on_event, "on_event"),
            place=place,
            repl=repl,
            **({} if instructions is None else {"instructions": instructions_with(instructions, {})}),
            **({} if tools is None else {"tools": tools_with(tools, {})}),
        )
        if self._persistent and (tools is not None or repl is not None):
            raise ConfigurationError("a persistent RLM keeps its REPL and its tools: give neither to start")
        return self._run(asked, self._loop or EventLoopRef.here_or_background(), is_followed=True).start()

    def persistent_repl(self, limits: ReplLimits | None = None) -> PersistentRepl:
        """Return a REPL for several runs, one after the other: its variables stay from run to run.

        Each run adds its context as `context_1` and so on, and its messages as `history_0` and so on.

        Example:
            ```python
            with RLM("offline") as rlm, rlm.persistent_repl() as repl:
                rlm.start("a\\nb", "How many lines are there?", repl=repl).result()
                print(rlm.start("c", "How many lines are there now?", repl=repl).result().response)
            ```

        Args:
            limits: Limits of the REPL; None takes those of the `RLM`. Limits of single runs do not change them.
        """
        return PersistentRepl(self.sandbox, limits or self.limits)

    def batch(
        self,
        items: Items,
        *,
        max_concurrent: int = 16,
        out: FilePath | None = None,
        limits: BatchLimits | None = None,
        output_type: Any = None,
        fail_fast: bool = False,
        score: Score | None = None,
        trajectories: bool = False,
        retry_failed: bool = False,
    ) -> Batch:
        """Answer many questions, and return a handle that yields each result as it is done.

        With `out`, a call that was killed is gone on with by the same call: finished items are left out, and calls of
        models that were paid are answered from the journal beside the file.

        Args:
            items: Iterable or async iterable of `BatchItem`, or of dicts with the keys `id`, `question`, `context` or
                `path`, and `metadata`. It is pulled as places get free.
            max_concurrent: Maximum runs at the same time.
            out: File to which each result is appended as a line of JSON. None keeps no results.
            limits: Limits of the whole batch, over all calls that go on with it.
            output_type: Type of all answers, as for `completion`.
            fail_fast: End the batch with the error of the first item that fails.
            score: Function that judges each result; see `Score`.
            trajectories: Add the conversation of each run to its line, as chat messages.
            retry_failed: Run the items again that have failed before, from their beginning.

        Raises:
            ConfigurationError: An argument cannot be used.
        """
        if self._persistent:
            raise ConfigurationError("a persistent RLM answers one question at a time: make another RLM for a batch")
        bounds = BatchLimits() if limits is None else limits
        wanted = Wanted(items, max_concurrent, bounds, output_type, fail_fast, score, trajectories, out, retry_failed)
        own = {"instructions": self.instructions, "tools": self.tools, "is_auto": self._is_auto}
        settings = {**own, "query_handler": self._query_handler}
        return composed_batch(wanted, self._asked, self._run, self, self._parts, self._opened, settings, self._loop)

    # -- what runs share ---------------------------------------------------------------------------------------------

    @property
    def _loop(self) -> EventLoopRef | None:
        return self._event_loop or self._parts.event_loop

    async def _open(self) -> None:
        self._engine = await self._keeping.enter_async_context(self._parts.running(EventLoopRef.here()))
        if self._persistent:
            repl = PersistentRepl(self._engine.sandbox, self.limits)
            self._persistent_repl = await self._keeping.enter_async_context(repl)

    async def _close(self) -> None:
        runs = list(self._runs)  # they use the engine that is closed below
        for run in runs:
            run.cancel()
        for run in runs:
            await run.ended()
        self._engine = None
        await self._keeping.aclose()

    def _opened(self) -> Engine:
        if self._engine is None:
            raise SandboxFailed("the RLM is not open: use it as `with RLM(...) as rlm:`")
        return self._engine

    # -- one run -----------------------------------------------------------------------------------------------------

    def _asked(
        self,
        context: object,
        question: str | None,
        output_type: Any,
        *,
        limits: RunLimits | ReplLimits | None = None,
        timeout_s: float | None = None,
        **more: Any,
    ) -> Asked:
        require_question(question)
        return Asked(
            context=context,
            question=question,
            output_type=None if output_type is None else OutputType(output_type),
            limits=limits_of_a_run(self.limits, limits, timeout_s, keeps_repl=self._persistent),
            **{"instructions": self.instructions, "tools": self.tools, **more},
        )

    def _run(self, asked: Asked, event_loop: EventLoopRef, *, is_followed: bool = False) -> Run:
        run = Run(event_loop, lambda run: self._answered(asked, run), is_followed=start_if_wanted() or is_followed)
        BOARD.add(run, asked.question)
        return run

    async def _answered(self, asked: Asked, run: Run) -> Completion:
        if self._persistent and self._engine is None:
            raise ConfigurationError("a persistent RLM keeps its REPL within `with RLM(...) as rlm:`: call it there")
        if self._persistent and self._runs:
            raise ConfigurationError("a persistent RLM answers one question at a time: wait for the run before")
        self._runs.add(run)
        try:
            return await answered(
                asked,
                run,
                self._parts,
                self._engine,
                receivers=self._receivers,
                query_handler=self._query_handler,
                is_auto=self._is_auto,
                repl=self._persistent_repl,
            )
        finally:
            self._runs.discard(run)
