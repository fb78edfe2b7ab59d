"""Runs of many owners in one process: a bounded number at once, a fair queue, and handles that outlive a request.

Theory of operation
-------------------
A request begins a run (`HostedRuns.begin`) and follows it (`HostedRun.joined`). The run exists at once, with its id and
its events, and waits for its place in its own task (`place` of `RLM.start`). So a request that leaves the queue cancels
a run, and not a queue of its own, and one that comes later finds a queued run like any other.

- Fairness: places go round the owners (`FairSemaphore`), so that an owner with a thousand requests delays no other.
  Where the queue is full, an owner without a run in it may still wait with one. A run that waits for its client gives
  its place away.
- Life: a run ends when its last follower has left, unless it may outlive them (`HostedRun.outlive`).
- Money: each call that ends is counted for its owner. When the day's money is spent, the owner's runs are stopped,
  with their best answers so far. The run that has spent the last of it may answer by that call, and begins no other.
  Calls that are under way then are paid in addition.
- Memory: ended runs are kept for a time, so that their events and answers can be asked for again. The oldest go when
  there are too many, or when their events have too many characters.
"""

import asyncio
import contextlib
import time
from collections import OrderedDict
from collections.abc import AsyncIterator, Callable, Mapping
from typing import Any, Final, Literal

from rlm_broker.concurrency.turns import FairSemaphore
from rlm_broker.errors import ConfigurationError
from rlm_broker.events.event import CallEnded, CallStarted, Emit, Event, all_of
from rlm_broker.events.progress import RunProgress
from rlm_broker.limits import RunLimits
from rlm_broker.results import Completion
from rlm_broker.rlm import RLM
from rlm_broker.run.persistent_repl import PersistentRepl
from rlm_broker.run.prompts.instructions import Instructions
from rlm_broker.run.run import Run
from rlm_broker.run.tools import Tools
from rlm_broker.serve.hosting.owner import Busy, Kept, Owner, Purse, UnknownHandle, to_forget
from rlm_broker.usage import Usage
from rlm_broker.values.validation import quoted
from rlm_broker.watch.board import BOARD, QUESTION_CHARS

KEPT_CHARS: Final = 1 << 28
"""Characters of the events of ended runs that are kept together."""
STOP_GRACE_S: Final = 10.0
"""Seconds that a stopped run has to end with an answer, before a drain cancels it."""
RETRY_AFTER_S: Final = 5.0
"""Seconds after which a refused request may find a place in the queue."""


RunState = Literal["queued", "running", "ended"]


class HostedRun:
    """One run of an owner. `HostedRuns.begin` makes it.

    Attributes:
        id: Id of the run, equal to `Run.id`.
        owner: Owner of the run.
        run: Handle on the run.
        created_at: Unix time in seconds.
        began_at: Unix time in seconds at which it got its place, or None.
        ended_at: Unix time in seconds of its end, or None.
        is_paid: Whether a model was called, so that the same request sent again would be paid again.
        last_event: Number of its last event so far.
        about: What the beginner of the run keeps with it, or None.
        progress: What its tree does at this moment.
        task: Beginning of its task, if that is in the context; None if it has a question, or is not known.
        has_place: Whether it counts for the number of runs at the same time.
        calls_away: Number of its calls that wait for its client; see `HostedRuns.away`.
        returning: Waits for a place again after that; None if the run does not.
    """

    def __init__(self, owner: Owner) -> None:
        self.owner = owner
        self.run: Run
        self.created_at = time.time()
        self.began_at: float | None = None
        self.ended_at: float | None = None
        self.is_paid = False
        self.last_event = 0
        self.about: Any = None
        self.progress = RunProgress()
        self.task: str | None = None
        self.has_place = False
        self.calls_away = 0
        self.returning: asyncio.Future[None] | None = None
        self._followers = 0
        self._outlives_s: float | None = 0.0
        self._timer: asyncio.TimerHandle | None = None

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
        """Usage of the run and all below it, of the calls that have ended."""
        return self.progress.usage

    @property
    def doing(self) -> str:
        """Activity of the run at this moment, in a few words; empty after its end."""
        return {"queued": "waits for its turn", "running": self.progress.doing, "ended": ""}[self.state]

    def events(self, after: int = 0) -> AsyncIterator[Event]:
        """Iterate over the events of the run's tree, as `Run.events` does."""
        return self.run.events(after)

    async def completion(self) -> Completion:
        """Return the completion. The run goes on if the caller is cancelled: `joined` decides about its end.

        Raises:
            RunFailed: The run has failed, reached a limit or was cancelled.
        """
        awaited = asyncio.ensure_future(self._awaited())
        awaited.add_done_callback(_read)
        return await asyncio.shield(awaited)

    def stop(self) -> None:
        """End the run with the best answer so far; take it out of the queue if it has no place yet."""
        if self.began_at is None:
            self.run.cancel()
        else:
            self.run.stop()

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
                await self.run.ended()

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

    async def _awaited(self) -> Completion:
        return await self.run


def _read(outcome: "asyncio.Future[Completion]") -> None:
    """Read how a run ended, so that asyncio does not report a failure that no caller waits for any more."""
    if not outcome.cancelled():
        outcome.exception()


class HostedRuns:
    """Runs of all owners in one process. Lives on the event loop of its `RLM`.

    Args:
        rlm: The open `RLM` that answers.
        max_runs: Runs at the same time.
        max_queue: Runs that may wait for a place.
        keep_s: Seconds for which an ended run is kept.
        most_kept: Ended runs that are kept, of all owners together.
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
        self._keep_s = keep_s
        self._most_kept = most_kept
        self._on_event = on_event
        self._runs: OrderedDict[str, HostedRun] = OrderedDict()
        self._keys: dict[tuple[str, str], tuple[str, HostedRun]] = {}
        self._purses: dict[str, Purse] = {}
        self._is_draining = False

    @property
    def queued(self) -> int:
        """Runs that wait for a place."""
        return sum(hosted.state == "queued" for hosted in self._runs.values())

    @property
    def running(self) -> int:
        """Runs that have a place."""
        return sum(hosted.state == "running" for hosted in self._runs.values())

    def all(self) -> list[HostedRun]:
        """Return all runs of all owners, with the ended ones that are kept."""
        return list(self._runs.values())

    def of(self, owner: Owner) -> list[HostedRun]:
        """Return all runs of an owner, the oldest first."""
        return [hosted for hosted in self._runs.values() if hosted.owner == owner]

    def get(self, owner: Owner, id: str) -> HostedRun:
        """Return the run of that id.

        Raises:
            UnknownHandle: The owner has no such run, or it ended too long ago.
        """
        self._forget_old()
        hosted = self._runs.get(id)
        if hosted is None or hosted.owner != owner:
            raise UnknownHandle(f"there is no run {quoted(id)}: it ended too long ago, or never existed")
        return hosted

    def begin(
        self,
        owner: Owner,
        context: object,
        question: str | None,
        *,
        model: str | None = None,
        limits: RunLimits | None = None,
        instructions: Instructions | None = None,
        output_type: Any = None,
        tools: Tools | Mapping[str, Any] | None = None,
        repl: PersistentRepl | None = None,
        task: str | None = None,
        key: str | None = None,
        fingerprint: str = "",
    ) -> HostedRun:
        """Begin a run, or return the one that the same request has begun before.

        Args:
            owner: Owner of the run.
            context, question, model, instructions, output_type, tools, repl: As for `RLM.start`.
            limits: Limits of the request. Those of the owner hold as well: the smaller one of each.
            task: Beginning of the task, to be shown where there is no question.
            key: Idempotency key of the request, or None.
            fingerprint: Digest of the request, which must be the same for the same `key`.

        Raises:
            Busy: The queue is full, or the service is about to end.
            MoneySpent, NotAllowed: The owner has no money left, or may not use the model.
            ConfigurationError: An argument cannot be used, or the key belongs to another request.
        """
        self._forget_old()
        if key is not None and (known := self._keys.get((owner.name, key))) is not None:
            if known[0] != fingerprint:
                raise ConfigurationError("this Idempotency-Key was used for another request: send a new one")
            return known[1]
        if self._is_draining:
            raise Busy("the service is about to end: send the request again later", RETRY_AFTER_S)
        owner.require_model(model or self._rlm.handler.routing.root.model_name)
        purse = self._purses.setdefault(owner.name, Purse(owner))
        purse.require_some()
        self._require_room(owner)
        hosted = HostedRun(owner)
        hosted.task = None if task is None else task[:QUESTION_CHARS]
        receivers = [each for each in (self._counting(hosted, purse), self._on_event) if each is not None]
        given: dict[str, Any] = {"model": model, "instructions": instructions, "output_type": output_type}
        hosted.run = self._rlm.start(
            context,
            question,
            limits=tightened(self._rlm.limits, owner.limits, limits, purse.left_usd),
            tools=tools,
            repl=repl,
            place=self._place(hosted),
            on_event=all_of(receivers),
            **given,
        )
        if key is not None:
            self._keys[owner.name, key] = (fingerprint, hosted)
        return self._listed(hosted)

    @contextlib.asynccontextmanager
    async def away(self, hosted: HostedRun) -> AsyncIterator[None]:
        """Give the place of a run to another one while the run waits for its client, within the block.

        The run waits for a place again after that. A call that is cancelled, for example with its block, does not wait:
        the run goes on, and takes the next place that is free. Beyond `max_runs` runs of one owner that wait so, their
        places stay theirs: each of them has a REPL.
        """
        waiting = sum(other.is_away for other in self._runs.values() if other.owner == hosted.owner)
        hosted.calls_away += 1
        if hosted.has_place and waiting < self._max_runs:
            hosted.has_place = False
            self._places.release()
        try:
            yield
        finally:
            hosted.calls_away -= 1
            if not hosted.has_place and not hosted.calls_away and hosted.returning is None:
                hosted.returning = asyncio.ensure_future(self._returned(hosted))
        if hosted.returning is not None and not hosted.calls_away:
            await asyncio.wait({hosted.returning})

    async def drain(self, drain_s: float) -> None:
        """Begin no run any more, let all runs end, and stop those that go on. A second call may shorten the time.

        Args:
            drain_s: Seconds after which runs are stopped, with their best answers so far.
        """
        self._is_draining = True
        for hosted in self._runs.values():
            if hosted.state == "queued":
                hosted.run.cancel()
        ends = [asyncio.ensure_future(hosted.run.ended()) for hosted in self._runs.values()]
        if not ends:
            return
        all_ended = asyncio.ensure_future(asyncio.wait(ends))
        await asyncio.wait({all_ended}, timeout=drain_s)
        if not all_ended.done():
            self._for_each_live(lambda _: True, HostedRun.stop)
            await asyncio.wait({all_ended}, timeout=STOP_GRACE_S)
        if not all_ended.done():
            self._for_each_live(lambda _: True, lambda hosted: hosted.run.cancel())
        await all_ended

    def _for_each_live(self, is_meant: Callable[[HostedRun], bool], call: Callable[[HostedRun], object]) -> None:
        for hosted in list(self._runs.values()):
            if not hosted.run.is_done and is_meant(hosted):
                call(hosted)

    @contextlib.asynccontextmanager
    async def _place(self, hosted: HostedRun) -> AsyncIterator[None]:
        await self._places.acquire(hosted.owner.name)
        hosted.began_at, hosted.has_place = time.time(), True
        BOARD.set_queued(hosted.id, False)
        try:
            yield
        finally:
            hosted.ended_at = time.time()
            if hosted.returning is not None:
                hosted.returning.cancel()
            if hosted.has_place:
                hosted.has_place = False
                self._places.release()

    async def _returned(self, hosted: HostedRun) -> None:
        """Take a place again for a run that was away. The end of the run cancels it."""
        try:
            await self._places.acquire(hosted.owner.name)
            hosted.has_place = True
        finally:
            hosted.returning = None

    def _require_room(self, owner: Owner) -> None:
        """Refuse a run if the queue is full. An owner without a run in it may always wait with one.

        Raises:
            Busy: The queue is full.
        """
        if self._places.taken + self.queued < self._max_runs + self._max_queue:
            return
        if any(hosted.state == "queued" for hosted in self.of(owner)) or not self._max_queue:
            raise Busy(f"all places are taken, and {self._max_queue:,} runs wait: try again later", RETRY_AFTER_S)

    def _listed(self, hosted: HostedRun) -> HostedRun:
        BOARD.set_owner(hosted.id, hosted.owner.name, hosted.task)
        BOARD.set_queued(hosted.id, True)
        self._runs[hosted.id] = hosted
        return hosted

    def _counting(self, hosted: HostedRun, purse: Purse) -> Emit:
        def count(event: Event) -> None:
            hosted.last_event = event.n
            hosted.progress(event)
            if isinstance(event, CallStarted):
                hosted.is_paid = True
                if purse.left_usd == 0:
                    hosted.stop()
            if not isinstance(event, CallEnded):
                return
            if event.usage.total_cost:
                purse.add(event.usage.total_cost)
                if purse.left_usd == 0:  # this run may still answer by what it has just paid
                    self._for_each_live(
                        lambda other: other.owner == hosted.owner and other is not hosted, HostedRun.stop
                    )

        return count

    def _forget_old(self) -> None:
        """Drop ended runs that are too old, or too many."""
        ended = [
            Kept(hosted, hosted.owner, hosted.run.kept_chars, hosted.ended_at or time.time())
            for hosted in self._runs.values()
            if hosted.run.is_done
        ]
        oldest_at = time.time() - self._keep_s
        for hosted in to_forget(ended, most=self._most_kept, most_weight=KEPT_CHARS, oldest_at=oldest_at):
            self.forget(hosted)

    def forget(self, hosted: HostedRun) -> None:
        """Drop an ended run, with its events and its answer."""
        self._runs.pop(hosted.id, None)
        self._keys = {key: known for key, known in self._keys.items() if known[1] is not hosted}


def tightened(
    base: RunLimits, owners: RunLimits | None, asked: RunLimits | None, left_usd: float | None
) -> RunLimits | None:
    """Return the limits that hold for one run, where they differ from those of the server.

    Args:
        base: Limits of the server. Those of the owner replace them.
        owners: Limits of the owner, or None.
        asked: Limits of the request, which may be smaller and not larger, or None.
        left_usd: US dollars that the owner may still spend today, or None.

    Raises:
        ConfigurationError: The request asks for more than the owner may have.
    """
    held = {} if owners is None else owners.model_dump(exclude_unset=True)
    wanted = {} if asked is None else asked.model_dump(exclude_unset=True)
    for name, value in wanted.items():
        bound = held.get(name, getattr(base, name))
        if bound is not None and _is_above(value, bound):
            raise ConfigurationError(f"the limit {name} = {value} is above its bound, {_shown(bound)}: ask for less")
    together = {**held, **wanted}
    if left_usd is not None:
        budget = together.get("max_budget_usd", base.max_budget_usd)
        together["max_budget_usd"] = left_usd if budget is None else min(budget, left_usd)
    return RunLimits(**together) if together else None


def _is_above(value: Any, bound: Any) -> bool:
    """Whether a limit is above its bound. Limits by depth are compared depth by depth; None is above all."""
    if value is None:
        return True
    values = value if isinstance(value, tuple) else (value,)
    bounds = bound if isinstance(bound, tuple) else (bound,)
    most = max(len(values), len(bounds))
    pairs = ((values[min(n, len(values) - 1)], bounds[min(n, len(bounds) - 1)]) for n in range(most))
    return any(one > other for one, other in pairs)


def _shown(bound: Any) -> str:
    return f"{bound:g}" if isinstance(bound, float) else str(bound)
