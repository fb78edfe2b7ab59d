"""Objects that users hand in as models, made clients with all abilities. Nothing further in asks what they have."""

import weakref
from collections.abc import Callable
from typing import Any, cast

from rlm_broker.clients.base import BaseClient, Client, LMReply, LMRequest, with_text
from rlm_broker.clients.field import FieldClient, FieldLike, field_client, is_field_client
from rlm_broker.clients.function import FunctionClient
from rlm_broker.errors import ConfigurationError
from rlm_broker.results import Usage


def _of_original(name: str) -> Any:
    """Make a property that reads the attribute each time, since the object may change it; None if there is none."""
    return property(lambda self: getattr(self.original, name, None))


class BroughtClient(BaseClient):
    """Calls a client that is the user's own, and says what that has of the optional abilities of a `Client`.

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
        """Answer one request: the original does. Where it returns None, or a reply without text, the text is empty."""
        reply: LMReply | None = await self.original.complete(request)
        return LMReply("", Usage(total_calls=1)) if reply is None else with_text(reply)

    @property
    def counts_tokens(self) -> bool:  # type: ignore[override]
        """Whether the original can count."""
        return callable(getattr(self.original, "count_tokens", None))

    def count_tokens(self, text: str) -> int | None:
        """Have the original count; None where what it says is no number."""
        counted = getattr(self.original, "count_tokens")(text)  # noqa: B009 - a `Client` need not have it
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
    """Return `client` itself if it is a `BaseClient`, else the wrapper of it: always the same while that is in use.

    Raises:
        ConfigurationError: It is no client.
    """
    if isinstance(client, BaseClient):
        return client
    if not hasattr(client, "complete"):
        if is_field_client(client):
            return field_client(client)
        raise ConfigurationError(
            f"a client is an object with `complete` or `completion`, and not {type(client).__name__}; for a function "
            "give FunctionClient(function), for a name use RLM"
        )
    client = cast("Client", client)
    found = _wrapped.get(id(client))
    if found is None:
        found = _wrapped[id(client)] = BroughtClient(client)
    return found


def original(client: BaseClient) -> Client:
    """Return the object that the user handed in for `client`."""
    return client.original if isinstance(client, BroughtClient | FieldClient) else client


def client_of(given: Client | FieldLike | Callable[..., Any]) -> BaseClient:
    """Return a client that calls what a user gives as a model.

    Raises:
        ConfigurationError: It is neither a client nor a function.
    """
    if isinstance(given, type):
        raise ConfigurationError(f"a model is an object, and not the class {given.__name__}: make one of it")
    if hasattr(given, "complete") and hasattr(given, "model_name"):
        return adapted(cast("Client", given))
    if is_field_client(given):
        return field_client(given)
    if callable(given):
        return FunctionClient(given)
    raise ConfigurationError(f"a model is a name, a Model, a client or a function, and not {type(given).__name__}")


_wrapped: "weakref.WeakValueDictionary[int, BroughtClient]" = weakref.WeakValueDictionary()
"""By the identity of the object, which lives as long as its wrapper does."""
