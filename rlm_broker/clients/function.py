"""A function as a model: any callable that takes a conversation and returns text."""

import asyncio
import contextvars
import inspect
import queue
import threading
import weakref
from collections.abc import Awaitable, Callable
from concurrent.futures import Future
from functools import partial
from typing import Any

from rlm_broker.clients.base import LMReply, LMRequest
from rlm_broker.errors import ConfigurationError, ModelFailed
from rlm_broker.types import Usage

MAX_THREADS = 64
"""Calls of one synchronous function at the same time; further ones wait for a thread."""


class FunctionClient:
    """Calls a function of yours in place of a model.

    Args:
        fn: Sync or async, `fn(messages, model)` or `fn(messages)`: `messages` is a list of dicts with `role` and
            `content`, `model` the name that was asked for, or None. A second positional parameter, whatever its name,
            is the model. It returns the text, or an `LMReply` if it knows what the call used. A sync function runs in
            a thread, up to `MAX_THREADS` at once, so it may block; it has to be thread-safe.
        model_name: The name it is reported under.

    Raises:
        ConfigurationError: `fn` cannot be called in either way.
    """

    def __init__(self, fn: Callable[..., Any], model_name: str = "function") -> None:
        self.model_name = model_name
        self._invoke = _calling_convention(fn)
        callee: Any = fn
        self._is_async = inspect.iscoroutinefunction(callee) or inspect.iscoroutinefunction(callee.__call__)
        self._threads = self._new_threads()

    async def complete(self, request: LMRequest) -> LMReply:
        """Call the function once. A cancelled call of a sync function is abandoned: its thread cannot be stopped.

        Raises:
            ModelFailed: The function raised, or returned neither text nor an `LMReply`.
        """
        messages = [{"role": message.role, "content": message.content} for message in request.messages]
        call = partial(self._invoke, messages, request.model)
        try:
            answer = call() if self._is_async else await self._in_thread(call)
            if inspect.isawaitable(answer):
                answer = await answer
        except ModelFailed:
            raise
        except Exception as error:  # the function is the caller's: it may raise anything
            raise self._failed(error) from error
        return self._reply(answer)

    async def aclose(self) -> None:
        """Let the threads go. One that is stuck in the function is left behind; it holds up nobody.

        A later call starts new ones.
        """
        threads, self._threads = self._threads, self._new_threads()
        threads.close(self._closed())

    def _new_threads(self) -> "_DaemonThreads":
        threads = _DaemonThreads(MAX_THREADS)
        weakref.finalize(self, threads.close, self._closed())  # nobody has to close a client
        return threads

    def _closed(self) -> ModelFailed:
        return ModelFailed(f"{self.model_name}: the client was closed before the call began")

    def _in_thread(self, call: Callable[[], Any]) -> Awaitable[Any]:
        return asyncio.wrap_future(self._threads.submit(partial(self._guarded, call)))

    def _guarded(self, call: Callable[[], Any]) -> Any:
        try:
            return call()
        except (ModelFailed, asyncio.CancelledError):
            raise
        except BaseException as error:  # SystemExit would end the loop; a Future cannot carry StopIteration
            raise self._failed(error) from error

    def _failed(self, error: BaseException) -> ModelFailed:
        return ModelFailed(f"{self.model_name}: {type(error).__name__}: {error}")

    def _reply(self, answer: object) -> LMReply:
        if isinstance(answer, LMReply):
            return answer
        if isinstance(answer, str):
            return LMReply(answer, Usage(total_calls=1))
        raise ModelFailed(
            f"{self.model_name}: the function returned {type(answer).__name__}; it must return str or LMReply"
        )


def _calling_convention(fn: Callable[..., Any]) -> Callable[[list[dict[str, Any]], str | None], Any]:
    """How to call `fn`, decided by its signature. Trying it out would take a TypeError from inside for a refusal,
    and make (and pay) the call twice."""
    if not callable(fn):
        raise ConfigurationError(f"a function client needs a callable, not {type(fn).__name__}")
    try:
        signature = inspect.signature(fn)
    except ValueError as error:  # some callables written in C have none
        raise ConfigurationError(
            f"{fn!r} has no signature to read: wrap it in `lambda messages, model: ...`"
        ) from error
    if _binds(signature, [], None):
        return fn
    if _binds(signature, [], model=None):
        return lambda messages, model: fn(messages, model=model)
    if _binds(signature, []):
        return lambda messages, _model: fn(messages)
    raise ConfigurationError(f"a function client calls fn(messages, model) or fn(messages); this one takes {signature}")


def _binds(signature: inspect.Signature, *args: Any, **kwargs: Any) -> bool:
    # `bind` takes `model=None` into any **options, where it is not asked for.
    if kwargs.keys() - signature.parameters.keys():
        return False
    try:
        signature.bind(*args, **kwargs)
    except TypeError:  # of `bind`: nothing has been called
        return False
    return True


_Job = tuple["Future[Any]", Callable[[], Any]]


class _DaemonThreads:
    """Runs calls in at most `max_threads` threads, each started when a call finds none idle.

    Not a `ThreadPoolExecutor`: the interpreter joins the threads of one at its exit, so that a single function that
    never returns would keep the program alive for ever.
    """

    def __init__(self, max_threads: int) -> None:
        self._max_threads = max_threads
        self._lock = threading.Lock()  # one client may serve several event loops
        self._jobs: queue.SimpleQueue[_Job | None] = queue.SimpleQueue()
        self._idle = threading.Semaphore(0)
        self._started = 0
        self._closed: Exception | None = None

    def submit(self, call: Callable[[], Any]) -> "Future[Any]":
        """Queue `call`, with the caller's context variables."""
        future: Future[Any] = Future()
        with self._lock:
            if self._closed is not None:
                future.set_exception(self._closed)
                return future
            self._jobs.put((future, partial(contextvars.copy_context().run, call)))
            if not self._idle.acquire(blocking=False) and self._started < self._max_threads:
                threading.Thread(target=self._work, name=f"function-client-{self._started}", daemon=True).start()
                self._started += 1
        return future

    def close(self, reason: Exception) -> None:
        """End every idle thread, and each other one when its call returns. Calls not begun fail with `reason`."""
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
            del job  # an idle thread must not keep the last conversation alive
            self._idle.release()


def _run(future: "Future[Any]", call: Callable[[], Any]) -> None:
    if not future.set_running_or_notify_cancel():
        return
    try:
        answer = call()
    except BaseException as error:  # noqa: BLE001 - it belongs to whoever waits for the future, not to this thread
        future.set_exception(error)
    else:
        future.set_result(answer)
