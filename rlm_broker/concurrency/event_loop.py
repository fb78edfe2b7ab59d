"""Which event loop an object lives on, and how it is reached from elsewhere.

Everything inside is asyncio. What is opened by `async with` lives on the caller's loop; what is opened by a plain
`with` lives on one background loop of this process. So the synchronous API is the same code, also where a loop is
already running (a notebook), and objects may be used from several threads.
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
"""Longest single wait of a thread, in seconds. A signal that comes just before a wait is handled only at its end."""
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
        """The loop that is running now."""
        return EventLoopRef(asyncio.get_running_loop())

    @staticmethod
    def background() -> "EventLoopRef":
        """The process's own loop, in a daemon thread that is started when it is first wanted.

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
        """Whether the caller runs on this loop, and so may not block until something there has ended."""
        return _running_loop() is self._loop

    @property
    def is_alive(self) -> bool:
        """Whether anything can still be run there."""
        has_thread = self._thread is None or self._thread.is_alive()
        return self._pid == os.getpid() and not self._loop.is_closed() and has_thread

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        """Run `work` there and wait for it, from another thread.

        Ctrl+C cancels it and waits until it has ended; a second one gives up waiting.
        """
        self._require_alive(work)
        if self.is_here:
            work.close()
            raise RuntimeError(WAITS_FOR_ITSELF)
        return Job(self._loop, work).run()

    async def arun(self, work: Coroutine[Any, Any, T]) -> T:
        """Run `work` there and await it, from whatever loop is running."""
        self._require_alive(work)
        if asyncio.get_running_loop() is self._loop:
            return await work
        job = Job(self._loop, work)
        job.start()
        return await job.ended()

    def call_soon(self, call: Callable[[], object]) -> None:
        """Have the loop make this call; nothing happens where the loop has ended."""
        if self.is_alive:
            self._loop.call_soon_threadsafe(call)

    async def acall(self, call: Callable[[], T]) -> T:
        """Make this call there, and return what it returns."""

        async def called() -> T:
            return call()

        return await self.arun(called())

    def job(self, work: Coroutine[Any, Any, T]) -> "Job[T]":
        """Return a handle on `work`, which runs there once the handle is started."""
        self._require_alive(work)
        return Job(self._loop, work)

    def _require_alive(self, work: Coroutine[Any, Any, Any]) -> None:
        """Raises: ConfigurationError, where nobody would ever run `work`."""
        if self.is_alive:
            return
        work.close()
        if self._pid != os.getpid():  # a thread is not forked with its process
            why = "this was opened before the process was forked: open it in here"
        else:
            why = "this was opened on an event loop that has ended: open it again, or use it within that loop"
        raise ConfigurationError(why)


class Job(Generic[T]):
    """Work on one loop, started, awaited and cancelled from any thread.

    Attributes:
        outcome: What became of the work; CancelledError only when it has really ended.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop, work: Coroutine[Any, Any, T]) -> None:
        self.outcome: concurrent.futures.Future[T] = concurrent.futures.Future()
        self._loop = loop
        self._work = work
        self._task: asyncio.Task[T] | None = None

    def start(self) -> None:
        """Have the loop begin the work."""
        self._loop.call_soon_threadsafe(self._start)

    def run(self) -> T:
        """Start the work and wait for it, from another thread. What interrupts the wait, as Ctrl+C does, cancels it."""
        try:  # around the start, too: the interrupt may come as soon as the work runs
            self.start()
            return self.result()
        except BaseException:  # whatever a signal handler raises: Ctrl+C, mostly
            self.cancel()
            while not self.outcome.done():
                concurrent.futures.wait([self.outcome], SPAN_S)
            raise

    def result(self, timeout_s: float | None = None) -> T:
        """Wait for the work, from another thread.

        Raises:
            TimeoutError: It takes longer than `timeout_s` seconds, and goes on.
        """
        until = None if timeout_s is None else time.monotonic() + timeout_s
        while True:
            left_s = SPAN_S if until is None else min(SPAN_S, until - time.monotonic())
            try:
                return self.outcome.result(max(0.0, left_s))
            except TimeoutError:  # ours, or what came of the work
                if self.outcome.done():
                    return self.outcome.result()
                if until is not None and time.monotonic() >= until:
                    raise

    async def ended(self) -> T:
        """Await the work, on any loop. Cancelling the caller cancels the work, whose end is awaited first."""
        outcome = asyncio.wrap_future(self.outcome)
        outcome.add_done_callback(_retrieve)
        try:
            return await asyncio.shield(outcome)
        except asyncio.CancelledError:
            self.cancel()
            await asyncio.wait({outcome})
            raise

    def close(self) -> None:
        """Give up work that was never started."""
        self._work.close()

    def cancel(self) -> None:
        """Cancel the work. Harmless when it has ended."""
        if not self.outcome.done():
            self._loop.call_soon_threadsafe(self._cancel)

    def _start(self) -> None:
        self._task = self._loop.create_task(self._work)
        # Not from inside of the work: a task that is cancelled before its first step never gets there.
        self._task.add_done_callback(self._hand_over)

    def _cancel(self) -> None:
        if self._task is not None:
            self._task.cancel()
        elif not self.outcome.done():  # an interrupt came before `start` had said anything
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
    """An object that lives on a loop: a context manager of both kinds, opened once and closed once.

    A class that is one says what opening and closing mean; it may be told where to live.
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
        """The loop that it lives on; None where that is not decided yet."""
        return self._event_loop

    @property
    def is_open(self) -> bool:
        """Whether it was opened, and not closed since."""
        return self._is_open

    def bind_loop(self) -> EventLoopRef:
        """Return the loop that it lives on. One that was never opened is bound to the background loop for good."""
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
        if self._loop_is_callers:  # it may be opened again, on another loop
            self._event_loop, self._loop_is_callers = None, False

    def close(self) -> None:
        """End it and everything below it. Harmless when repeated, and when its event loop has ended."""
        if self._event_loop is not None and self._event_loop.is_alive:
            self._event_loop.run(to_its_end(self._leave))

    async def aclose(self) -> None:
        """`close`, awaited."""
        if self._event_loop is not None and self._event_loop.is_alive:
            await self._event_loop.arun(to_its_end(self._leave))

    @contextlib.asynccontextmanager
    async def borrowed(self) -> AsyncIterator[None]:
        """Use it in here: as its owner has opened it, else open until its last borrower ends."""
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
        """Return whether it is open for borrowers alone, so that their last one closes it."""
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
            if self._loop_is_callers and not self._borrowers:  # it may be opened again, on another loop
                self._event_loop, self._loop_is_callers, self._borrowing = None, False, None


def _keep_running(loop: asyncio.AbstractEventLoop) -> None:
    """A task that raises SystemExit stops its loop, and with it what everybody else awaits there: it goes on."""
    while True:
        try:
            loop.run_forever()
        except (SystemExit, KeyboardInterrupt):  # of the user's code: whoever awaits its task gets it
            continue
        return


def _retrieve(outcome: "asyncio.Future[Any]") -> None:
    """Read the exception, so that asyncio does not report it as never retrieved when its caller was cancelled."""
    if not outcome.cancelled():
        outcome.exception()


def _running_loop() -> asyncio.AbstractEventLoop | None:
    try:
        return asyncio.get_running_loop()
    except RuntimeError:
        return None
