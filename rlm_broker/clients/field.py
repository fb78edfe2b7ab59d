"""Other people's client objects, with the interface that the field's runtimes share."""

import asyncio
import inspect
from typing import Any, Protocol

from rlm_broker.clients.base import LMReply, LMRequest
from rlm_broker.clients.function import FunctionClient
from rlm_broker.errors import ModelFailed
from rlm_broker.types import Usage


class FieldLike(Protocol):
    """Such an object; `acompletion`, `get_last_usage` and `model_name` are used where it has them."""

    def completion(self, prompt: Any, /) -> str:
        """The reply to a list of chat messages, each a dict with `role` and `content`."""
        ...


class FieldClient:
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
        is_async = inspect.iscoroutinefunction(getattr(client, "acompletion", None))
        self._function = FunctionClient(self._aask if is_async else self._ask, self.model_name)

    async def complete(self, request: LMRequest) -> LMReply:
        """One call.

        Raises:
            ModelFailed: The object raised, or returned something else than text.
        """
        if not self._tells_usage:
            return await self._function.complete(request)
        async with self._turn:
            reply = await self._function.complete(request)
            return LMReply(reply.text, self._last_usage())

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
