"""Which event loop an object lives on, and how it is reached from elsewhere.

Everything inside is asyncio. What is opened by `async with` lives on the caller's loop; what is opened by a plain
`with` lives on one background loop of this process. So the synchronous API is the same code, also where a loop is
already running (a notebook), and objects may be used from several threads.
"""

import asyncio
import concurrent.futures
import threading
from collections.abc import Coroutine
from functools import partial
from types import TracebackType
from typing import Any, Self, TypeVar

T = TypeVar("T")

_background: "Home | None" = None
_starting = threading.Lock()


class Home:
    """One event loop, reached from any thread."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop

    @staticmethod
    def here() -> "Home":
        """The loop that is running now."""
        return Home(asyncio.get_running_loop())

    @staticmethod
    def background() -> "Home":
        """The process's own loop, in a daemon thread that is started when it is first wanted."""
        global _background
        with _starting:
            if _background is None or _background._loop.is_closed():
                loop = asyncio.new_event_loop()
                threading.Thread(target=loop.run_forever, name="rlm-broker", daemon=True).start()
                _background = Home(loop)
            return _background

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        """Run `work` there and wait for it, from another thread.

        Ctrl+C cancels it and waits until it has ended; a second one gives up waiting.
        """
        if _running_loop() is self._loop:
            work.close()
            raise RuntimeError("this would wait for itself: use the async form (`await`, `async with`) in here")
        outcome: concurrent.futures.Future[T] = concurrent.futures.Future()
        task = self._start(work, outcome)
        try:
            return outcome.result()
        except KeyboardInterrupt:
            self._loop.call_soon_threadsafe(task.cancel)
            concurrent.futures.wait([outcome])
            raise

    async def arun(self, work: Coroutine[Any, Any, T]) -> T:
        """Run `work` there and await it, from whatever loop is running."""
        if asyncio.get_running_loop() is self._loop:
            return await work
        outcome: concurrent.futures.Future[T] = concurrent.futures.Future()
        task = self._start(work, outcome)
        try:
            return await asyncio.shield(asyncio.wrap_future(outcome))
        except asyncio.CancelledError:
            self._loop.call_soon_threadsafe(task.cancel)
            await asyncio.wait({asyncio.wrap_future(outcome)})
            raise

    def _start(self, work: Coroutine[Any, Any, T], outcome: "concurrent.futures.Future[T]") -> "_Task":
        task = _Task()

        def start() -> None:
            running = self._loop.create_task(work)
            # Not from inside of the work: a task that is cancelled before its first step never gets there.
            running.add_done_callback(partial(_hand_over, outcome))
            task.begin(running)

        self._loop.call_soon_threadsafe(start)
        return task


class _Task:
    """A task that another thread may want to cancel. Its methods run on the task's own loop."""

    def __init__(self) -> None:
        self._task: asyncio.Task[Any] | None = None

    def begin(self, task: "asyncio.Task[Any]") -> None:
        self._task = task

    def cancel(self) -> None:
        if self._task is not None:
            self._task.cancel()


def _hand_over(outcome: "concurrent.futures.Future[T]", task: "asyncio.Task[T]") -> None:
    if task.cancelled():
        outcome.set_exception(concurrent.futures.CancelledError())
    elif (error := task.exception()) is not None:
        outcome.set_exception(error)
    else:
        outcome.set_result(task.result())


class Resident:
    """An object that lives on a loop: a context manager of both kinds, opened once and closed once.

    A class that is one says what opening and closing mean; it may be told where to live.
    """

    _home: Home | None = None

    async def _open(self) -> None:
        raise NotImplementedError

    async def _close(self) -> None:
        raise NotImplementedError

    @property
    def home(self) -> Home:
        """Where it lives. Asked for before it was opened, that is the background loop."""
        if self._home is None:
            self._home = Home.background()
        return self._home

    def __enter__(self) -> Self:
        self.home.run(self._open())
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    async def __aenter__(self) -> Self:
        if self._home is None:
            self._home = Home.here()
        await self._home.arun(self._open())
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.aclose()

    def close(self) -> None:
        """End it and everything below it. Harmless when repeated."""
        self.home.run(self._close())

    async def aclose(self) -> None:
        """`close`, awaited."""
        await self.home.arun(self._close())


def _running_loop() -> asyncio.AbstractEventLoop | None:
    try:
        return asyncio.get_running_loop()
    except RuntimeError:
        return None
