"""Runs of many owners in one process: a bounded number at once, a fair queue, and handles that outlive a request.

Theory of operation
-------------------
A request begins a run (`HostedRuns.begin`) and follows it (`HostedRun.joined`). The run exists at once, with its id and
its events, and waits for its place in its own task (`place` of `RLM.start`). So a request leaving the queue cancels
a run, and not a queue of its own, and a later one finds a queued run like any other.

- Fairness: places go round the owners (`FairSemaphore`), and an owner with a thousand requests delays no other.
  Where the queue is full, an owner without a run in it may still wait with one. A run waiting for its client gives
  its place away.
- Life: a run ends when its last follower has left, unless it may outlive them (`HostedRun.outlive`).
- Money: each ended call is counted for its owner. When the day's money is spent, the owner's runs are stopped,
  with their best answers so far. The run that has spent the last of it may answer by that call, and begins no other.
  Calls under way then are paid in addition.
- Memory: ended runs are kept for a time, for later questions about their events and answers. The oldest go when
  there are too many, or when their events have too many characters.
"""

import asyncio
import contextlib
import time
import weakref
from collections.abc import AsyncIterator, Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Final, Literal, TypedDict, Unpack

from rlm_broker import (
    RLM,
    CallEnded,
    CallStarted,
    Completion,
    ConfigurationError,
    Emit,
    Event,
    FairSemaphore,
    Instructions,
    PersistentRepl,
    Run,
    RunLimits,
    RunProgress,
    Tools,
    Usage,
)
from rlm_broker.serve.hosting.owner import Busy, EndedThings, Owner, Purse, UnknownHandle
from rlm_broker.watch.board import BOARD

KEPT_CHARS: Final = 1 << 28
"""Characters of the events of all ended runs that are kept."""
STOP_GRACE_S: Final = 10.0
"""Seconds for a stopped run to end with an answer, before a drain cancels it."""
RETRY_AFTER_S: Final = 5.0
"""Seconds until a refused request may find a place in the queue."""
TASK_CHARS: Final = 500
"""Characters of a task shown in lists of runs."""


Repeat = tuple[str, str]
"""Idempotency key of a request, and its digest."""
RunState = Literal["queued", "running", "ended"]


class StartOptions(TypedDict, total=False):
    """Arguments of `RLM.start` that a request may give."""

    model: str | None
    instructions: Instructions | None
    output_type: Any
    tools: Tools | None
    repl: PersistentRepl | None


@dataclass(eq=False)
class HostedRun:
    """One run of an owner. `HostedRuns.begin` makes it.

    Attributes:
        owner: Owner of the run.
        task: Beginning of its task in the context; None if it has a question, or is not known.
        repeat: Idempotency key and digest of its request, or None.
        run: Handle on the run.
        keeping: Ends when the run has ended and is kept.
        created_at: Unix time in seconds.
        began_at: Unix time in seconds of its start, or None.
        ended_at: Unix time in seconds of its end, or None.
        is_paid: Whether a model was called: the same request sent again would be paid again.
        last_event: Number of its last event so far.
        about: What the beginner of the run keeps with it, or None.
        progress: What its tree does at this moment.
        has_place: Whether it counts for the number of runs at the same time.
        calls_away: Number of its calls waiting for its client; see `HostedRuns.away`.
        returning: Waits for a place again after that; None if the run does not.
    """

    owner: Owner
    task: str | None
    repeat: Repeat | None
    run: Run = field(init=False)
    keeping: "asyncio.Task[None]" = field(init=False)
    created_at: float = field(default_factory=time.time)
    began_at: float | None = None
    ended_at: float | None = None
    is_paid: bool = False
    last_event: int = 0
    about: Any = None
    progress: RunProgress = field(default_factory=RunProgress)
    has_place: bool = False
    calls_away: int = 0
    returning: "asyncio.Future[None] | None" = None
    _followers: int = 0
    _outlives_s: float | None = 0.0
    _timer: asyncio.TimerHandle | None = None

    @property
    def id(self) -> str:
        """Id of the run."""
        return self.run.id

    @property
    def state(self) -> RunState:
        """Whether the run waits for its place, goes on, or has ended."""
        return "ended" if self.run.is_done else "queued" if self.began_at is None else "running"

    @property
    def is_away(self) -> bool:
        """Whether the run waits for its client, and has given its place to another one."""
        return self.calls_away > 0 and not self.has_place and not self.run.is_done

    @property
    def usage(self) -> Usage:
        """Usage of the run and all below it, by ended calls."""
        return self.progress.usage

    @property
    def doing(self) -> str:
        """Activity of the run at this moment, in a few words; empty after its end."""
        return {"queued": "waits for its turn", "running": self.progress.doing, "ended": ""}[self.state]

    async def completion(self) -> Completion:
        """Return the completion. The run goes on if the caller is cancelled: `joined` decides about its end.

        Raises:
            RunFailed: The run has failed, reached a limit or was cancelled.
        """
        if not self.keeping.done():
            await asyncio.wait({self.keeping})
        return self.run.result()

    def stop(self, *, now: bool = False) -> None:
        """End the run with the best answer so far; now, or while it has no place yet, without an answer."""
        end = self.run.cancel if now or self.began_at is None else self.run.stop
        end()

    def outlive(self, seconds: float | None) -> None:
        """Let the run go on for so many seconds after its last follower has left.

        Args:
            seconds: 0 ends it with its last follower; None lets it go on to its end.
        """
        self._outlives_s = seconds
        self._wait_alone()

    @contextlib.asynccontextmanager
    async def joined(self) -> AsyncIterator["HostedRun"]:
        """Follow the run within the block. When its last follower leaves, it ends, unless it may outlive them.

        All its processes have ended then, when the block is left.
        """
        self._followers += 1
        self._wait_alone()
        try:
            yield self
        finally:
            self._followers -= 1
            self._wait_alone()
            if not self._followers and self._outlives_s == 0:
                await asyncio.wait({self.keeping})

    def _wait_alone(self) -> None:
        """Set the time at which the run ends, if it has no follower."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if self._followers or self._outlives_s is None or self.run.is_done:
            return
        if self._outlives_s == 0:
            self.run.cancel()
        else:
            self._timer = asyncio.get_running_loop().call_later(self._outlives_s, self.run.cancel)


class HostedRuns:
    """Runs of all owners in one process. Lives on the event loop of its `RLM`.

    A request costs the same however many runs are kept: no call looks at ended runs.

    Args:
        rlm: The open `RLM`.
        max_runs: Runs at the same time.
        max_queue: Runs in the queue for a place.
        keep_s: Seconds an ended run is kept.
        most_kept: Ended runs kept, of all owners together.
        on_event: Called with each event of each run.
    """

    def __init__(
        self,
        rlm: RLM,
        *,
        max_runs: int = 64,
        max_queue: int = 1_000,
        keep_s: float = 3_600.0,
        most_kept: int = 1_000,
        on_event: Emit | None = None,
    ) -> None:
        self._rlm = rlm
        self._places = FairSemaphore(max_runs)
        self._max_runs = max_runs
        self._max_queue = max_queue
        self._on_event = on_event
        self._live: dict[str, HostedRun] = {}
        """Runs by id, until they have ended and are kept."""
        self._queued: set[HostedRun] = set()
        self._running: set[HostedRun] = set()
        self._ended = EndedThings[HostedRun](most_kept, KEPT_CHARS, keep_s)
        self._keys: weakref.WeakValueDictionary[tuple[str, str], HostedRun] = weakref.WeakValueDictionary()
        self._purses: dict[str, Purse] = {}
        self._is_draining = False

    @property
    def queued(self) -> int:
        """Runs waiting for a place."""
        return len(self._queued)

    @property
    def running(self) -> int:
        """Runs with a place, or waiting for their client."""
        return len(self._running)

    def all(self) -> list[HostedRun]:
        """Return all runs of all owners, the kept ended ones first."""
        return [*self._ended, *self._live.values()]

    def of(self, owner: Owner) -> list[HostedRun]:
        """Return all runs of an owner, the kept ended ones first."""
        return [hosted for hosted in self.all() if hosted.owner == owner]

    def get(self, owner: Owner, id: str) -> HostedRun:
        """Find a run by its id.

        Raises:
            UnknownHandle: The owner has no such run, or it ended too long ago.
        """
        hosted = self._live.get(id) or self._ended.get(id)
        if hosted is None or hosted.owner != owner:
            raise UnknownHandle(f"there is no run {id[:100]!r}: it ended too long ago, or never existed")
        return hosted

    def begin(
        self,
        owner: Owner,
        context: object,
        question: str | None,
        *,
        limits: RunLimits | None = None,
        task: str | None = None,
        repeat: Repeat | None = None,
        on_end: Callable[[], None] | None = None,
        **given: Unpack[StartOptions],
    ) -> HostedRun:
        """Begin a run, or return the run of an earlier equal request.

        Args:
            owner: Owner of the run.
            context, question: As for `RLM.start`.
            limits: Limits of the request. The owner's limits hold as well: the smaller one of each.
            task: Beginning of the task, to be shown where there is no question.
            repeat: Idempotency key of the request and its digest, which must be the same for the same key; or None.
            on_end: Called at the end of a run begun now.
            given: Further arguments of `RLM.start`.

        Raises:
            Busy: The queue is full, or the service is about to end.
            MoneySpent, NotAllowed: The owner has no money left, or may not use the model.
            ConfigurationError: An argument cannot be used, or the key belongs to another request.
        """
        if repeat is not None and (known := self._known(owner, repeat)) is not None:
            if known.repeat != repeat:
                raise ConfigurationError("this Idempotency-Key was used for another request: send a new one")
            return known
        if self._is_draining:
            raise Busy("the service is about to end: send the request again later", RETRY_AFTER_S)
        owner.require_model(given.get("model") or self._rlm.handler.get_client(depth=0).model_name)
        purse = self._purses.setdefault(owner.name, Purse(owner))
        purse.require_some()
        self._require_room(owner)
        hosted = HostedRun(owner, task and task[:TASK_CHARS], repeat)
        hosted.run = self._rlm.start(
            context,
            question,
            limits=tightened(self._rlm.limits, owner.limits, limits, purse.left_usd),
            place=self._place(hosted),
            on_event=self._counting(hosted, purse),
            **given,
        )
        if repeat is not None:
            self._keys[owner.name, repeat[0]] = hosted
        self._live[hosted.id] = hosted
        self._queued.add(hosted)
        BOARD.set_owner(hosted.id, owner.name, hosted.task)
        BOARD.set_queued(hosted.id, True)
        hosted.keeping = asyncio.get_running_loop().create_task(self._kept(hosted, on_end))
        return hosted

    @contextlib.asynccontextmanager
    async def away(self, hosted: HostedRun) -> AsyncIterator[None]:
        """Give the place of a run to another one while the run waits for its client, within the block.

        The run waits for a place again after that. A cancelled call, for example with its block, does not wait:
        the run goes on, and takes the next free place. Beyond `max_runs` runs of one owner waiting so, their
        places stay theirs: each of them has a REPL.
        """
        waiting = sum(other.is_away for other in self._running if other.owner == hosted.owner)
        hosted.calls_away += 1
        if hosted.has_place and waiting < self._max_runs:
            hosted.has_place = False
            self._places.release()
        try:
            yield
        finally:
            hosted.calls_away -= 1
            if not (hosted.has_place or hosted.calls_away or hosted.returning or hosted.ended_at):
                hosted.returning = asyncio.ensure_future(self._returned(hosted))
        if hosted.returning is not None and not hosted.calls_away:
            await asyncio.wait({hosted.returning})

    async def drain(self, drain_s: float) -> None:
        """Begin no run any more, let all end for `drain_s` seconds, and stop the rest with their best answers so far.

        A second call may shorten the time.
        """
        self._is_draining = True
        for hosted in list(self._queued):
            hosted.run.cancel()
        for wait_s, may_answer in ((drain_s, True), (STOP_GRACE_S, False), (None, False)):
            if self._live:
                await asyncio.wait([hosted.keeping for hosted in self._live.values()], timeout=wait_s)
            for hosted in list(self._live.values()):
                hosted.stop(now=not may_answer)

    @contextlib.asynccontextmanager
    async def _place(self, hosted: HostedRun) -> AsyncIterator[None]:
        try:
            await self._places.acquire(hosted.owner.name)
        finally:
            self._queued.discard(hosted)
        hosted.began_at, hosted.has_place = time.time(), True
        self._running.add(hosted)
        BOARD.set_queued(hosted.id, False)
        try:
            yield
        finally:
            hosted.ended_at = time.time()
            self._running.discard(hosted)
            if hosted.returning is not None:
                hosted.returning.cancel()
            if hosted.has_place:
                hosted.has_place = False
                self._places.release()

    async def _returned(self, hosted: HostedRun) -> None:
        """Take a place again for a returning run. The end of the run cancels it."""
        try:
            await self._places.acquire(hosted.owner.name)
            hosted.has_place = True
        finally:
            hosted.returning = None

    async def _kept(self, hosted: HostedRun, on_end: Callable[[], None] | None) -> None:
        """Wait for the end of a run, and keep it for its time."""
        await hosted.run.ended()
        self._queued.discard(hosted)  # a run cancelled at once never waits for its place
        del self._live[hosted.id]
        self._ended.add(hosted.id, hosted, hosted.owner.name, hosted.run.kept_chars)
        if on_end is not None:
            on_end()

    def _known(self, owner: Owner, repeat: Repeat) -> HostedRun | None:
        """Return the run of an earlier request with this key, if it goes on or is kept."""
        known = self._keys.get((owner.name, repeat[0]))
        is_kept = known is not None and (known.id in self._live or self._ended.get(known.id) is known)
        return known if is_kept else None

    def _require_room(self, owner: Owner) -> None:
        """Refuse a run if the queue is full. An owner without a run in it may always wait with one.

        Raises:
            Busy: The queue is full.
        """
        if self._places.taken + self.queued < self._max_runs + self._max_queue:
            return
        if any(hosted.owner == owner for hosted in self._queued) or not self._max_queue:
            raise Busy(f"all places are taken, and {self._max_queue:,} runs wait: try again later", RETRY_AFTER_S)

    def _counting(self, hosted: HostedRun, purse: Purse) -> Emit:
        def count(event: Event) -> None:
            hosted.last_event = event.n
            hosted.progress(event)
            if isinstance(event, CallStarted):
                hosted.is_paid = True
                if purse.left_usd == 0:
                    hosted.stop()
            elif isinstance(event, CallEnded) and event.usage.total_cost:
                purse.add(event.usage.total_cost)
                if purse.left_usd == 0:  # this run may still answer by what it has just paid
                    self._stop_all(hosted.owner, but=hosted)
            if self._on_event is not None:
                self._on_event(event)

        return count

    def _stop_all(self, owner: Owner, but: HostedRun) -> None:
        for hosted in list(self._live.values()):
            if hosted.owner == owner and hosted is not but:
                hosted.stop()


def tightened(
    base: RunLimits, owners: RunLimits | None, asked: RunLimits | None, left_usd: float | None
) -> RunLimits | None:
    """Return the limits of one run, where they differ from the server's.

    Args:
        base: Limits of the server. The owner's limits replace them.
        owners: Limits of the owner, or None.
        asked: Limits of the request, which may be smaller and not larger, or None.
        left_usd: US dollars left to the owner today, or None.

    Raises:
        ConfigurationError: The request asks for more than the owner may have.
    """
    held = {} if owners is None else owners.given
    wanted = {} if asked is None else asked.given
    require_within(wanted, {name: held.get(name, getattr(base, name)) for name in wanted})
    together = {**held, **wanted}
    if left_usd is not None:
        budget = together.get("max_budget_usd", base.max_budget_usd)
        together["max_budget_usd"] = left_usd if budget is None else min(budget, left_usd)
    return RunLimits(**together) if together else None


def require_within(wanted: Mapping[str, Any], bounds: Mapping[str, Any]) -> None:
    """Refuse limits above their bounds. None is above all; limits by depth are compared depth by depth.

    Raises:
        ConfigurationError: A limit is above its bound.
    """
    for name, value in wanted.items():
        if (bound := bounds[name]) is not None and (value is None or _is_above(value, bound)):
            shown = f"{bound:g}" if isinstance(bound, float) else bound
            raise ConfigurationError(f"the limit {name} = {value} is above its bound, {shown}: ask for less")


def _is_above(value: Any, bound: Any) -> bool:
    values, bounds = (each if isinstance(each, tuple) else (each,) for each in (value, bound))
    depths = range(max(len(values), len(bounds)))
    return any(values[min(n, len(values) - 1)] > bounds[min(n, len(bounds) - 1)] for n in depths)
