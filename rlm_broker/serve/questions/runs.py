"""Runs that requests ask for: their beginning, how responses follow them, and how results of tools resume them.

Theory of operation
-------------------
A request becomes a `QuestionRequest`, and `Asking.begin` makes a run of it. The response follows the run
(`Asked.steps` or `Asked.outcome`) within `Asked.joined`, so that the run ends when the client leaves.

When code calls a tool of the client, the block waits, and with it the run: nothing of its state is stored or replayed.
The response ends with the calls (`Suspended`). The run outlives it for `tool_wait_s`, and is cancelled then. The
client's next request brings the results. Its calls are found by their ids (`Asking.resumed`), and its response follows
the same run from the event at which the one before ended. The times of the limits, such as `run_timeout_s`, go on
meanwhile.
"""

import asyncio
import contextlib
import weakref
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from starlette.types import ASGIApp, Receive, Scope, Send

from rlm_broker.errors import ConfigurationError, LimitReached
from rlm_broker.events.event import Event
from rlm_broker.results import Completion
from rlm_broker.rlm import RLM
from rlm_broker.serve.errors import ApiError
from rlm_broker.serve.hosting.owner import Owner
from rlm_broker.serve.hosting.runs import HostedRun, HostedRuns
from rlm_broker.serve.questions.client_tools import ClientCall, ClientTools
from rlm_broker.serve.questions.outcome import RunOutcome, outcome_of
from rlm_broker.serve.questions.question import QuestionRequest, about
from rlm_broker.usage import Usage


@dataclass(frozen=True, slots=True)
class Suspended:
    """A run waits for results of the client's tools.

    Attributes:
        calls: Calls without a result.
        usage: Usage of the run and all below it so far.
    """

    calls: tuple[ClientCall, ...]
    usage: Usage


@dataclass(frozen=True, slots=True)
class Since:
    """The point of a run at which a response ended, and the next one goes on.

    Attributes:
        event: Number of the last event that was told.
        usage: Usage that was told.
    """

    event: int = 0
    usage: Usage = field(default_factory=Usage)


BEGINNING = Since()
"""The point at which the first response of a run begins."""


class Asked:
    """A run that requests have asked for. `Asking.begin` makes it.

    Attributes:
        hosted: The run.
        model: Name of the model, as the client gave it.
        tools: Tools of the client.
        since: Point at which the last response with calls of tools has ended.
        about: What the interface keeps with the run, or None.
    """

    def __init__(self, hosted: HostedRun, wanted: QuestionRequest, tools: ClientTools, offered: "_Offered") -> None:
        self.hosted = hosted
        self.model = wanted.model.name
        self.tools = tools
        self.since = BEGINNING
        self.about: Any = None
        self._is_typed = wanted.output_type is not None
        self._outlives_s = wanted.outlives_s
        self._offered = offered

    @contextlib.asynccontextmanager
    async def joined(self) -> AsyncIterator["Asked"]:
        """Follow the run within the block; see `HostedRun.joined`."""
        async with self.hosted.joined():
            self.hosted.outlive(self._outlives_s)
            yield self

    async def outcome(self) -> RunOutcome | Suspended:
        """Wait for the end of the run, or until it waits for the client's tools.

        Raises:
            RunFailed: The run has failed or was cancelled. A limit that ended it is an outcome.
        """
        ended: asyncio.Future[Any] = asyncio.ensure_future(self._ended())
        wanted: asyncio.Future[Any] = asyncio.ensure_future(self.tools.wanted())
        try:
            await asyncio.wait({ended, wanted}, return_when=asyncio.FIRST_COMPLETED)
            return ended.result() if ended.done() else self._suspended(wanted.result(), self.hosted.last_event)
        finally:
            await _gone(ended, wanted)

    async def steps(self, since: Since = BEGINNING) -> AsyncIterator[Event | RunOutcome | Suspended]:
        """Yield the events of the run, and at last its outcome, or that it waits for the client's tools.

        Args:
            since: Point at which the response before has ended.

        Raises:
            RunFailed: As for `outcome`.
        """
        last = since.event
        events = self.hosted.events(last)
        wanted = asyncio.ensure_future(self.tools.wanted()) if self.tools else None
        try:
            if wanted is None:
                async for event in events:
                    yield event
            else:
                async with contextlib.aclosing(_until(events, wanted)) as known:
                    async for event in known:
                        last = event.n
                        yield event
                if wanted.done() and not self.hosted.run.is_done:
                    yield self._suspended(wanted.result(), last)
                    return
            yield await self._ended()
        finally:
            await _gone(wanted)
            await events.aclose()  # type: ignore[attr-defined]

    async def _ended(self) -> RunOutcome:
        ended: Completion | LimitReached
        try:
            ended = await self.hosted.completion()
        except LimitReached as limit:
            ended = limit
        return outcome_of(ended, is_typed=self._is_typed)

    def _suspended(self, calls: list[ClientCall], last: int) -> Suspended:
        self.hosted.outlive(self.tools.wait_s)
        for call in calls:
            self._offered[call.id] = self
        usage = self.hosted.usage
        self.since = Since(last, usage)
        return Suspended(tuple(calls), usage)


_Offered = weakref.WeakValueDictionary[str, Asked]


class Asking:
    """Begins and resumes the runs that requests ask for.

    Args:
        rlm: The open `RLM` that answers.
        runs: Runs of all owners.
        tool_wait_s: Seconds for which a run waits for the result of a tool of the client.
    """

    def __init__(self, rlm: RLM, runs: HostedRuns, tool_wait_s: float) -> None:
        self._rlm = rlm
        self._runs = runs
        self._tool_wait_s = tool_wait_s
        self._offered: _Offered = weakref.WeakValueDictionary()
        self._closing: set[asyncio.Task[None]] = set()

    async def begin(self, owner: Owner, wanted: QuestionRequest) -> Asked:
        """Begin a run, or return the one that the same request has begun before.

        The caller joins it before it awaits anything else: else the run would go on if the client left meanwhile.

        Raises:
            ApiError, ConfigurationError: 400: the request cannot be used.
            Busy, MoneySpent, NotAllowed, UnknownHandle: As for `HostedRuns.begin` and `about`.
        """
        tools = ClientTools(wanted.tools, self._tool_wait_s, one_at_a_time=wanted.one_at_a_time)
        added = {**wanted.variables(), **tools.functions()}
        try:
            every = await asyncio.to_thread(self._rlm.tools.extended, added) if added else None
        except ConfigurationError as error:
            raise ApiError(400, str(error), param="tools") from None
        is_about = await about(wanted)
        try:
            hosted = self._runs.begin(
                owner,
                is_about.context,
                is_about.question,
                model=wanted.model.model,
                limits=wanted.limits,
                instructions=wanted.instructions(self._rlm.instructions),
                output_type=wanted.output_type,
                tools=every,
                repl=wanted.repl,
                task=wanted.task,
                key=wanted.key,
                fingerprint=wanted.fingerprint,
            )
        except BaseException:
            is_about.close()
            raise
        if isinstance(hosted.about, Asked):
            is_about.close()
            return hosted.about
        asked = hosted.about = Asked(hosted, wanted, tools, self._offered)
        tools.away = lambda: self._runs.away(hosted)
        closing = asyncio.ensure_future(_closed_after(hosted.run.ended(), is_about.close))
        self._closing.add(closing)
        closing.add_done_callback(self._closing.discard)
        return asked

    def resumed(self, owner: Owner, results: Mapping[str, str], param: str) -> Asked:
        """Hand results of tools to the run that waits for them, and return it.

        Args:
            owner: Owner of the run.
            results: Id of a call → its result.
            param: Field of the request that has the ids.

        A run that has ended meanwhile, for example by a limit, is returned as well, so that its client is told.

        Raises:
            ApiError: 404: no run of the owner waits for a call of that id. 400: a result is missing, or the calls
                belong to several runs.
        """
        found: dict[int, Asked] = {}
        for call in results:
            asked = self._offered.get(call)
            if asked is None or asked.hosted.owner != owner or asked.hosted.run.was_cancelled:
                why = "it waited too long, was cancelled, or never existed"
                raise ApiError(404, f"no run waits for the call {call!r}: {why}", code="not_found", param=param)
            found[id(asked)] = asked
        if len(found) != 1:
            raise ApiError(400, "the results belong to several runs: send those of one run", param=param)
        asked = next(iter(found.values()))
        asked.tools.answer(results)
        return asked


async def _until(events: AsyncIterator[Event], end: "asyncio.Future[Any]") -> AsyncGenerator[Event, None]:
    """Yield the events that there are, until `end` is done and no further event is there."""
    following: asyncio.Future[Event | None] | None = None
    try:
        while True:
            following = following or asyncio.ensure_future(_next(events))
            await asyncio.wait({following, end}, return_when=asyncio.FIRST_COMPLETED)
            if not following.done():
                return
            event, following = following.result(), None
            if event is None:
                return
            yield event
    finally:
        await _gone(following)


async def _next(events: AsyncIterator[Event]) -> Event | None:
    return await anext(events, None)


async def _gone(*tasks: "asyncio.Future[Any] | None") -> None:
    """Cancel what is still waited for."""
    waiting = [task for task in tasks if task is not None]
    for task in waiting:
        task.cancel()
    await asyncio.gather(*waiting, return_exceptions=True)


async def _closed_after(end: Awaitable[None], close: Callable[[], None]) -> None:
    try:
        await end
    finally:
        close()


class Following:
    """An ASGI response that follows a run from its beginning to its end, so that the run ends with its client.

    Args:
        asked: The run.
        response: What is sent.
    """

    def __init__(self, asked: Asked, response: ASGIApp) -> None:
        self._asked = asked
        self._response = response

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send the response."""
        async with self._asked.joined():
            await self._response(scope, receive, send)
