"""One question that is being answered, as its caller holds it: followed, stopped, cancelled and awaited."""

import asyncio
import concurrent.futures
import secrets
from collections.abc import AsyncIterator, Callable, Coroutine, Generator
from types import TracebackType
from typing import Any, Self

from rlm_broker.concurrency.event_loop import WAITS_FOR_ITSELF, EventLoopRef
from rlm_broker.errors import RunCancelled, RunFailed, require_kind
from rlm_broker.results import Completion
from rlm_broker.run.runner import Runner
from rlm_broker.trace.event_log import EventLog
from rlm_broker.trace.events import Event

ID_BYTES = 8
"""Random bytes of a run's id: two of a billion runs share one with a probability of 3 %."""


class Run:
    """A question that is being answered. Made by `RLM.start`; may be used from any thread.

    Awaited, it is the `Completion`. Cancelling the task that awaits it cancels the run, and so does leaving it as an
    async context manager: nothing of it is left running then. Shield it (`asyncio.shield(run)`) to keep it alive.

    Attributes:
        id: Unique text of 16 characters, which is also the field `tree` of all its events.

    Args:
        event_loop: Where it runs.
        answer: Makes the work that answers the question; it gets this run, and calls `begin`.
        is_followed: Whether events are kept for `events`.
    """

    def __init__(
        self,
        event_loop: EventLoopRef,
        answer: Callable[["Run"], Coroutine[Any, Any, Completion]],
        *,
        is_followed: bool = True,
    ) -> None:
        self.id = secrets.token_hex(ID_BYTES)
        self.log = EventLog() if is_followed else None
        self._event_loop = event_loop
        self._runner: Runner | None = None
        self._wants_stop = False
        self._job = event_loop.job(answer(self))
        if (log := self.log) is not None:
            self._job.outcome.add_done_callback(lambda _: log.close())

    # -- what callers do with it -------------------------------------------------------------------------------------

    def events(self, after: int = 0) -> AsyncIterator[Event]:
        """Iterate over the events of the run and of all runs below it, from the beginning to the last one.

        Any number of followers may do so, on any event loop, also after the end. A follower that is so slow that events
        it has not read were dropped (beyond 16 million characters) gets an `EventsMissed` in their place.

        Args:
            after: Number of the last event that is known already; 0 begins with the first.
        """
        assert self.log is not None
        require_kind("after", after, int)
        return self.log.follow(after)

    def stop(self) -> None:
        """End the run with the best answer that it has so far: its completion has `is_stopped`.

        Harmless when it has ended. A run that has not begun yet, whose context is being read, ends as it begins.
        """
        self._event_loop.call_soon(self._stop)

    def cancel(self) -> None:
        """End the run without an answer: `RunCancelled` is raised where it is awaited. Harmless when it has ended."""
        self._job.cancel()

    @property
    def is_done(self) -> bool:
        """Whether the run has ended, and nothing of it is left running."""
        return self._job.outcome.done()

    def result(self, timeout_s: float | None = None) -> Completion:
        """Wait for the completion, in a thread that may block.

        Args:
            timeout_s: Seconds to wait at most; the run goes on when they are over. None waits until the end.

        Raises:
            TimeoutError: The run has not ended within `timeout_s` seconds.
            RunCancelled: It was cancelled.
        """
        require_kind("timeout_s", timeout_s, int, float, type(None))
        if self._event_loop.is_here and not self.is_done:
            raise RuntimeError(WAITS_FOR_ITSELF)
        try:
            return self._job.result(timeout_s)
        except concurrent.futures.CancelledError:
            raise self._cancelled() from None

    def __await__(self) -> Generator[Any, Any, Completion]:
        return self._awaited().__await__()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.cancel()
        await self.ended()

    # -- what makes it -----------------------------------------------------------------------------------------------

    def start(self) -> Self:
        """Begin the work."""
        self._job.start()
        return self

    def run(self) -> Completion:
        """Start the work and wait for it; what interrupts the wait, as Ctrl+C does, cancels it.

        Raises:
            RunCancelled: Ctrl+C came, or the run was cancelled.
        """
        if self._event_loop.is_here:
            self._job.close()
            raise RuntimeError(WAITS_FOR_ITSELF)
        try:
            return self._job.run()
        except (KeyboardInterrupt, concurrent.futures.CancelledError):
            raise self._cancelled() from None

    def hand_to(self, failure: RunFailed) -> None:
        """Put what the run has into the error that ends it."""
        if self._runner is not None:
            self._runner.hand_to(failure)

    def begin(self, runner: Runner) -> Runner:
        """Note the loop of the root run, which is about to begin."""
        self._runner = runner
        if self._wants_stop:
            runner.stop()
        return runner

    async def ended(self) -> None:
        """Wait for the end, whatever it is."""
        outcome = asyncio.wrap_future(self._job.outcome)
        await asyncio.wait({outcome})
        if not outcome.cancelled():
            outcome.exception()  # read, so that asyncio does not report it as never retrieved

    async def _awaited(self) -> Completion:
        try:
            return await self._job.ended()
        except (asyncio.CancelledError, concurrent.futures.CancelledError):
            task = asyncio.current_task()
            if task is not None and task.cancelling():
                raise
            raise self._cancelled() from None

    def _stop(self) -> None:
        self._wants_stop = True
        if self._runner is not None:
            self._runner.stop()

    def _cancelled(self) -> RunCancelled:
        cancelled = RunCancelled()
        self.hand_to(cancelled)
        return cancelled
