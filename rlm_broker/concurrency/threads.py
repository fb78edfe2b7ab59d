"""Blocking functions of the user and of libraries, run in daemon threads that do not delay the exit of the program."""

import asyncio
import contextlib
import contextvars
import errno
import os
import queue
import threading
import weakref
from collections.abc import Callable, Hashable
from concurrent.futures import Future
from functools import partial
from typing import Any, Final, TypeVar

from rlm_broker.concurrency.deadline import to_its_end
from rlm_broker.concurrency.turns import FairSemaphore
from rlm_broker.errors import SHORT_OF, SandboxFailed

T = TypeVar("T")

SLOW_S = 1.0
"""Seconds until a busy thread of the user's code or sources counts no more, so that any number of them may stall. A
cancelled call is awaited for as long."""
_Job = tuple["Future[Any]", Callable[[], Any]]


class DaemonThreads:
    """Runs calls in at most `max_threads` threads; each is started when a call finds none idle.

    While all of them are busy, calls wait in a queue without bound. A thread that was `let_go` does not count.

    Not a `ThreadPoolExecutor`: the interpreter joins its threads at exit (`concurrent.futures.thread._python_exit`), so
    that one endless function would keep the program alive.

    Args:
        max_threads: Upper bound of threads. None is started before the first call.
    """

    def __init__(self, max_threads: int) -> None:
        self._max_threads = max_threads
        self._closed: Exception | None = None
        self._start_afresh()

    def submit(self, call: Callable[[], Any]) -> "Future[Any]":
        """Queue `call`, which runs with a copy of the caller's context variables, and return its future."""
        future: Future[Any] = Future()
        if self._pid != os.getpid():  # forked since: the threads stayed in the parent, and the lock may be held there
            self._start_afresh()
        with self._lock:
            if self._closed is not None:
                future.set_exception(self._closed)
                return future
            self._jobs.put((future, partial(contextvars.copy_context().run, call)))
            if not self._idle.acquire(blocking=False) and self._started < self._max_threads:
                try:
                    self._start_thread()
                except RuntimeError as error:  # "can't start new thread": the limit of processes counts threads, too
                    if not self._started:
                        future.cancel()
                        raise SandboxFailed(f"{error}; {SHORT_OF[errno.EAGAIN]}") from None
        return future

    def let_go(self, future: "Future[Any]") -> None:
        """Have the thread of a call under way end with it, and another one take its place until then."""
        with self._lock:
            if not future.running() or future in self._let_go:
                return
            self._let_go.add(future)
            self._started -= 1
            if not self._jobs.empty():
                with contextlib.suppress(RuntimeError):  # the call that waits begins when another one has ended
                    self._start_thread()

    def _start_thread(self) -> None:
        threading.Thread(target=self._work, name=f"rlm-broker-call-{self._started}", daemon=True).start()
        self._started += 1

    def _start_afresh(self) -> None:
        self._pid = os.getpid()
        self._lock = threading.Lock()  # `submit` is called from several threads: one client may serve several loops
        self._jobs: queue.SimpleQueue[_Job | None] = queue.SimpleQueue()
        self._idle = threading.Semaphore(0)
        self._started = 0
        self._let_go: set[Future[Any]] = set()

    def close(self, reason: Exception) -> None:
        """End each idle thread now, and each busy one when its call returns. Calls not begun fail with `reason`."""
        with self._lock:
            self._closed = reason
        while True:
            try:
                job = self._jobs.get_nowait()
            except queue.Empty:
                break
            if job is not None and job[0].set_running_or_notify_cancel():
                job[0].set_exception(reason)
        for _ in range(self._started):
            self._jobs.put(None)

    def _work(self) -> None:
        while (job := self._jobs.get()) is not None:
            future = job[0]
            _run(*job)
            with self._lock:
                if future in self._let_go:
                    self._let_go.discard(future)
                    return
            del job, future  # an idle thread must not keep the last call's arguments, a whole conversation, in memory
            self._idle.release()


def _run(future: "Future[Any]", call: Callable[[], Any]) -> None:
    if not future.set_running_or_notify_cancel():
        return
    try:
        answer = call()
    except BaseException as error:  # noqa: BLE001 - passed to the caller that waits for the future
        future.set_exception(error)
    else:
        future.set_result(answer)


async def in_thread(
    work: Callable[[threading.Event], T],
    *,
    discard: Callable[[T], object] | None = None,
    at_end: Callable[[], object] | None = None,
) -> T:
    """Run code of the user's, or what reads the user's files and streams, in a thread.

    If the caller is cancelled, the work is asked to stop. If it does not end soon, its thread is left alone: Python
    cannot interrupt it, and it may wait for ever.

    Args:
        work: Function to run. It gets an event that is set when it should stop; `stop_requested` returns the same.
        discard: Called with a late result.
        at_end: Called once the work has ended, or will never begin, before this function returns.

    Raises:
        SandboxFailed: No thread can be started.
        asyncio.CancelledError: The caller was cancelled. The error of `work` is dropped.
    """
    stop = threading.Event()
    with contextlib.ExitStack() as unstarted:
        if at_end is not None:
            unstarted.callback(at_end)
        future: Future[T] = _OF_USERS.submit(partial(_stoppable, work, stop))
        ending = unstarted.pop_all()
    future.add_done_callback(lambda _: ending.close())
    ended = asyncio.wrap_future(future)
    try:
        while not ended.done():
            await asyncio.wait({ended}, timeout=SLOW_S)
            _OF_USERS.let_go(future)
    except asyncio.CancelledError:
        stop.set()
        if not future.cancel():
            await to_its_end(lambda: asyncio.wait({ended}, timeout=SLOW_S))
            _OF_USERS.let_go(future)
            future.add_done_callback(partial(_discarded, discard))
        if not ended.cancel() and not ended.cancelled():
            ended.exception()  # read, or asyncio would report it as never retrieved
        raise
    return ended.result()


def stop_requested() -> bool:
    """Return whether the caller of the work that this thread does was cancelled, see `in_thread`."""
    stop = _stop.get()
    return stop is not None and stop.is_set()


_OF_USERS: Final = DaemonThreads(32)
_stop: contextvars.ContextVar[threading.Event | None] = contextvars.ContextVar("stop", default=None)


def _stoppable(work: Callable[[threading.Event], T], stop: threading.Event) -> T:
    _stop.set(stop)
    return work(stop)


def _discarded(discard: Callable[[T], object] | None, future: "Future[T]") -> None:
    if not future.cancelled() and future.exception() is None and discard is not None:
        discard(future.result())


_PLACES: Final = 2
"""Works of `aside` at the same time. They are few, so that many of them leave time to other work."""
_THREADS = DaemonThreads(_PLACES)
_TURNS: "weakref.WeakKeyDictionary[asyncio.AbstractEventLoop, FairSemaphore]" = weakref.WeakKeyDictionary()
"""Turns of the works of each event loop."""


async def aside(work: Callable[[], T], whose: Hashable, most_waiting: int | None = None) -> T:
    """Do work that may take seconds in a thread, for example a check by an untrusted schema. Its owners (`whose`) take
    turns.

    The work is not begun if the caller is cancelled while it waits for its turn.

    Raises:
        asyncio.QueueFull: `most_waiting` works of the owner wait already.
    """
    loop = asyncio.get_running_loop()
    turns = _TURNS.setdefault(loop, FairSemaphore(_PLACES))
    if most_waiting is not None and turns.waiting_of(whose) >= most_waiting:
        raise asyncio.QueueFull
    await turns.acquire(whose)
    try:
        working = _THREADS.submit(work)
    except BaseException:
        turns.release()
        raise
    working.add_done_callback(lambda _: _pass_on(loop, turns))  # also if the caller is cancelled: a thread goes on
    done: T = await asyncio.wrap_future(working)
    return done


def _pass_on(loop: asyncio.AbstractEventLoop, turns: FairSemaphore) -> None:
    with contextlib.suppress(RuntimeError):  # the loop is closed, and no turn of it waits
        loop.call_soon_threadsafe(turns.release)
