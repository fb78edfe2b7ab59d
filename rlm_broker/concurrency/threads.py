"""Blocking functions of the user and of libraries, run in daemon threads that do not delay the exit of the program."""

import asyncio
import contextlib
import contextvars
import os
import queue
import threading
from collections.abc import Callable
from concurrent.futures import Future
from functools import partial
from typing import Any, TypeVar

from rlm_broker.concurrency.deadline import to_its_end

T = TypeVar("T")
_Job = tuple["Future[Any]", Callable[[], Any]]


class DaemonThreads:
    """Runs calls in at most `max_threads` threads; each is started when a call finds none idle.

    While all of them are busy, calls wait in a queue without bound.

    Not a `ThreadPoolExecutor`: the interpreter joins the threads of an executor at exit
    (`concurrent.futures.thread._python_exit`). A single function that never returns would keep the program alive.

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
                threading.Thread(target=self._work, name=f"rlm-broker-call-{self._started}", daemon=True).start()
                self._started += 1
        return future

    def _start_afresh(self) -> None:
        self._pid = os.getpid()
        self._lock = threading.Lock()  # `submit` is called from several threads: one client may serve several loops
        self._jobs: queue.SimpleQueue[_Job | None] = queue.SimpleQueue()
        self._idle = threading.Semaphore(0)
        self._started = 0

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
            _run(*job)
            del job  # an idle thread must not keep the last call's arguments, a whole conversation, in memory
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


async def in_thread(work: Callable[[threading.Event], T]) -> T:
    """Run blocking work in a thread. If the caller is cancelled, request the work's stop and await its end.

    Args:
        work: Function to run. It gets an event, which is set when it should stop; it looks at the event itself, since
            Python cannot interrupt a thread.

    Raises:
        asyncio.CancelledError: The caller was cancelled. Raised after the end of `work`, whose error is dropped.
    """
    stop = threading.Event()
    running = asyncio.ensure_future(asyncio.to_thread(work, stop))
    try:
        return await asyncio.shield(running)
    except asyncio.CancelledError:
        stop.set()
        with contextlib.suppress(Exception):
            await to_its_end(lambda: _result(running))
        raise


async def _result(running: "asyncio.Future[T]") -> T:
    return await running
