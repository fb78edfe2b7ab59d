"""The front door: `RLM`. It composes all other packages."""

import inspect
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from typing import TYPE_CHECKING, Any, Literal, Never, TypedDict, Unpack, overload

from msgspec.structs import replace

from rlm_broker.broker.models.model import Given
from rlm_broker.broker.models.models import FilePath, Models, models_of
from rlm_broker.broker.models.registry import Registry
from rlm_broker.concurrency.event_loop import EventLoopRef
from rlm_broker.concurrency.resource import AsyncResource
from rlm_broker.errors import ConfigurationError, PlainErrors, require_kind
from rlm_broker.events.callback import Callback
from rlm_broker.events.event import Emit, Event
from rlm_broker.limits import BatchLimits, Limits, ReplLimits, RunLimits
from rlm_broker.results import BestOf, Completion, T
from rlm_broker.run.branches import Scorer, best_of
from rlm_broker.run.earlier import from_trace
from rlm_broker.run.engine import Engine
from rlm_broker.run.lm_handler import LMHandler
from rlm_broker.run.output_type import OutputType
from rlm_broker.run.persistent_repl import PersistentRepl
from rlm_broker.run.prompts.instructions import Instructions
from rlm_broker.run.request import NOT_GIVEN, RunRequest, given_once, limits_of_a_run, no_limits
from rlm_broker.run.run import Run
from rlm_broker.run.tree import QueryHandlerFactory
from rlm_broker.sandbox.sandbox import Sandbox
from rlm_broker.sandbox.tools import Tools
from rlm_broker.sandbox.workers.levels import IsolationName

if TYPE_CHECKING:
    from rlm_broker.batch.batch import Batch
    from rlm_broker.batch.feed import Items
    from rlm_broker.batch.score import Score


class _Given(TypedDict, total=False):
    """Further arguments of the four ways to ask a question, for their overloads."""

    context: object
    question: str | None
    model: Given | None
    limits: RunLimits | ReplLimits | None
    timeout_s: float | None


class _GivenToStart(TypedDict, total=False):
    """Further arguments of `RLM.start`, for its overload."""

    model: Given | None
    sub_model: Given | None
    instructions: Instructions | str | None
    limits: RunLimits | ReplLimits | None
    timeout_s: float | None
    tools: Tools | Mapping[str, Any] | None
    on_event: Emit | None
    place: AbstractAsyncContextManager[Any] | None
    repl: PersistentRepl | None


class _Choosing(TypedDict, total=False):
    """Further arguments of `RLM.best_of` and `abest_of`, for their overloads."""

    scorer: Scorer | None
    after_turn: int
    limits: RunLimits | ReplLimits | None


class RLM(AsyncResource):
    """A language model with its context as a variable in a sandboxed REPL.

    Within `with` it keeps its handler and fork server between calls; otherwise each call starts its own and ends them.

    Example:
        ```python
        with RLM("openai/gpt-5", "openai/gpt-5-mini", limits=Limits(max_budget_usd=2)) as rlm:
            print(rlm.completion(Path("logs/"), "Which service failed first?").response)
        ```

    Args:
        model: Root model: a name ("offline", "openai/gpt-5-mini", or one of `models`), a `Model`, a client object or a
            function, see `FunctionClient`. Left out, it is "offline". None is for a handler or a recording.
        sub_model: Model for what code in the REPL asks. None is the root model.
        models: Further models for code, by name; or a `Models`, with routes, policy and files as well.
        limits: Limits of each run tree and its REPLs. An unset field is taken from `sandbox`, or has its default.
        tools: Name → a function for code, a plain value, or `{"tool": either, "description": text}`; or a `Tools`, with
            tools of child runs as well. Functions run in this process. Annotations validate their arguments.
        instructions: System prompt in place of the built-in one, or `Instructions`.
        recursion: "always" gives a REPL to each child, down to `Limits.max_depth`. "auto" does so only if its prompt is
            too long for its model, or asks for code. A function replaces the recursion: it gets a run's name, its depth
            and its default query handler, and returns the query handler of the run's REPL.
        on_event: Called with each event. It must not block. Its first exception is logged.
        verbose: Show the run: a display in a notebook, else lines on stderr.
        persistent: Keep the REPL between calls, within `with`. Variables stay, and each call adds its context as
            `context_1` and so on, and its messages as `history_0` and so on.
        sandbox: Isolation level ("auto", "strict", "standard", "process"), or a `Sandbox` for any number of RLMs; the
            REPLs of a `RayCluster` are on other machines. An open one stays open; a closed one is opened while it
            is used.
        handler: Handler for any number of RLMs, in place of models. Its owner opens and closes it.

    Attributes:
        limits: The effective limits.
        tools: Tools for code.
        instructions: Instructions to the model.

    Raises:
        ConfigurationError: A model, key, level or keyword is unknown, or two arguments contradict each other.
    """

    def __init__(
        self,
        model: Given | None = NOT_GIVEN,
        sub_model: Given | None = None,
        *,
        models: Models | Mapping[str, Given] | None = None,
        limits: Limits | None = None,
        tools: Tools | Mapping[str, Any] | None = None,
        instructions: Instructions | str | Callable[[int], str] | None = None,
        recursion: Literal["always", "auto"] | QueryHandlerFactory = "always",
        on_event: Emit | None = None,
        verbose: bool = False,
        persistent: bool = False,
        sandbox: Sandbox | IsolationName | None = None,
        handler: LMHandler | None = None,
        **unknown: Never,
    ) -> None:
        if unknown:
            from rlm_broker.values.first_guesses import refuse

            refuse("RLM", unknown, [name for name in inspect.signature(RLM).parameters if name != "unknown"])
        if not isinstance(limits, Limits | None):
            raise no_limits(limits)
        require_kind("handler", handler, LMHandler, type(None))
        require_kind("sandbox", sandbox, Sandbox, str, type(None))
        for name, flag in (("persistent", persistent), ("verbose", verbose)):
            require_kind(name, flag, bool)
        if recursion not in ("always", "auto") and not callable(recursion):
            raise ConfigurationError(f"recursion must be 'always', 'auto' or a function, not {recursion!r}")
        every = models_of(models)
        if model is None and handler is None and every.replay is None:
            raise ConfigurationError(
                "the model is None: name one, such as 'openai/gpt-5-mini'; 'offline' is the stand-in that needs no key"
            )
        root = None if model is NOT_GIVEN else model
        _require_apart(root, sub_model, every, handler)
        source = Registry(root, sub_model, every, LMHandler) if handler is None else handler
        self._engine = Engine(source, every, sandbox, limits, keeps_repl=persistent)
        self.limits = self._engine.limits
        self.instructions = _instructions_of(instructions)
        self.tools = tools if isinstance(tools, Tools) else Tools(tools)
        shown = (Callback(_shown_events(), "verbose"),) if verbose else ()
        self._request = RunRequest(
            tools=self.tools,
            instructions=self.instructions,
            limits=self.limits,
            is_auto=recursion == "auto",
            query_handler=recursion if callable(recursion) else None,
            receivers=(*shown, *_receivers(on_event)),
        )

    @property
    def handler(self) -> LMHandler:
        """Handler of all runs, within `with`. Outside of it, `SandboxFailed` is raised."""
        return self._engine.handler

    @property
    def sandbox(self) -> Sandbox:
        """Sandbox of all runs, within `with`. Outside of it, `SandboxFailed` is raised."""
        return self._engine.sandbox

    @overload
    def completion(
        self, prompt: object = ..., root_prompt: str | None = ..., *, output_type: type[T], **given: Unpack[_Given]
    ) -> Completion[T]: ...

    @overload
    def completion(
        self, prompt: object = ..., root_prompt: str | None = ..., *, output_type: Any = ..., **given: Unpack[_Given]
    ) -> Completion[Any]: ...

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
    ) -> Completion[Any]:
        """Answer a question about a context, and return the outcome of the run.

        Example:
            ```python
            print(rlm.completion(Path("report.txt"), "How many pumps were repaired?", output_type=int).parsed)  # 2
            ```

        Args:
            prompt, context: Context, under one of its names: text, plain values or a path; see `context.store`.
            root_prompt, question: Question, under one of its names. None: the task is in the context.
            output_type: Type of the answer: a pydantic model, another type that pydantic can validate, or a JSON
                Schema. The value is `Completion.parsed`.
            model, limits, timeout_s: For this run alone, as in `start`.

        Raises:
            OutputInvalid: The answer was not of the type, also after `max_output_retries` further turns.
            LimitReached, RunCancelled: A limit or Ctrl+C ended the run.
            ModelFailed, SandboxFailed: The model or the sandbox failed. These five are `RunFailed`.
            ContextRefused, IsolationUnavailable: The run did not begin.
        """
        with PlainErrors():
            given = given_once(prompt, root_prompt, context, question)
            request = self._asked(*given, output_type, model, limits, timeout_s)
            return self._engine.begin(request, self._engine.run_loop or EventLoopRef.background()).run()

    @overload
    async def acompletion(
        self, prompt: object = ..., root_prompt: str | None = ..., *, output_type: type[T], **given: Unpack[_Given]
    ) -> Completion[T]: ...

    @overload
    async def acompletion(
        self, prompt: object = ..., root_prompt: str | None = ..., *, output_type: Any = ..., **given: Unpack[_Given]
    ) -> Completion[Any]: ...

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
    ) -> Completion[Any]:
        """Answer as `completion` does, with its arguments. Cancelling it ends the run and everything below it.

        Example:
            ```python
            questions = ["How many lines are there?", "Which is the longest?"]
            await asyncio.gather(*(rlm.acompletion(Path("report.txt"), each) for each in questions))
            ```
        """
        given = given_once(prompt, root_prompt, context, question)
        request = self._asked(*given, output_type, model, limits, timeout_s)
        return await self._engine.start(request)

    @overload
    def stream(
        self, prompt: object = ..., root_prompt: str | None = ..., *, output_type: type[T], **given: Unpack[_Given]
    ) -> AsyncGenerator[Event | Completion[T], None]: ...

    @overload
    def stream(
        self, prompt: object = ..., root_prompt: str | None = ..., *, output_type: Any = ..., **given: Unpack[_Given]
    ) -> AsyncGenerator[Event | Completion[Any], None]: ...

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
    ) -> AsyncGenerator[Event | Completion[Any], None]:
        """Answer as `acompletion` does, and yield each event of the run, then the completion.

        Leaving the loop ends the run and everything below it; use `contextlib.aclosing`. For a partial answer use
        `start`: its handle outlives the loop.

        Example:
            ```python
            async with contextlib.aclosing(rlm.stream("a", "How many?")) as events:
                async for event in events:
                    print(event)
            ```
        """
        given = given_once(prompt, root_prompt, context, question)
        request = replace(self._asked(*given, output_type, model, limits, timeout_s), tells_text=True)
        async with self._engine.start(request, is_followed=True) as run:
            async for event in run.events():
                yield event
            yield await run

    @overload
    def start(
        self, context: object, question: str | None = ..., *, output_type: type[T], **given: Unpack[_GivenToStart]
    ) -> Run[T]: ...

    @overload
    def start(
        self, context: object, question: str | None = ..., *, output_type: Any = ..., **given: Unpack[_GivenToStart]
    ) -> Run[Any]: ...

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
        place: AbstractAsyncContextManager[Any] | None = None,
        repl: PersistentRepl | None = None,
    ) -> Run[Any]:
        """Begin to answer a question about a context, and return a handle on the run.

        The run uses the event loop of the open `RLM`; of one that is not open, a background loop of this process, on
        which `on_event` is called then. Arguments replace those of the `RLM` for this run.

        Example:
            ```python
            run = rlm.start("a", "How many?", limits=Limits(max_iterations=5))
            print(run.result(timeout_s=60).response)  # 2
            ```

        Args:
            context: Text, a dict or list of plain values, or a path; see `context.store`.
            question: Question; None: the task is in the context.
            model, sub_model, instructions, tools: As for `RLM`. With a lent handler, `model` is one of its names.
            limits: Set fields hold for this run; the others are the `RLM`'s.
            timeout_s: Short for `limits=RunLimits(run_timeout_s=...)`, in seconds.
            output_type: As for `completion`.
            on_event: Called with each event of this run, beside the callback of the `RLM`.
            place: Async context manager around the run, for example an `asyncio.Semaphore`. The wait for it does not
                count as time of the run.
            repl: REPL of `persistent_repl` in place of one of its own.

        Raises:
            ConfigurationError: An argument cannot be used. Errors of the context or a model are raised by the run.
        """
        if self._engine.keeps_repl and (tools is not None or repl is not None):
            raise ConfigurationError("a persistent RLM keeps its REPL and its tools: give neither to start")
        asked = self._asked(context, question, output_type, model, limits, timeout_s)
        given = asked.instructions if instructions is None else _instructions_of(instructions)
        asked = replace(asked, sub_model=sub_model, instructions=given, place=place, repl=repl)
        return self._started(asked, tools, on_event)

    def resume(
        self,
        trace: FilePath | Sequence[FilePath],
        context: object,
        question: str | None = None,
        *,
        model: Given | None = None,
        limits: RunLimits | ReplLimits | None = None,
        output_type: Any = None,
        tools: Tools | Mapping[str, Any] | None = None,
        on_event: Emit | None = None,
    ) -> Run[Any]:
        """Go on with a run that was stopped, has failed or was killed, from its trace: a handle on a further run.

        That run begins after the last whole turn of the trace, with its conversation and its variables: its REPL runs
        the blocks again, whose calls are answered from the trace. What the first run has used counts for this one.

        Example:
            ```python
            with TraceWriter("first.jsonl") as trace:
                rlm = RLM("offline", limits=Limits(max_iterations=1), on_event=trace)
                rlm.completion(Path("report.txt"), "Which pump was repaired?")
            print(RLM("offline").resume("first.jsonl", Path("report.txt")).result().earlier_turns)  # 1
            ```

        Args:
            trace: Trace with the run; of several runs, the last that has not answered. If the run has gone on from
                another one itself, also the trace of that one, before its own.
            context, question: Those of the trace again; the question may be left out.
            model, limits, output_type, tools, on_event: As for `start`.

        Raises:
            ConfigurationError: A trace cannot be read, or lacks what is needed; or an argument cannot be used. An error
                of another context is raised by the run.
        """
        self._engine.require_resumable()
        earlier = from_trace(trace)
        asked = self._asked(context, earlier.its_question(question), output_type, model, limits, None)
        earlier.require_turns(asked.limits.iterations(0), asked.limits.max_blocks)
        return self._started(replace(asked, earlier=earlier), tools, on_event)

    @overload
    def best_of(
        self, n: int, context: object, question: str | None = ..., *, output_type: type[T], **given: Unpack[_Choosing]
    ) -> BestOf[T]: ...

    @overload
    def best_of(
        self, n: int, context: object, question: str | None = ..., *, output_type: Any = ..., **given: Unpack[_Choosing]
    ) -> BestOf[Any]: ...

    def best_of(
        self,
        n: int,
        context: object,
        question: str | None = None,
        *,
        scorer: Scorer | None = None,
        after_turn: int = 0,
        output_type: Any = None,
        limits: RunLimits | ReplLimits | None = None,
    ) -> BestOf[Any]:
        """Answer a question by `n` runs at the same time, and choose one answer. The limits hold for all together.

        Without a scorer, the most frequent answer is chosen; of equally frequent ones, the earliest run's. Answers are
        equal if their values are, with an `output_type`; else if their texts are, but for case and white space. Each
        run has its own events, so a trace and the viewer show all of them.

        Example:
            ```python
            best = rlm.best_of(3, Path("report.txt"), "How many pumps were repaired?", output_type=int)
            print(best.chosen.parsed, f"{best.votes} of {len(best.runs)}")  # 2 3 of 3
            ```

        Args:
            n: Number of runs, 1 to 256.
            context, question, output_type, limits: As for `completion`.
            scorer: Function from a completion to a number; the greatest one wins. A plain function runs in a thread.
            after_turn: Turns that the runs share: the first run takes them, and the others branch from it.

        Raises:
            ConfigurationError: An argument cannot be used.
            RunFailed: All runs have failed; the error is the first one's.
        """
        with PlainErrors():
            request = self._asked(context, question, output_type, None, limits, None)
            event_loop = self._engine.run_loop or EventLoopRef.background()
            return event_loop.run(best_of(self._engine, request, n, after_turn, scorer))

    @overload
    async def abest_of(
        self, n: int, context: object, question: str | None = ..., *, output_type: type[T], **given: Unpack[_Choosing]
    ) -> BestOf[T]: ...

    @overload
    async def abest_of(
        self, n: int, context: object, question: str | None = ..., *, output_type: Any = ..., **given: Unpack[_Choosing]
    ) -> BestOf[Any]: ...

    async def abest_of(
        self,
        n: int,
        context: object,
        question: str | None = None,
        *,
        scorer: Scorer | None = None,
        after_turn: int = 0,
        output_type: Any = None,
        limits: RunLimits | ReplLimits | None = None,
    ) -> BestOf[Any]:
        """Choose one answer of several runs as `best_of` does, awaited. Cancelling it ends all runs."""
        request = self._asked(context, question, output_type, None, limits, None)
        event_loop = self._engine.run_loop or EventLoopRef.here()
        return await event_loop.arun(best_of(self._engine, request, n, after_turn, scorer))

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
        items: "Items",
        *,
        max_concurrent: int = 16,
        out: FilePath | None = None,
        limits: BatchLimits | None = None,
        output_type: Any = None,
        fail_fast: bool = False,
        score: "Score | None" = None,
        trajectories: bool = False,
        retry_failed: bool = False,
        settings_changed: bool = False,
        samples: int = 1,
        root: FilePath | None = None,
    ) -> "Batch":
        """Answer many questions, and return a handle for iterating over the results as they come.

        With `out`, the same call goes on after a kill: finished items are left out, and paid calls of models are
        answered from the journal beside the file.

        Example:
            ```python
            items = [{"id": path.name, "path": path, "question": "What failed?"} for path in Path("logs").iterdir()]
            print({result.id: result.answer for result in rlm.batch(items, out="answers.jsonl")})
            ```

        Args:
            items: Iterable or async iterable of `BatchItem`, or of dicts with the keys `id`, `question`, `context` or
                `path`, and `metadata`. It is pulled as places get free.
            max_concurrent: Maximum runs at the same time.
            out: File for the results, a line of JSON each. None keeps no results.
            limits: Limits of the whole batch, over all calls with the same `out`.
            output_type: Type of all answers, as for `completion`.
            fail_fast: End the batch with the error of the first failed item.
            score: Function that judges each result; see `Score`.
            trajectories: Add the conversations of each run and its children to its line, as chat messages, with token
                ids and log probabilities where the server gives them.
            retry_failed: Run failed items again, with paid calls from the journal unless the run itself was at fault.
            settings_changed: Take other limits and another release's prompts for the items left; their lines say so.
            samples: Times that each item is asked; each sample has a line, with its number.
            root: Folder to which paths of contexts are relative, where the journal tells whether an item is the same.

        Raises:
            ConfigurationError: An argument cannot be used.
        """
        from rlm_broker.batch.batch import Batch, BatchRequest

        if self._engine.keeps_repl:
            raise ConfigurationError("a persistent RLM answers one question at a time: make another RLM for a batch")
        place = (out, retry_failed, settings_changed, samples, root)
        bounds = BatchLimits() if limits is None else limits
        batch = BatchRequest(items, max_concurrent, bounds, fail_fast, score, trajectories, *place)
        typed = replace(self._request, output_type=None if output_type is None else OutputType(output_type))
        return Batch(batch, self._engine, typed)

    async def _open(self) -> None:
        await self._engine.__aenter__()

    async def _close(self) -> None:
        await self._engine.aclose()

    def _asked(
        self,
        context: object,
        question: str | None,
        output_type: Any,
        model: Given | None,
        limits: RunLimits | ReplLimits | None,
        timeout_s: float | None,
    ) -> RunRequest:
        return replace(
            self._request,
            context=context,
            question=question,
            output_type=None if output_type is None else OutputType(output_type),
            model=model,
            warns=True,
            limits=limits_of_a_run(self.limits, limits, timeout_s, keeps_repl=self._engine.keeps_repl),
        )

    def _started(self, asked: RunRequest, tools: Tools | Mapping[str, Any] | None, on_event: Emit | None) -> Run[Any]:
        request = replace(
            asked,
            tools=asked.tools if tools is None else tools if isinstance(tools, Tools) else Tools(tools),
            receivers=(*asked.receivers, *_receivers(on_event)),
            tells_text=True,
        )
        return self._engine.start(request, is_followed=True, outlives_caller=True)


def _require_apart(model: object, sub_model: object, models: Models, handler: object) -> None:
    """Refuse models beside a handler or a recording, since both bring their own."""
    has_models = model is not None or sub_model is not None
    if handler is not None and (has_models or models.needs_own_handler):
        raise ConfigurationError("give either models or a handler: a handler brings its own models")
    if models.replay is not None and has_models:
        raise ConfigurationError("give either models or a recording to replay: it brings its own models")


def _shown_events() -> Emit:
    """Return the callback of a verbose run: a display in a notebook, else lines on stderr."""
    from rlm_broker.watch.notebook import notebook_progress
    from rlm_broker.watch.terminal import print_events

    return notebook_progress() or print_events


def _instructions_of(given: Instructions | str | Callable[[int], str] | None) -> Instructions:
    return given if isinstance(given, Instructions) else Instructions(given)


def _receivers(on_event: Emit | None) -> tuple[Callback, ...]:
    return () if on_event is None else (Callback(on_event, "on_event"),)
