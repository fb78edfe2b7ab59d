"""The event loop that an object lives on, and the ways to reach it from threads and from other loops.

Theory of operation
-------------------
A future, lock or transport belongs to one loop and may be touched only from its thread. So each object with such parts
lives on exactly one loop (`resource.AsyncResource`): the caller's, or the background loop of this process. That one
runs in a daemon thread, started when it is first used, and never stopped.

A `Job` carries each call from elsewhere over: `call_soon_threadsafe` starts the work on the object's loop, and a
`concurrent.futures.Future` brings its outcome back. So the synchronous API is the same code as the asynchronous one. It
works where a loop is already running, as in a notebook, and from several threads.

A `Job` is over only when its work has really ended. If its caller is cancelled or interrupted, the work is cancelled
once and its end is awaited, since processes end in its `finally` blocks.

Work that cleans up is never cancelled, only the wait for it is (`CleanUp`). A task cancelled before its first step runs
none of its code: nothing would be cleaned up.

Three facts of the system bend the code:

- CPython runs a signal handler between two bytecodes of the main thread. If a signal arrives after the last check and
  before a lock's wait begins, it is handled only when the wait ends. So a thread waits in spans of `SPAN_S`.
- A closed loop drops the work it was given. So a wait looks at the loop after each span.
- `fork` copies the calling thread alone. A child has no background loop, and a loop of the parent is dead there. So
  each reference keeps the id of its process (`is_alive`).

Rejected: `asyncio.run` for each synchronous call. It fails where a loop is running, and it would end tasks between two
calls, for example the refill of a pool. A second, synchronous implementation would have to be tested twice. Patching
asyncio so that loops nest changes the user's process.
"""

import asyncio
import concurrent.futures
import contextlib
import os
import threading
import time
from collections.abc import Callable, Coroutine
from typing import Any, Generic, TypeVar

from rlm_broker.concurrency.deadline import begun_task, ended, to_its_end, unlisted
from rlm_broker.concurrency.forks import FORKING
from rlm_broker.errors import ConfigurationError, SandboxFailed

T = TypeVar("T")

SPAN_S = 0.5
"""Longest single wait of a thread, in seconds. A signal that arrives just before a wait is handled only at its end."""
WAITS_FOR_ITSELF = "this would wait for itself: use the async form (`await`, `async with`) in here"
LOOP_ENDED = "this was opened on an event loop that has ended: open it again, or use it within that loop"

_background: "EventLoopRef | None" = None


class EventLoopRef:
    """One event loop, reached from any thread."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._pid = os.getpid()
        self._thread: threading.Thread | None = None

    @staticmethod
    def here() -> "EventLoopRef":
        """Return a reference to the loop that is running now."""
        return EventLoopRef(asyncio.get_running_loop())

    @staticmethod
    def here_or_background() -> "EventLoopRef":
        """Return a reference to the loop that is running now, or else to the process's own loop."""
        return EventLoopRef.background() if asyncio._get_running_loop() is None else EventLoopRef.here()

    @staticmethod
    def background() -> "EventLoopRef":
        """Return the process's own loop. Its daemon thread is started when it is first used. Raise SandboxFailed if no
        thread can be started."""
        global _background
        with FORKING:  # a forked process finds no half-started loop
            if _background is None or not _background.is_alive:
                _background = EventLoopRef(asyncio.new_event_loop())
                keep = (_background._loop,)
                _background._thread = threading.Thread(target=_keep_running, args=keep, name="rlm-broker", daemon=True)
                try:
                    _background._thread.start()
                except RuntimeError as error:  # "can't start new thread": the limit of processes counts threads, too
                    _background._loop.close()
                    _background = None
                    raise SandboxFailed(
                        f"{error}: raise the limit of processes (`ulimit -u`, LimitNPROC= or TasksMax= of a unit)"
                    ) from None
            return _background

    @property
    def is_here(self) -> bool:
        """Whether the caller runs on this loop. A blocking wait for work on it would then never end."""
        return asyncio._get_running_loop() is self._loop

    @property
    def is_alive(self) -> bool:
        """Whether work can still be run there: the loop is open, in this process, and its thread lives."""
        has_thread = self._thread is None or self._thread.is_alive()
        return self._pid == os.getpid() and not self._loop.is_closed() and has_thread

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        """Run `work` on this loop and wait for it, from another thread.

        Ctrl+C cancels the work and waits until it has ended. A second one gives up waiting.

        Raises:
            RuntimeError: The caller runs on this loop, and would wait for itself.
            ConfigurationError: The loop has ended, or belongs to the process that this one was forked from.
        """
        return self.job(work).run()

    async def arun(self, work: Coroutine[Any, Any, T]) -> T:
        """Run `work` on this loop and await it, from any loop."""
        if self.is_here:
            return await work
        job = self.job(work)
        job.start()
        return await job.ended()

    def clean_up(self, work: Callable[[], Coroutine[Any, Any, None]]) -> None:
        """Run clean-up on this loop and wait for it, from another thread. Has no effect once the loop has ended. Raise
        RuntimeError if called on this loop: the caller would wait for itself.

        Ctrl+C is raised when the clean-up has ended. A second one gives up waiting, and the clean-up goes on. So `work`
        may be called twice, and a second clean-up has no effect.
        """
        if self.is_here:
            raise RuntimeError(WAITS_FOR_ITSELF)
        if not self.is_alive:
            return
        try:
            CleanUp(self._loop, work()).run()
        except BaseException as error:
            if not isinstance(error, Exception):  # an interrupt, which may have come before the clean-up was started
                CleanUp(self._loop, work()).start()
            raise

    async def aclean_up(self, work: Callable[[], Coroutine[Any, Any, None]]) -> None:
        """Run clean-up on this loop and await its end, from any loop, however often the caller is cancelled."""
        if self.is_here:
            await to_its_end(work)
        elif self.is_alive:
            job = CleanUp(self._loop, work())
            job.start()
            await job.ended()

    def call_soon(self, call: Callable[[], object]) -> None:
        """Make this call on the loop, soon. The call is dropped if the loop has ended."""
        if self.is_alive:
            self._loop.call_soon_threadsafe(call)

    async def acall(self, call: Callable[[], T]) -> T:
        """Make this call on the loop, and return its result."""

        async def called() -> T:
            return call()

        return await self.arun(called())

    def job(self, work: Coroutine[Any, Any, T]) -> "Job[T]":
        """Return a handle on `work`, which runs on this loop once the handle is started."""
        try:
            return Job(self.alive(), work)
        except ConfigurationError:
            work.close()
            raise

    def alive(self) -> asyncio.AbstractEventLoop:
        """Return the loop, on which work can still be run. Raise ConfigurationError if it has ended, or belongs to the
        process that this one was forked from."""
        if self.is_alive:
            return self._loop
        if self._pid != os.getpid():  # fork copies the calling thread alone, and not the one of the loop
            raise ConfigurationError("this was opened before the process was forked: open it in here")
        raise ConfigurationError(LOOP_ENDED)


class Job(Generic[T]):
    """Work on one loop, which any thread may start, await and cancel.

    Attributes:
        outcome: Result or error of the work. CancelledError only after the work has really ended.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop, work: Coroutine[Any, Any, T]) -> None:
        self.outcome: concurrent.futures.Future[T] = concurrent.futures.Future()
        self._loop = loop
        self._work = work
        self._task: asyncio.Task[T] | None = None
        self._is_cancelled = False

    def start(self) -> None:
        """Have the loop begin the work, soon. Raise ConfigurationError if the loop has ended."""
        if asyncio._get_running_loop() is self._loop:  # without a message to itself, which costs two system calls
            self._start()
            return
        try:
            self._loop.call_soon_threadsafe(self._start, begun_task)
        except RuntimeError:  # closed since it was looked at
            self._require_loop()
            raise

    def run(self) -> T:
        """Start the work and wait for it, from another thread. An exception that ends the wait cancels the work. Raise
        RuntimeError if called on the loop of the work: the caller would wait for itself."""
        if asyncio._get_running_loop() is self._loop:
            self.close()
            raise RuntimeError(WAITS_FOR_ITSELF)
        try:  # the start is inside: the interrupt may come as soon as the work runs
            self.start()
            return self.result()
        except BaseException as error:  # mostly KeyboardInterrupt; a signal handler of the user's may raise any other
            self.cancel()
            while not self.outcome.done() and not self._loop.is_closed():
                concurrent.futures.wait([self.outcome], SPAN_S)
            if (told := self._ended_by(error)) is not error:
                raise told from None
            raise

    def result(self, timeout_s: float | None = None) -> T:
        """Wait for the work, from another thread, at most `timeout_s` seconds, and return its result. None waits
        without limit.

        Raises:
            TimeoutError: The work takes longer than `timeout_s`. It goes on.
            ConfigurationError: The loop has ended before the work did.
        """
        until = None if timeout_s is None else time.monotonic() + timeout_s
        while True:
            left_s = SPAN_S if until is None else min(SPAN_S, until - time.monotonic())
            try:
                return self.outcome.result(max(0.0, left_s))
            except TimeoutError:  # of this wait, or raised by the work
                if self.outcome.done():
                    return self.outcome.result()
                if until is not None and time.monotonic() >= until:
                    raise
                self._require_loop()

    async def ended(self) -> T:
        """Await the work, on any loop. If the caller is cancelled, the work is cancelled and its end is awaited. Raise
        ConfigurationError if the loop of the work has ended before the work did."""
        outcome: asyncio.Future[T] | asyncio.Task[T]
        if self._task is not None and asyncio._get_running_loop() is self._loop:
            outcome = self._task
        else:
            outcome = asyncio.wrap_future(self.outcome)
        outcome.add_done_callback(_retrieve)
        cancelled: asyncio.CancelledError | None = None
        while not outcome.done():
            try:
                await asyncio.wait({outcome}, timeout=SPAN_S)
                self._require_loop()
            except asyncio.CancelledError as ours:
                cancelled = ours
                self.cancel()
        if cancelled is not None:
            raise cancelled
        return outcome.result()

    def close(self) -> None:
        """Close work that was not started, or Python would report it as never awaited."""
        self._work.close()
        self.outcome.cancel()

    def cancel(self) -> None:
        """Cancel the work, once. Has no effect once it has ended."""
        if not self.outcome.done():
            with contextlib.suppress(RuntimeError):  # the loop has ended
                self._loop.call_soon_threadsafe(self._cancel)

    def _ended_by(self, error: BaseException) -> BaseException:
        """Return the error to raise where this one has ended the wait or the work."""
        return error

    def _start(self, in_task: "Callable[[Coroutine[Any, Any, T]], asyncio.Task[T]] | None" = None) -> None:
        self._task = (in_task or self._loop.create_task)(self._work)
        # A callback and not a `finally` in the work: a task cancelled before its first step runs none of its code.
        self._task.add_done_callback(self._hand_over)

    def _cancel(self) -> None:
        if self._is_cancelled or self.outcome.done():
            return
        self._is_cancelled = True
        if self._task is not None:
            self._task.cancel()
        else:  # an interrupt came inside `start`, before the loop was asked to begin
            self._work.close()
            self.outcome.set_exception(concurrent.futures.CancelledError())

    def _hand_over(self, task: "asyncio.Task[T]") -> None:
        if task.cancelled():
            self.outcome.set_exception(concurrent.futures.CancelledError())
        elif (error := task.exception()) is not None:
            self.outcome.set_exception(error)
        else:
            self.outcome.set_result(task.result())

    def _require_loop(self) -> None:
        """Raise ConfigurationError if the work can never end, since its loop was closed."""
        if self._loop.is_closed() and not self.outcome.done():
            if self._task is None:
                self._work.close()
            raise ConfigurationError(LOOP_ENDED)


class CleanUp(Job[None]):
    """Clean-up on one loop, which begins and ends although its caller is cancelled or interrupted."""

    _waiter: "asyncio.Task[None] | None" = None

    def _start(self, _in_task: object = None) -> None:
        if self._task is None:
            self._task = unlisted(self._work)
            self._task.add_done_callback(self._hand_over)
            self._waiter = self._loop.create_task(ended(self._task))  # `asyncio.run` waits for tasks it knows

    def _cancel(self) -> None:
        self._start()  # an interrupt may have come inside `start`, before the loop was asked to begin


def _keep_running(loop: asyncio.AbstractEventLoop) -> None:
    """Run the loop, and run it again when a task has stopped it.

    SystemExit or KeyboardInterrupt of a task ends `run_forever` (asyncio, `Task.__step`), and with it all other tasks.
    """
    while True:
        try:
            loop.run_forever()
        except (SystemExit, KeyboardInterrupt):  # raised by code of the user's; the caller of its task gets it, too
            continue
        return


def _retrieve(outcome: "asyncio.Future[Any]") -> None:
    """Read the exception, so that asyncio does not report it as never retrieved when its caller was cancelled."""
    if not outcome.cancelled():
        outcome.exception()
