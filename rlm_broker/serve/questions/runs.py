"""Runs that requests ask for: their beginning, how responses follow them, and how results of tools resume them.

Theory of operation
-------------------
`Asking.begin` makes a run of a request and its conversation. The response follows the run
(`Asked.steps` or `Asked.outcome`) within `Asked.joined`: the run ends when the client leaves.

When code calls a tool of the client, the block waits, and with it the run: nothing of its state is stored or replayed.
The response ends with the calls (`RunOutcome.calls`). The run outlives it for `tool_wait_s`, and is cancelled then. The
client's next request brings the results. Its calls are found by their ids (`Asking.resumed`), and its response follows
the same run from the event at which the one before ended. The times of the limits, for example `run_timeout_s`, go on
meanwhile.
"""

import asyncio
import contextlib
import json
import weakref
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Final

from starlette.types import ASGIApp, Receive, Scope, Send

from rlm_broker import (
    RLM,
    Block,
    BlockEnded,
    CallStarted,
    CallText,
    Completion,
    ConfigurationError,
    Event,
    EventsMissed,
    LimitReached,
    PersistentRepl,
    Replied,
    RunLimits,
    RunStarted,
    Tools,
    Usage,
)
from rlm_broker.events.story import printed
from rlm_broker.serve.errors import ApiError
from rlm_broker.serve.hosting.owner import Owner
from rlm_broker.serve.hosting.runs import HostedRun, HostedRuns, Repeat
from rlm_broker.serve.materials import Material
from rlm_broker.serve.questions.client_tools import ClientCall, ClientTools, forced_call
from rlm_broker.serve.questions.conversation import Dialogue, RunQuestion
from rlm_broker.serve.questions.request import AnswerForm, DialectRequest, ServedModel
from rlm_broker.serve.settings import ServeSettings
from rlm_broker.values.text import shorten


@dataclass(frozen=True, slots=True)
class RunOutcome:
    """The end of a response: an answer, the limit that ended the run, or calls of the client's functions.

    Attributes:
        usage: Usage of the run and all below it so far.
        text: Answer, or the best one so far; if there is none, a sentence on what ended the run. Empty with calls.
        calls: Calls waiting for results of the client.
        limit: Name of the limit that ended the run, or None.
        is_stopped: Whether the run was stopped.
        facts: Further facts about an ended run, for the object `rlm`.
    """

    usage: Usage
    text: str = ""
    calls: tuple[ClientCall, ...] = ()
    limit: str | None = None
    is_stopped: bool = False
    facts: Mapping[str, Any] = field(default_factory=dict)

    @property
    def is_whole(self) -> bool:
        """Whether the response is complete: no limit and no stop has cut it."""
        return self.limit is None and not self.is_stopped


def outcome_of(ended: Completion | LimitReached, form: AnswerForm) -> RunOutcome:
    """Return the outcome of a run.

    Args:
        ended: Its completion, or the limit that ended it.
        form: Form of the answer, as requested. An answer of a type is reported as JSON.
    """
    is_stopped = not isinstance(ended, LimitReached) and ended.is_stopped
    facts = {
        "stopped": is_stopped,
        "isolation": None if ended.isolation is None else ended.isolation.level,
        "turns": len(ended.trajectory) if isinstance(ended, LimitReached) else ended.iterations,
        "seconds": round(ended.execution_time, 3),
    }
    made = RunOutcome(ended.usage_summary.total, limit=ended.limit, is_stopped=is_stopped, facts=facts)
    if isinstance(ended, LimitReached):
        reached = f"the limit {ended.limit} = {ended.allowed:,.10g} was reached before there was an answer"
        return replace(made, text=ended.partial_answer or reached)
    if is_stopped:
        return replace(made, text=ended.response or "the run was stopped before there was an answer")
    if form.forced and ended.limit is None:
        return replace(made, calls=(forced_call(form.forced, ended.parsed),))
    text = ended.response
    if form.output_type is not None and (text is not None or ended.limit is None):
        text = json.dumps(ended.parsed, ensure_ascii=False)
    if text is None and ended.limit is not None:
        text = f"the limit {ended.limit} was reached before there was an answer"
    return replace(made, text=text or "")


SHOWN_CHARS: Final = 2_000
"""Characters shown of a block's output; of longer output, the beginning and the end."""
PREVIEW_CHARS: Final = 200
"""Characters shown of a child run's question."""


class Telling:
    """Makes text of the events of one run, in their order. Replies come as they are written, if the client streams."""

    def __init__(self) -> None:
        self._call = 0
        self._is_streamed = False

    def text(self, event: Event) -> str:
        """Return the text of an event; empty if it has none."""
        match event:
            case EventsMissed():
                return f"\n({event.count:,} events are left out: the client reads too slowly)\n"
            case RunStarted() if event.depth:
                return f"\n> run {event.run}: {shorten(' '.join((event.question or '').split()), PREVIEW_CHARS)}\n"
            case CallStarted() if not event.depth and not event.block:
                self._call, self._is_streamed = event.call, False
            case CallText() if event.call == self._call:
                self._is_streamed = True
                return event.text
            case Replied() if not event.depth:
                return "\n\n" if self._is_streamed else f"{event.text}\n\n"
            case BlockEnded() if not event.depth:
                return _fenced(event.outcome)
        return ""


def output_of(block: Block) -> str:
    """Return what a block has printed, and the reason of its end unless stderr has told it already."""
    return "\n".join(piece.text.rstrip("\n") for piece in printed(block) if piece.text.strip())


def _fenced(block: Block) -> str:
    said = output_of(block)
    if not said:
        return ""
    fence = "```"
    while fence in said:
        fence += "`"
    return f"{fence}text\n{shorten(said, SHOWN_CHARS)}\n{fence}\n\n"


RUN_HEADER: Final = "x-rlm-run"
"""Header of a response with the id of its run."""


@dataclass(frozen=True, slots=True)
class Since:
    """The point of a run at which a response ended, and the next one goes on.

    Attributes:
        event: Number of the last reported event.
        usage: Reported usage.
    """

    event: int = 0
    usage: Usage = field(default_factory=Usage)

    def more(self, usage: Usage) -> tuple[int, int, int]:
        """Return the tokens read, those cached of them, and those written since then."""
        read, cached, written = (
            getattr(usage, name) - getattr(self.usage, name)
            for name in ("total_input_tokens", "cached_input_tokens", "total_output_tokens")
        )
        return read, cached, written


BEGINNING = Since()
"""The point at which the first response of a run begins."""


@dataclass(eq=False)
class Asked:
    """A run that requests have asked for. `Asking.begin` makes it.

    Attributes:
        hosted: The run.
        model: Name of the model, as the client gave it.
        tools: Tools of the client.
        form: Form of the answer, as requested.
        ignored: Fields and tools of the request without effect.
        since: End of the last response with calls of tools.
        about: What the interface keeps with the run, or None.
    """

    hosted: HostedRun
    model: str
    tools: ClientTools
    form: AnswerForm
    ignored: Sequence[str]
    _outlives_s: float | None
    _offered: "weakref.WeakValueDictionary[str, Asked]"
    since: Since = BEGINNING
    about: Any = None

    @contextlib.asynccontextmanager
    async def joined(self) -> AsyncIterator["Asked"]:
        """Follow the run within the block; see `HostedRun.joined`."""
        async with self.hosted.joined():
            self.hosted.outlive(self._outlives_s)
            yield self

    def told(self, end: RunOutcome) -> dict[str, Any]:
        """Return the object `rlm` of a response with this end."""
        told = {"run": self.hosted.id, "cost_usd": end.usage.total_cost, "calls": end.usage.total_calls}
        return {**told, "limit": end.limit, **end.facts, **({"ignored": [*self.ignored]} if self.ignored else {})}

    async def outcome(self) -> RunOutcome:
        """Wait for the end of the run, or until it waits for the client's tools.

        Raises:
            RunFailed: The run has failed or was cancelled. A limit that ended it is an outcome.
        """
        if not self.tools:
            return await self._ended()
        ended: asyncio.Future[Any] = asyncio.ensure_future(self._ended())
        wanted: asyncio.Future[Any] = asyncio.ensure_future(self.tools.wanted())
        try:
            await asyncio.wait({ended, wanted}, return_when=asyncio.FIRST_COMPLETED)
            return ended.result() if ended.done() else self._suspended(wanted.result(), self.hosted.last_event)
        finally:
            await _gone(ended, wanted)

    async def steps(self, since: Since = BEGINNING) -> AsyncIterator[Event | RunOutcome]:
        """Yield the events of the run, and at last its outcome, or open calls of the client's tools.

        Args:
            since: Point at which the response before has ended.

        Raises:
            RunFailed: As for `outcome`.
        """
        last, events = since.event, self.hosted.run.events(since.event)
        wanted = asyncio.ensure_future(self.tools.wanted()) if self.tools else None
        following: asyncio.Future[Any] | None = None
        try:
            while wanted is not None:
                following = following or asyncio.ensure_future(_next(events))
                await asyncio.wait({following, wanted}, return_when=asyncio.FIRST_COMPLETED)
                if not following.done():
                    break
                event, following = following.result(), None
                if event is None:
                    break
                last = event.n
                yield event
            if wanted is None:
                async for event in events:
                    yield event
            elif wanted.done() and not self.hosted.run.is_done:
                yield self._suspended(wanted.result(), last)
                return
            yield await self._ended()
        finally:
            await _gone(wanted, following)
            await events.aclose()  # type: ignore[attr-defined]

    async def _ended(self) -> RunOutcome:
        try:
            return outcome_of(await self.hosted.completion(), self.form)
        except LimitReached as limit:
            return outcome_of(limit, self.form)

    def _suspended(self, calls: list[ClientCall], last: int) -> RunOutcome:
        self.hosted.outlive(self.tools.wait_s)
        for call in calls:
            self._offered[call.id] = self
        self.since = Since(last, self.hosted.usage)
        return RunOutcome(self.hosted.usage, calls=tuple(calls))


class Asking:
    """Begins and resumes the runs that requests ask for."""

    def __init__(self, rlm: RLM, runs: HostedRuns, settings: ServeSettings) -> None:
        self._rlm = rlm
        self._runs = runs
        self._settings = settings
        self._offered: weakref.WeakValueDictionary[str, Asked] = weakref.WeakValueDictionary()

    async def begin(
        self,
        owner: Owner,
        request: DialectRequest,
        said: Dialogue,
        model: ServedModel,
        earlier: Sequence[Material],
        *,
        repl: PersistentRepl | None = None,
        outlives_s: float | None = 0.0,
        repeat: Repeat | None = None,
    ) -> Asked:
        """Begin a run, or return the run of an earlier equal request.

        The caller joins it before it awaits anything else: else the run would go on if the client left meanwhile.

        Args:
            owner, request, said, model: Owner, request, its conversation, and its model.
            earlier: Files of earlier messages.
            outlives_s: Seconds the run goes on without a follower; None is to its end.
            repl, repeat: As for `HostedRuns.begin`.

        Raises:
            ApiError, ConfigurationError: 400: the request cannot be used.
            Busy, MoneySpent, NotAllowed, UnknownHandle: As for `HostedRuns.begin` and `RunQuestion.context`.
        """
        form, limits, ignored = await request.form(owner), request.limits(), request.ignored()
        question = RunQuestion.of(said, request.options, model, earlier, self._settings.inline_chars)
        if model.is_plain:
            ignored += ["tools"] if form.tools else []
            form = replace(form, tools=())
            limits = RunLimits(**(limits.given if limits else {}) | {"max_depth": 0})
        tools = ClientTools(form.tools, self._settings.tool_wait_s, one_at_a_time=request.is_single)
        every = await self._tools({**question.variables(), **tools.functions()})
        context = await question.context(model)
        try:
            hosted = self._runs.begin(
                owner,
                context,
                question.text,
                model=model.model,
                limits=limits,
                instructions=question.instructions(self._rlm.instructions),
                output_type=form.output_type,
                tools=every,
                repl=repl,
                task=question.task,
                repeat=repeat,
                on_end=context.close,
            )
        except BaseException:
            context.close()
            raise
        if isinstance(hosted.about, Asked):
            context.close()
            return hosted.about
        named = tuple(dict.fromkeys(ignored))
        asked = hosted.about = Asked(hosted, model.name, tools, form, named, outlives_s, self._offered)
        tools.away = lambda: self._runs.away(hosted)
        return asked

    async def _tools(self, added: Mapping[str, Any]) -> Tools | None:
        """Return the tools of the server with further ones; None if there is none."""
        try:
            return await asyncio.to_thread(self._rlm.tools.extended, added) if added else None
        except ConfigurationError as error:
            raise ApiError(400, str(error), param="tools") from None

    def resumed(self, owner: Owner, said: Dialogue, param: str) -> Asked | None:
        """Hand the results of a conversation to the run waiting for them, and return it.

        A run that has ended meanwhile, for example by a limit, is returned as well, so that its client is informed.

        Args:
            owner: Owner of the run.
            said: The conversation.
            param: Field of the request with the ids of calls.

        Returns:
            The run; None if there are no results, or none waits for them. Then a new run goes on with the conversation.

        Raises:
            ApiError: 404: no run waits, and no question could begin a new one. 400: a result is missing, or the calls
                belong to several runs.
        """
        results = said.results
        if not results:
            return None
        offered = {asked for id in results if (asked := self._offered.get(id)) is not None}
        found = [each for each in offered if each.hosted.owner == owner and not each.hosted.run.was_cancelled]
        if not found and said.last:
            return None
        if not found:
            why = f"no run waits for the call {list(results)[-1][:100]!r}: it was cancelled, or never existed"
            raise ApiError(404, why, code="not_found", param=param)
        if len(found) > 1:
            raise ApiError(400, "the results belong to several runs: send those of one run", param=param)
        (asked,) = found
        asked.tools.answer(results)
        return asked


async def _next(events: AsyncIterator[Event]) -> Event | None:
    return await anext(events, None)


async def _gone(*tasks: "asyncio.Future[Any] | None") -> None:
    """Cancel what is still waited for."""
    waiting = [task for task in tasks if task is not None]
    for task in waiting:
        task.cancel()
    await asyncio.gather(*waiting, return_exceptions=True)


class Following:
    """An ASGI response that follows a run from its beginning to its end: the run ends with its client."""

    def __init__(self, asked: Asked, response: ASGIApp) -> None:
        self._asked = asked
        self._response = response

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send the response."""
        async with self._asked.joined():
            await self._response(scope, receive, send)
