"""The event loop that an object lives on, and the ways to reach it from threads and from other loops.

Theory of operation
-------------------
The library is asyncio throughout. A future, lock or transport belongs to one loop and may be touched only from its
thread. So each object with such parts (`AsyncResource`) lives on exactly one loop, which is decided when it is opened:

- By `async with` (or `borrowed`): the loop that runs. When the object is closed it has no loop any more, and may be
  opened again on another one. Two calls of `asyncio.run` are two loops.
- By a plain `with` (or `bind_loop`): the background loop of this process, for good. It runs in one daemon thread that
  is started when it is first used, and never stopped.

All calls from elsewhere are carried over by a `Job`: `call_soon_threadsafe` starts the work on the object's loop, and
a `concurrent.futures.Future` brings its outcome back. So the synchronous API is the same code as the asynchronous one.
It works where a loop is already running, as in a notebook, and from several threads.

A `Job` is over only when its work has really ended. If its caller is cancelled or interrupted, the work is cancelled
and its end is awaited, since processes end in its `finally` blocks.

Two facts of the system bend the code:

- CPython runs a signal handler between two bytecodes of the main thread. A signal that arrives after the last check and
  before a lock's wait begins is handled only when the wait ends. So a thread waits in spans of `SPAN_S`.
- `fork` copies the calling thread alone. A child has no background loop, and a loop of the parent is dead there. So
  each reference keeps the id of its process (`is_alive`).

Rejected: `asyncio.run` for each synchronous call. It fails where a loop is running, and it would end tasks that go on
between two calls, such as the refill of a pool. A second, synchronous implementation would have to be tested twice.
Patching asyncio so that loops nest changes the user's process.
"""

import asyncio
import concurrent.futures
import contextlib
import os
import threading
import time
from collections.abc import AsyncIterator, Callable, Coroutine
from types import TracebackType
from typing import Any, Generic, Self, TypeVar

from rlm_broker.concurrency.deadline import to_its_end
from rlm_broker.errors import ConfigurationError, SandboxFailed

T = TypeVar("T")

SPAN_S = 0.5
"""Longest single wait of a thread, in seconds. A signal that arrives just before a wait is handled only at its end."""
WAITS_FOR_ITSELF = "this would wait for itself: use the async form (`await`, `async with`) in here"

_background: "EventLoopRef | None" = None
_starting = threading.Lock()


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
        """Return the process's own loop. Its daemon thread is started when it is first used.

        Raises:
            SandboxFailed: No thread can be started.
        """
        global _background
        with _starting:
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
        self._require_alive(work)
        if self.is_here:
            work.close()
            raise RuntimeError(WAITS_FOR_ITSELF)
        return Job(self._loop, work).run()

    async def arun(self, work: Coroutine[Any, Any, T]) -> T:
        """Run `work` on this loop and await it, from any loop."""
        self._require_alive(work)
        if asyncio.get_running_loop() is self._loop:
            return await work
        job = Job(self._loop, work)
        job.start()
        return await job.ended()

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
        self._require_alive(work)
        return Job(self._loop, work)

    def _require_alive(self, work: Coroutine[Any, Any, Any]) -> None:
        """Close `work` and raise if the loop has ended.

        Raises:
            ConfigurationError: The loop has ended, so that `work` would never run.
        """
        if self.is_alive:
            return
        work.close()
        if self._pid != os.getpid():  # fork copies the calling thread alone, and not the one of the loop
            why = "this was opened before the process was forked: open it in here"
        else:
            why = "this was opened on an event loop that has ended: open it again, or use it within that loop"
        raise ConfigurationError(why)


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

    def start(self) -> None:
        """Have the loop begin the work, soon."""
        self._loop.call_soon_threadsafe(self._start)

    def run(self) -> T:
        """Start the work and wait for it, from another thread. An exception that ends the wait cancels the work."""
        try:  # the start is inside: the interrupt may come as soon as the work runs
            self.start()
            return self.result()
        except BaseException:  # mostly KeyboardInterrupt, but a signal handler of the user's may raise any exception
            self.cancel()
            while not self.outcome.done():
                concurrent.futures.wait([self.outcome], SPAN_S)
            raise

    def result(self, timeout_s: float | None = None) -> T:
        """Wait for the work, from another thread, and return its result.

        Args:
            timeout_s: Seconds to wait; None waits without limit.

        Raises:
            TimeoutError: The work takes longer than `timeout_s`. It goes on.
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

    async def ended(self) -> T:
        """Await the work, on any loop. If the caller is cancelled, the work is cancelled and its end is awaited."""
        outcome = asyncio.wrap_future(self.outcome)
        outcome.add_done_callback(_retrieve)
        try:
            return await asyncio.shield(outcome)
        except asyncio.CancelledError:
            self.cancel()
            await asyncio.wait({outcome})
            raise

    def close(self) -> None:
        """Close work that was never started, so that Python does not report it as never awaited."""
        self._work.close()
        self.outcome.cancel()

    def cancel(self) -> None:
        """Cancel the work. Has no effect once it has ended."""
        if not self.outcome.done():
            self._loop.call_soon_threadsafe(self._cancel)

    def _start(self) -> None:
        self._task = self._loop.create_task(self._work)
        # A callback and not a `finally` in the work: a task cancelled before its first step runs none of its code.
        self._task.add_done_callback(self._hand_over)

    def _cancel(self) -> None:
        if self._task is not None:
            self._task.cancel()
        elif not self.outcome.done():  # an interrupt came inside `start`, before the loop was asked to begin
            self._work.close()
            self.outcome.set_exception(concurrent.futures.CancelledError())

    def _hand_over(self, task: "asyncio.Task[T]") -> None:
        if task.cancelled():
            self.outcome.set_exception(concurrent.futures.CancelledError())
        elif (error := task.exception()) is not None:
            self.outcome.set_exception(error)
        else:
            self.outcome.set_result(task.result())


class AsyncResource:
    """An object that lives on one loop: a context manager of both kinds, opened once and closed once.

    A subclass defines `_open` and `_close`. It may set `_event_loop` before it is opened, to live beside another
    object.
    """

    _event_loop: EventLoopRef | None = None
    _loop_is_callers = False
    _is_open = False
    _borrowers = 0
    _borrowing: asyncio.Lock | None = None

    async def _open(self) -> None:
        raise NotImplementedError

    async def _close(self) -> None:
        raise NotImplementedError

    @property
    def event_loop(self) -> EventLoopRef | None:
        """The loop that the object lives on; None where that is not decided yet."""
        return self._event_loop

    @property
    def is_open(self) -> bool:
        """Whether the object was opened, and not closed since."""
        return self._is_open

    def bind_loop(self) -> EventLoopRef:
        """Return the loop that the object lives on. If it has none, it is bound to the background loop for good."""
        if self._event_loop is None:
            self._event_loop = EventLoopRef.background()
        return self._event_loop

    def __enter__(self) -> Self:
        self.bind_loop().run(self._enter())
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    async def __aenter__(self) -> Self:
        if self._event_loop is None:
            self._event_loop, self._loop_is_callers = EventLoopRef.here(), True
        if self._event_loop.is_here:
            await self._open()
            self._is_open = True
        else:
            await self._event_loop.arun(self._enter())
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.aclose()
        if self._loop_is_callers:  # the object may be opened again, on another loop
            self._event_loop, self._loop_is_callers = None, False

    def close(self) -> None:
        """Close the object and everything below it. Has no effect when repeated, or once its event loop has ended."""
        if self._event_loop is not None and self._event_loop.is_alive:
            self._event_loop.run(to_its_end(self._leave))

    async def aclose(self) -> None:
        """Close the object as `close` does, from any loop."""
        if self._event_loop is not None and self._event_loop.is_alive:
            await self._event_loop.arun(to_its_end(self._leave))

    @contextlib.asynccontextmanager
    async def borrowed(self) -> AsyncIterator[None]:
        """Use the object inside the block. If its owner has not opened it, it is open until its last borrower ends."""
        if self._event_loop is None:
            self._event_loop, self._loop_is_callers = EventLoopRef.here(), True
        loop = self._event_loop
        is_counted = await loop.arun(self._borrow())
        try:
            yield
        finally:
            if is_counted and loop.is_alive:
                await loop.arun(to_its_end(self._give_back))

    async def _enter(self) -> None:
        await self._open()
        self._is_open = True

    async def _leave(self) -> None:
        self._is_open = False
        await self._close()

    async def _borrow(self) -> bool:
        """Count one more borrower, and open the object for the first.

        Returns:
            Whether the object is open for borrowers alone, so that the last one closes it.
        """
        if self._is_open and not self._borrowers:
            return False
        self._borrowing = self._borrowing or asyncio.Lock()
        self._borrowers += 1
        try:
            async with self._borrowing:
                if not self._is_open:
                    await self._enter()
        except BaseException:
            self._borrowers -= 1
            raise
        return True

    async def _give_back(self) -> None:
        assert self._borrowing is not None
        self._borrowers -= 1
        async with self._borrowing:
            if self._borrowers or not self._is_open:
                return
            await self._leave()
            if self._loop_is_callers and not self._borrowers:  # the object may be opened again, on another loop
                self._event_loop, self._loop_is_callers, self._borrowing = None, False, None


def _keep_running(loop: asyncio.AbstractEventLoop) -> None:
    """Run the loop, and run it again when a task has stopped it.

    A task that raises SystemExit or KeyboardInterrupt ends `run_forever` (asyncio, `Task.__step`). All other tasks of
    the loop would then stand still.
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
