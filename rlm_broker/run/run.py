"""One question being answered: the caller's handle, and the job behind it."""

import asyncio
import concurrent.futures
import itertools
import secrets
from collections.abc import AsyncIterator, Callable, Coroutine, Generator
from functools import partial
from types import TracebackType
from typing import Any, Generic, Self

from rlm_broker.concurrency.deadline import to_its_end, within
from rlm_broker.concurrency.event_loop import EventLoopRef, Job
from rlm_broker.errors import ConfigurationError, PlainErrors, RunCancelled, RunFailed, require_kind
from rlm_broker.events.event import Event
from rlm_broker.events.log import EventLog
from rlm_broker.results import Completion, T
from rlm_broker.run.runner import Runner

ID_BYTES = 8
"""Random bytes of a run's id: among a billion runs, two share one with a probability of 3 %."""


class RunJob(Job[Completion]):
    """The work behind a `Run`. It stops the run's loop, and has its partial results.

    Args:
        event_loop: Event loop of the work.
        work: Makes the coroutine of the answer from this job. It calls `begin`.
        branches: Returns jobs of branches of this job, to be started, from their number and the turn before them.
        is_followed: Whether events are kept for `Run.events`.

    Attributes:
        id: Id of the run.
        log: Events of the run; None keeps none.
        answering: Loop of the run; None before it begins.
        samples: Numbers of its branches, from 1.
    """

    def __init__(
        self,
        event_loop: EventLoopRef,
        work: Callable[["RunJob"], Coroutine[Any, Any, Completion]],
        branches: "Callable[[RunJob, int, int | None], list[RunJob]]",
        *,
        is_followed: bool = True,
    ) -> None:
        super().__init__(event_loop.alive(), work(self))
        self.id = secrets.token_hex(ID_BYTES)
        self.log = EventLog() if is_followed else None
        self.event_loop = event_loop
        self.branches = branches
        self.samples = itertools.count(1)
        self.answering: Runner | None = None
        self._stop_asked: asyncio.Future[None] | None = None
        self._wants_stop = False
        if (log := self.log) is not None:
            self.outcome.add_done_callback(lambda _: log.close())

    @property
    def turns(self) -> int:
        """Number of turns after which the run has gone on."""
        return 0 if self.answering is None else max(self.answering.progress.marks, default=0)

    @property
    def handle(self) -> "Run":
        """The caller's handle."""
        return Run._of(self)

    async def before(self, work: Coroutine[Any, Any, T], limit_s: float | None) -> T:
        """Await preparations of the run.

        Raises:
            Late: They took longer than `limit_s`.
            StopRequested: `stop` was called.
        """
        self._stop_asked = asyncio.get_running_loop().create_future()
        if self._wants_stop:
            self._stop_asked.set_result(None)
        return await within(limit_s, work, self._stop_asked)

    def begin(self, answering: Runner) -> Runner:
        """Take the loop of the run before it begins, and stop it at once if `stop` was called earlier."""
        self.answering = answering
        if self._wants_stop:
            answering.stop()
        return answering

    def hand_to(self, failure: RunFailed) -> None:
        """Put the partial results of the run into its error."""
        if self.answering is not None:
            self.answering.hand_to(failure)

    def cancelled(self) -> RunCancelled:
        """Return the error of the cancelled run, with its partial results."""
        cancelled = RunCancelled()
        self.hand_to(cancelled)
        return cancelled

    def stop(self) -> None:
        """End the run as `Run.stop` does, from any thread."""
        self.event_loop.call_soon(self._stop)

    async def at_end(self) -> None:
        """Wait for the end of the run, also if it is a failure or a cancellation. Cancelling the wait ends no run."""
        outcome = asyncio.wrap_future(self.outcome)
        await asyncio.wait({outcome})
        if not outcome.cancelled():
            outcome.exception()  # read, so that asyncio does not report it as never retrieved

    def on_end(self, call: Callable[[BaseException | None], object]) -> None:
        """Call a function at the end of the run, on any thread, with its error or None."""
        self.outcome.add_done_callback(lambda outcome: call(None if outcome.cancelled() else outcome.exception()))

    def _ended_by(self, error: BaseException) -> BaseException:
        return self.cancelled() if isinstance(error, KeyboardInterrupt | concurrent.futures.CancelledError) else error

    def _stop(self) -> None:
        self._wants_stop = True
        if self._stop_asked is not None and not self._stop_asked.done():
            self._stop_asked.set_result(None)
        if self.answering is not None:
            self.answering.stop()


class Run(Generic[T]):
    """A question being answered. `RLM.start` makes it; it may be used from any thread.

    Awaiting it returns the `Completion`, on any event loop. Cancelling the task that awaits it cancels the run, and so
    does leaving it as an async context manager: the run and its processes have ended then. The `CancelledError` has a
    `RunCancelled` as its cause, with the partial answer. Shield it (`asyncio.shield(run)`) to keep it alive.

    Example:
        ```python
        run = RLM("offline").start("a\\nb", "How many lines are there?")
        async for event in run.events():
            print(event)
        print((await run).response)
        ```

    Attributes:
        id: Unique text of 16 characters. All events of the run have it in their field `tree`.
    """

    id: str
    _job: RunJob

    @classmethod
    def _of(cls, job: RunJob) -> Self:
        """Return the handle of a job."""
        run = cls()
        run.id, run._job = job.id, job
        return run

    def events(self, after: int = 0) -> AsyncIterator[Event]:
        """Iterate over the events of the run and of all runs below it, from the first to the last.

        Any number of followers may do so, on any event loop, also after the end. Unread events are dropped beyond 16
        million characters; such a slow follower gets an `EventsMissed` in their place.

        Example:
            ```python
            run = rlm.start("a", "How many?")
            async for event in run.events():
                print(event.n, event)
            ```

        Args:
            after: Number of the last known event; 0 begins with the first.
        """
        assert self._job.log is not None
        require_kind("after", after, int)
        return self._job.log.follow(after)

    @property
    def kept_chars(self) -> int:
        """Characters in memory for `events` and `branch`: those of the events and of the record of the REPL."""
        log, record = self._job.log, None if self._job.answering is None else self._job.answering.record
        return (0 if log is None else log.chars) + (0 if record is None else record.chars)

    @property
    def turns(self) -> int:
        """Number of turns after which the run has gone on: `branch` may begin after each of them."""
        return self._job.turns

    def branch(self, n: int, after_turn: int | None = None) -> "list[Run[T]]":
        """Start `n` runs that go on from this one, as it was after some of its turns.

        Each has a copy of the conversation, a REPL in which the blocks of these turns were run again, and an `n`-th of
        the calls, tokens and money that this run has left. What they use counts for its limits, too. A cache answers
        each of them anew. Their context is read again, unless it is a `StoredContext`.

        Example:
            ```python
            run = rlm.start("a", "How many?")
            run.result()
            print([each.result().response for each in run.branch(2, after_turn=0)])  # ['2', '2']
            ```

        Args:
            n: Number of branches, 1 to 256.
            after_turn: Number of turns that they take over; None takes all after which this run has gone on, so not the
                one with the answer. With 0 they begin anew.

        Raises:
            ConfigurationError: An argument cannot be used, too little is left, or this run has no turns or no REPL of
                its own, is recorded or is replayed. Errors of the context are raised by the branches.
        """
        event_loop, call = self._job.event_loop, partial(self._job.branches, self._job, n, after_turn)
        # where what they begin with changes
        jobs = call() if event_loop.is_here else event_loop.run(event_loop.acall(call))
        for job in jobs:
            job.start()
        return [job.handle for job in jobs]

    def stop(self) -> None:
        """End the run with its best answer so far: its completion has `is_stopped`.

        Harmless after its end. The reading of its context ends, too; the run then has no answer.

        Example:
            ```python
            run = rlm.start("a", "How many?")
            run.stop()
            print((await run).is_stopped)
            ```
        """
        self._job.stop()

    def cancel(self) -> None:
        """End the run without an answer: awaiting it raises `RunCancelled`. Harmless after its end."""
        self._job.cancel()

    @property
    def is_done(self) -> bool:
        """Whether the run has ended, with everything below it."""
        return self._job.outcome.done()

    @property
    def was_cancelled(self) -> bool:
        """Whether the run has ended, by a cancellation."""
        outcome = self._job.outcome
        is_closed = outcome.cancelled()  # it was never started
        return is_closed or (outcome.done() and isinstance(outcome.exception(), concurrent.futures.CancelledError))

    def result(self, timeout_s: float | None = None) -> Completion[T]:
        """Wait for the completion, in a thread that may block.

        Example:
            ```python
            print(rlm.start("a", "How many?").result(timeout_s=60).response)  # 2
            ```

        Args:
            timeout_s: Seconds to wait at most; the run goes on afterwards. None waits until the end.

        Raises:
            TimeoutError: The run has not ended within `timeout_s` seconds.
            RunCancelled: The run was cancelled.
            ConfigurationError: The run is on the caller's own event loop, so that waiting would never end.
        """
        require_kind("timeout_s", timeout_s, int, float, type(None))
        if self._job.event_loop.is_here and not self.is_done:
            raise ConfigurationError("the run is on this event loop, and would wait for itself: write `await run`")
        with PlainErrors():
            try:
                return self._job.result(timeout_s)
            except concurrent.futures.CancelledError:
                raise self._job.cancelled() from None

    async def ended(self) -> None:
        """Wait for the end of the run, also if it is a failure or a cancellation. Cancelling the wait ends no run.

        Example:
            ```python
            run = rlm.start("a", "How many?")
            await run.ended()
            print(run.is_done)  # True
            ```
        """
        await self._job.at_end()

    def __await__(self) -> Generator[Any, Any, Completion[T]]:
        return self._awaited().__await__()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.cancel()
        await to_its_end(self.ended)

    async def _awaited(self) -> Completion[T]:
        with PlainErrors():
            try:
                return await self._job.ended()
            except (asyncio.CancelledError, concurrent.futures.CancelledError) as ended:
                task, cancelled = asyncio.current_task(), self._job.cancelled()
                if task is not None and task.cancelling():
                    raise ended.with_traceback(None) from cancelled
                raise cancelled from None
