"""One run of an owner: what is told of it, and who follows it."""

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator
from typing import Any, Literal

from rlm_broker.events.event import Event
from rlm_broker.events.progress import RunProgress
from rlm_broker.hosting.owner import Owner
from rlm_broker.results import Completion
from rlm_broker.run.run import Run
from rlm_broker.usage import Usage

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
