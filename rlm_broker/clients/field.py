"""Other people's client objects, with the interface that the field's runtimes share."""

import asyncio
import inspect
import weakref
from typing import Any, Protocol

from rlm_broker.clients.base import BaseClient, LMReply, LMRequest
from rlm_broker.clients.function import FunctionClient
from rlm_broker.errors import ModelFailed
from rlm_broker.results import Usage


class FieldLike(Protocol):
    """Such an object; `acompletion`, `get_last_usage` and `model_name` are used where it has them."""

    def completion(self, prompt: Any, /) -> str:
        """The reply to a list of chat messages, each a dict with `role` and `content`."""
        ...


class FieldClient(BaseClient):
    """Calls an object with `completion(prompt)` or `acompletion(prompt)`, where a prompt is a list of chat messages.

    If it has `get_last_usage()`, what that tells after a call is what the call used; and since two calls at the same
    time could not be told apart by it, they are made one after the other. Without it they run at the same time, and
    their tokens and their cost are unknown.

    Args:
        client: `model_name` is the name it is reported under.
    """

    def __init__(self, client: Any) -> None:
        self.model_name = str(getattr(client, "model_name", None) or type(client).__name__)
        self._client = client
        self._tells_usage = callable(getattr(client, "get_last_usage", None))
        if self._tells_usage:
            self.max_concurrent = 1
        self._turn = asyncio.Lock()  # for those who use it without a handler
        self._calls: set[asyncio.Task[LMReply]] = set()
        self._is_async = inspect.iscoroutinefunction(getattr(client, "acompletion", None))
        self._function = FunctionClient(self._aask if self._is_async else self._ask, self.model_name)

    async def complete(self, request: LMRequest) -> LMReply:
        """One call.

        Raises:
            ModelFailed: The object raised, or returned something else than text.
        """
        if not self._tells_usage:
            return await self._function.complete(request)
        # A call in a thread goes on when it is cancelled, and until its end the last usage is not the next one's.
        call = asyncio.get_running_loop().create_task(self._alone(request))
        self._calls.add(call)
        call.add_done_callback(self._ended)
        try:
            return await asyncio.shield(call)
        except asyncio.CancelledError:
            if self._is_async:
                call.cancel()
            raise

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
        return self._client.completion(messages)

    async def _aask(self, messages: list[Any]) -> Any:
        return await self._client.acompletion(messages)

    def _last_usage(self) -> Usage:
        try:
            told = self._client.get_last_usage()
            inputs, outputs = told.total_input_tokens or 0, told.total_output_tokens or 0
            cost = getattr(told, "total_cost", None)
            return Usage(1, int(inputs), int(outputs), None if cost is None else float(cost))
        except Exception as error:  # noqa: BLE001 - the object is anybody's
            raise ModelFailed(f"{self.model_name}: get_last_usage: {type(error).__name__}: {error}") from None


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
