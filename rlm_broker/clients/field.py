"""Other people's client objects, with the interface that the field's runtimes share."""

import asyncio
import inspect
import weakref
from typing import Any, Protocol

from rlm_broker.clients.base import BaseClient, LMReply, LMRequest
from rlm_broker.clients.function import FunctionClient
from rlm_broker.errors import ModelFailed
from rlm_broker.redaction import in_words
from rlm_broker.results import Usage


class SyncFieldLike(Protocol):
    """An object that is called in a thread. `get_last_usage` and `model_name` are used where it has them."""

    def completion(self, prompt: Any, /) -> str:
        """Return the reply to a text, or to a list of chat messages, each a dict with `role` and `content`."""
        ...


class AsyncFieldLike(Protocol):
    """An object that is awaited. `get_last_usage` and `model_name` are used where it has them."""

    async def acompletion(self, prompt: Any, /) -> str:
        """Return the reply, as `SyncFieldLike.completion`."""
        ...


FieldLike = SyncFieldLike | AsyncFieldLike
"""A client object of another runtime: whatever has `completion(messages)` or `acompletion(messages)`."""


class FieldClient(BaseClient):
    """Calls an object with `completion(prompt)` or `acompletion(prompt)`, where a prompt is a list of chat messages.

    A request of nothing but one text reaches the object as text. If it has `get_last_usage()`, what that says after a
    call is what the call used. An `acompletion` notes its usage in the step in which it returns, so reading it right
    after the await is exact. Calls of a `completion` in threads could not be told apart, and are made one after the
    other. Without `get_last_usage` tokens and cost are unknown.

    Args:
        client: `model_name` is the name it is reported under; `context_tokens`, if it has that, how much it can read.

    Attributes:
        original: The same.
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
        self._turn = asyncio.Lock()  # for those who use it without a handler
        self._calls: set[asyncio.Task[LMReply]] = set()
        self._function = FunctionClient(self._aask if self._is_async else self._ask, self.model_name)

    async def complete(self, request: LMRequest) -> LMReply:
        """One call.

        Raises:
            ModelFailed: The object raised, or returned something else than text.
        """
        if not self._is_alone:
            return await self._function.complete(request)
        # A call in a thread goes on when it is cancelled, and until its end the last usage is not the next one's.
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
            call.exception()  # nobody may wait for it any more

    async def aclose(self) -> None:
        """The object stays its maker's."""
        await self._function.aclose()

    def _ask(self, messages: list[Any]) -> Any:
        return self.original.completion(_prompt_of(messages))

    async def _aask(self, messages: list[Any]) -> Any:
        reply = await self.original.acompletion(_prompt_of(messages))
        # In the same step in which the call returned, before any other call can note its own usage.
        return LMReply(reply, self._last_usage()) if self._tells_usage and isinstance(reply, str) else reply

    def _last_usage(self) -> Usage:
        try:
            told = self.original.get_last_usage()
            inputs, outputs = told.total_input_tokens or 0, told.total_output_tokens or 0
            cost = getattr(told, "total_cost", None)
            return Usage(1, int(inputs), int(outputs), None if cost is None else float(cost))
        except Exception as error:  # noqa: BLE001 - the object is anybody's
            raise ModelFailed(f"{self.model_name}: get_last_usage: {in_words(error)}") from None


def _prompt_of(messages: list[Any]) -> str | list[Any]:
    """Return a single text as text, and any other conversation as messages."""
    if len(messages) == 1 and messages[0]["role"] == "user" and isinstance(messages[0]["content"], str):
        return str(messages[0]["content"])
    return messages


def is_field_client(value: Any) -> bool:
    """Whether an object has that interface."""
    return not isinstance(value, type) and callable(getattr(value, "completion", getattr(value, "acompletion", None)))


def field_client(client: Any) -> FieldClient:
    """The one of an object: two of them would not know of each other's calls."""
    found = _wrapped.get(id(client))
    if found is None:
        found = _wrapped[id(client)] = FieldClient(client)
    return found


_wrapped: "weakref.WeakValueDictionary[int, FieldClient]" = weakref.WeakValueDictionary()
"""By the identity of the object, which lives as long as its client does."""
