"""A function as a model: any callable that takes a conversation and returns text."""

import asyncio
import inspect
import weakref
from collections.abc import Awaitable, Callable
from functools import partial
from typing import Any

from rlm_broker.broker.clients.base import BaseClient, LMReply, LMRequest, with_text
from rlm_broker.concurrency.threads import DaemonThreads
from rlm_broker.errors import ConfigurationError, ModelFailed
from rlm_broker.events.redaction import in_words
from rlm_broker.usage import Usage

MAX_THREADS = 64
"""Maximum concurrent calls of one synchronous function; further calls wait for a thread."""


class FunctionClient(BaseClient):
    """Calls a function of the user in place of a model.

    Example:
        ```python
        def ask(messages, model=None):
            return messages[-1]["content"].upper()

        RLM(FunctionClient(ask, "mine")).completion("text", "What is it?")
        ```

    Args:
        fn: Sync or async, `fn(messages, model)` or `fn(messages)`. `messages` is a list of dicts with `role` and
            `content`; `model`, any second positional parameter, is the requested name or None. It returns text, None
            for an empty text, or an `LMReply` with its usage. A sync function runs in up to `MAX_THREADS` threads, so
            it may block and must be thread-safe.
        model_name: Name in reports.

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

        Example:
            ```python
            client = FunctionClient(lambda messages: messages[-1]["content"].upper())
            (await client.complete(request)).text  # 'HOW MANY LINES ARE THERE?'
            ```

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
        except Exception as error:  # the function is the user's and may raise anything
            raise self._failed(error) from error
        return self._reply(answer)

    async def aclose(self) -> None:
        """End the threads. One stuck in the function is left behind, as a daemon. A later call starts new threads."""
        threads, self._threads = self._threads, self._new_threads()
        threads.close(self._closed())

    def _new_threads(self) -> "DaemonThreads":
        threads = DaemonThreads(MAX_THREADS)
        weakref.finalize(self, threads.close, self._closed())  # ends the threads of a client that was never closed
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
        return ModelFailed(f"{self.model_name}: {in_words(error)}")

    def _reply(self, answer: object) -> LMReply:
        if isinstance(answer, LMReply):
            return with_text(answer)
        if isinstance(answer, str | None):
            return LMReply(answer or "", Usage(total_calls=1))
        raise ModelFailed(
            f"{self.model_name}: the function returned {type(answer).__name__}; it must return str or LMReply"
        )


def _calling_convention(fn: Callable[..., Any]) -> Callable[[list[dict[str, Any]], str | None], Any]:
    """Return a function for calling `fn`, chosen by its signature.

    Trying out a call instead would take a TypeError from inside `fn` for a wrong signature, and pay the call twice.

    Raises:
        ConfigurationError: `fn` is not callable, or takes other arguments.
    """
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
    # `bind` accepts `model=None` for any **options, whose function may not expect it.
    if kwargs.keys() - signature.parameters.keys():
        return False
    try:
        signature.bind(*args, **kwargs)
    except TypeError:  # raised by `bind`: `fn` itself was not called
        return False
    return True
