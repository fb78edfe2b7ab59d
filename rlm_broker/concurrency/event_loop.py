"""Which event loop an object lives on, and how it is reached from elsewhere.

Everything inside is asyncio. What is opened by `async with` lives on the caller's loop; what is opened by a plain
`with` lives on one background loop of this process. So the synchronous API is the same code, also where a loop is
already running (a notebook), and objects may be used from several threads.
"""

import asyncio
import concurrent.futures
import os
import threading
from collections.abc import Coroutine
from types import TracebackType
from typing import Any, Generic, Self, TypeVar

from rlm_broker.concurrency.deadline import to_its_end
from rlm_broker.errors import ConfigurationError, SandboxFailed

T = TypeVar("T")

SPAN_S = 0.5
"""Of one wait of a thread: Python does not see a signal that comes in the moment before one begins until it ends."""

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
    def is_alive(self) -> bool:
        """Whether anything can still be run there."""
        has_thread = self._thread is None or self._thread.is_alive()
        return self._pid == os.getpid() and not self._loop.is_closed() and has_thread

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        """Run `work` there and wait for it, from another thread.

        Ctrl+C cancels it and waits until it has ended; a second one gives up waiting.
        """
        self._require_alive(work)
        if _running_loop() is self._loop:
            work.close()
            raise RuntimeError("this would wait for itself: use the async form (`await`, `async with`) in here")
        job = _Job(self._loop, work)
        try:  # around the start, too: the interrupt may come as soon as the work runs
            job.start()
            return job.result()
        except BaseException:  # whatever a signal handler raises: Ctrl+C, mostly
            job.cancel()
            while not job.outcome.done():
                concurrent.futures.wait([job.outcome], SPAN_S)
            raise

    async def arun(self, work: Coroutine[Any, Any, T]) -> T:
        """Run `work` there and await it, from whatever loop is running."""
        self._require_alive(work)
        if asyncio.get_running_loop() is self._loop:
            return await work
        job = _Job(self._loop, work)
        job.start()
        outcome = asyncio.wrap_future(job.outcome)
        outcome.add_done_callback(_retrieve)
        try:
            return await asyncio.shield(outcome)
        except asyncio.CancelledError:
            job.cancel()
            await asyncio.wait({outcome})
            raise

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


class _Job(Generic[T]):
    """Work for another thread's loop, which somebody waits for and may want to cancel.

    Attributes:
        outcome: What became of it; CancelledError only when it has really ended.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop, work: Coroutine[Any, Any, T]) -> None:
        self.outcome: concurrent.futures.Future[T] = concurrent.futures.Future()
        self._loop = loop
        self._work = work
        self._task: asyncio.Task[T] | None = None

    def start(self) -> None:
        self._loop.call_soon_threadsafe(self._start)

    def result(self) -> T:
        """Wait for it, from another thread."""
        while True:
            try:
                return self.outcome.result(SPAN_S)
            except TimeoutError:  # ours, or what came of the work
                if self.outcome.done():
                    return self.outcome.result()

    def cancel(self) -> None:
        """Harmless when it has ended."""
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

    async def _open(self) -> None:
        raise NotImplementedError

    async def _close(self) -> None:
        raise NotImplementedError

    def bind_loop(self) -> EventLoopRef:
        """Return the loop that it lives on. One that was never opened is bound to the background loop for good."""
        if self._event_loop is None:
            self._event_loop = EventLoopRef.background()
        return self._event_loop

    def __enter__(self) -> Self:
        self.bind_loop().run(self._open())
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    async def __aenter__(self) -> Self:
        if self._event_loop is None:
            self._event_loop, self._loop_is_callers = EventLoopRef.here(), True
        await self._event_loop.arun(self._open())
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
            self._event_loop.run(to_its_end(self._close))

    async def aclose(self) -> None:
        """`close`, awaited."""
        if self._event_loop is not None and self._event_loop.is_alive:
            await self._event_loop.arun(to_its_end(self._close))


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
