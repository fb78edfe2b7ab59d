"""Clients by the name of their model, as users type it."""

from typing import Any

from rlm_broker.clients.base import BaseClient
from rlm_broker.clients.litellm import LiteLLMClient, full_name
from rlm_broker.errors import UnknownModel

_EXAMPLES = "'offline' (no key, no network), 'openai/gpt-5-mini' or 'anthropic/claude-sonnet-4-5'"


def client_for(name: str, **options: Any) -> BaseClient:
    """Return the client of a model: `offline`, `provider/model`, or a well-known bare name such as `gpt-5-mini`.

    No request is sent. For a provider that is not well known it imports litellm, which takes seconds.

    Args:
        name: Name of the model.
        options: Arguments of `LiteLLMClient`.

    Raises:
        UnknownModel: It is not the name of a model, or the provider does not exist.
        ConfigurationError: The provider's key is not set.
    """
    if not name.strip():
        raise UnknownModel(f"the model's name is empty; give one such as {_EXAMPLES}")
    if name == "offline":
        from rlm_broker.clients.offline import OfflineClient  # imported here: only this model needs its modules

        return OfflineClient()
    if "://" in name:  # litellm would send the conversation to that address
        raise UnknownModel(
            f"{name!r} has an address in it; give that as base_url, and the name that the model has there"
        )
    if full_name(name) is None:
        raise UnknownModel(f"{name!r} is not the name of a model; give 'provider/model', such as {_EXAMPLES}")
    client = LiteLLMClient(name, **options)
    client.check()
    return client
