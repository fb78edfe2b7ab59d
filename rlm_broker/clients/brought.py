"""Adapters that give the clients of users all abilities of a `BaseClient`, so that no other module checks for them."""

import weakref
from collections.abc import Callable
from typing import Any, cast

from rlm_broker.clients.base import BaseClient, Client, LMReply, LMRequest, with_text
from rlm_broker.clients.field import FieldClient, FieldLike, field_client, is_field_client
from rlm_broker.clients.function import FunctionClient
from rlm_broker.errors import ConfigurationError
from rlm_broker.usage import Usage


def _of_original(name: str) -> Any:
    """Return a property that reads the original's attribute at each access, because the object may change it.

    The value is None if the object has no such attribute.
    """
    return property(lambda self: getattr(self.original, name, None))


class BroughtClient(BaseClient):
    """Calls a client of the user, and answers for the optional abilities that it lacks.

    Attributes:
        original: The user's object.
    """

    model_name: Any = property(lambda self: self.original.model_name)
    context_tokens = _of_original("context_tokens")
    max_concurrent = _of_original("max_concurrent")
    fingerprint = _of_original("fingerprint")
    is_priced = _of_original("is_priced")

    def __init__(self, original: Client) -> None:
        self.original = original

    async def complete(self, request: LMRequest) -> LMReply:
        """Have the original answer. If it returns None, or a reply whose text is None, the text is empty."""
        reply: LMReply | None = await self.original.complete(request)
        return LMReply("", Usage(total_calls=1)) if reply is None else with_text(reply)

    @property
    def counts_tokens(self) -> bool:  # type: ignore[override]
        """Whether the original has a method `count_tokens`."""
        return callable(getattr(self.original, "count_tokens", None))

    def count_tokens(self, text: str) -> int | None:
        """Return what the original counts, or None if that is not a number of tokens."""
        counted = getattr(self.original, "count_tokens")(text)  # noqa: B009 - `Client` does not declare it
        return counted if isinstance(counted, int) and counted >= 0 else None

    async def aclose(self) -> None:
        """Close the original."""
        await self.original.aclose()

    async def preflight(self) -> None:
        """Run the original's preflight, if it has one."""
        preflight = getattr(self.original, "preflight", None)
        if preflight is not None:
            await preflight()


def adapted(client: Client | FieldLike) -> BaseClient:
    """Return `client` if it is a `BaseClient`, else its wrapper.

    The wrapper of one object stays the same while it is in use, so that one queue holds all its calls.

    Raises:
        ConfigurationError: It is not a client.
    """
    if isinstance(client, BaseClient):
        return client
    if not hasattr(client, "complete"):
        if is_field_client(client):
            return field_client(client)
        raise ConfigurationError(
            f"a client must be an object with `complete` or `completion`, not {type(client).__name__}; for a function "
            "give FunctionClient(function), for a name use RLM"
        )
    client = cast("Client", client)
    found = _wrapped.get(id(client))
    if found is None:
        found = _wrapped[id(client)] = BroughtClient(client)
    return found


def original(client: BaseClient) -> Client:
    """Return the object that the user gave for `client`."""
    return client.original if isinstance(client, BroughtClient | FieldClient) else client


def client_of(given: Client | FieldLike | Callable[..., Any]) -> BaseClient:
    """Return a client for an object that a user gives as a model.

    Raises:
        ConfigurationError: It is neither a client nor a function.
    """
    if isinstance(given, type):
        raise ConfigurationError(f"a model must be an object, not the class {given.__name__}: give an instance of it")
    if hasattr(given, "complete") and hasattr(given, "model_name"):
        return adapted(cast("Client", given))
    if is_field_client(given):
        return field_client(given)
    if callable(given):
        return FunctionClient(given)
    raise ConfigurationError(f"a model must be a name, a Model, a client or a function, not {type(given).__name__}")


_wrapped: "weakref.WeakValueDictionary[int, BroughtClient]" = weakref.WeakValueDictionary()
"""Maps the `id` of an original to its wrapper, which keeps the original alive, so the `id` is not reused."""
