"""Clients of other RLM runtimes, which share one interface: `completion` or `acompletion`, and `get_last_usage`."""

import asyncio
import inspect
import weakref
from typing import Any, Protocol

from rlm_broker.clients.base import BaseClient, LMReply, LMRequest
from rlm_broker.clients.function import FunctionClient
from rlm_broker.errors import ModelFailed
from rlm_broker.events.redaction import in_words
from rlm_broker.usage import Usage


class SyncFieldLike(Protocol):
    """An object whose `completion` is called in a thread. `get_last_usage` and `model_name` are used if it has them."""

    def completion(self, prompt: Any, /) -> str:
        """Return the reply to a text, or to a list of chat messages: dicts with `role` and `content`."""
        ...


class AsyncFieldLike(Protocol):
    """An object whose `acompletion` is awaited. `get_last_usage` and `model_name` are used if it has them."""

    async def acompletion(self, prompt: Any, /) -> str:
        """Return the reply; see `SyncFieldLike.completion`."""
        ...


FieldLike = SyncFieldLike | AsyncFieldLike
"""A client object of another runtime: any object with `completion(messages)` or `acompletion(messages)`."""


class FieldClient(BaseClient):
    """Calls an object with `completion(prompt)` or `acompletion(prompt)`.

    A prompt is a list of chat messages, or text if the request is a single text of the user.

    If the object has `get_last_usage()`, its result after a call is the usage of that call; else tokens and cost are
    unknown. The result has to be read before another call ends:

    - An `acompletion` sets its usage in the event loop step in which it returns, so a read right after the await is
      exact.
    - Calls of `completion` run in threads and could not be told apart, so they run one after the other.

    Args:
        client: The object. `model_name` is the name under which it is reported, and `context_tokens` the size of its
            model's context window, if it has these.

    Attributes:
        original: The object.
    """

    def __init__(self, client: Any) -> None:
        self.model_name = str(getattr(client, "model_name", None) or type(client).__name__)
        window = getattr(client, "context_tokens", None)
        self.context_tokens = window if isinstance(window, int) and window > 0 else None
        self.original = client
        self._tells_usage = callable(getattr(client, "get_last_usage", None))
        self._is_async = inspect.iscoroutinefunction(getattr(client, "acompletion", None))
        self._is_alone = self._tells_usage and not self._is_async
        if self._is_alone:
            self.max_concurrent = 1
        self._turn = asyncio.Lock()  # `max_concurrent` holds in a handler alone; this holds everywhere
        self._calls: set[asyncio.Task[LMReply]] = set()
        self._function = FunctionClient(self._aask if self._is_async else self._ask, self.model_name)

    async def complete(self, request: LMRequest) -> LMReply:
        """Call the object once.

        Raises:
            ModelFailed: The object raised, or returned something other than text.
        """
        if not self._is_alone:
            return await self._function.complete(request)
        # A cancelled call goes on in its thread, and would set the last usage while the next call runs. So it keeps the
        # turn until its thread ends.
        call = asyncio.get_running_loop().create_task(self._alone(request))
        self._calls.add(call)
        call.add_done_callback(self._ended)
        return await asyncio.shield(call)

    async def _alone(self, request: LMRequest) -> LMReply:
        async with self._turn:
            reply = await self._function.complete(request)
            return LMReply(reply.text, self._last_usage())

    def _ended(self, call: "asyncio.Task[LMReply]") -> None:
        self._calls.discard(call)
        if not call.cancelled():
            call.exception()  # marks it as read: asyncio logs exceptions of cancelled callers' tasks otherwise

    async def aclose(self) -> None:
        """Release the threads. The object itself stays open: it belongs to the user."""
        await self._function.aclose()

    def _ask(self, messages: list[Any]) -> Any:
        return self.original.completion(_prompt_of(messages))

    async def _aask(self, messages: list[Any]) -> Any:
        reply = await self.original.acompletion(_prompt_of(messages))
        # Read in the same event loop step in which the call returned, before another call can set its usage.
        return LMReply(reply, self._last_usage()) if self._tells_usage and isinstance(reply, str) else reply

    def _last_usage(self) -> Usage:
        try:
            told = self.original.get_last_usage()
            inputs, outputs = told.total_input_tokens or 0, told.total_output_tokens or 0
            cost = getattr(told, "total_cost", None)
            return Usage(1, int(inputs), int(outputs), None if cost is None else float(cost))
        except Exception as error:  # noqa: BLE001 - the object is the user's and may raise anything
            raise ModelFailed(f"{self.model_name}: get_last_usage: {in_words(error)}") from None


def _prompt_of(messages: list[Any]) -> str | list[Any]:
    """Return a conversation of a single user text as text, and any other conversation as messages."""
    if len(messages) == 1 and messages[0]["role"] == "user" and isinstance(messages[0]["content"], str):
        return str(messages[0]["content"])
    return messages


def is_field_client(value: Any) -> bool:
    """Whether an object has `completion` or `acompletion`."""
    return not isinstance(value, type) and callable(getattr(value, "completion", getattr(value, "acompletion", None)))


def field_client(client: Any) -> FieldClient:
    """Return the wrapper of an object, always the same: two wrappers could not serialise its calls."""
    found = _wrapped.get(id(client))
    if found is None:
        found = _wrapped[id(client)] = FieldClient(client)
    return found


_wrapped: "weakref.WeakValueDictionary[int, FieldClient]" = weakref.WeakValueDictionary()
"""Maps the `id` of an object to its wrapper, which keeps the object alive, so the `id` is not reused."""
