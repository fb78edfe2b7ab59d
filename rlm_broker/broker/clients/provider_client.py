"""Models of the table of providers, called by our own client, with litellm's prices where it is installed."""

import asyncio
import functools
import importlib.util
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec

from rlm_broker.broker.clients.base import LMReply, LMRequest
from rlm_broker.broker.clients.openai_compatible import OpenAICompatibleClient
from rlm_broker.broker.clients.providers import PROVIDERS, address, key, missing_key, named
from rlm_broker.errors import ConfigurationError

_PRICES_FILE = "model_prices_and_context_window_backup.json"
"""File of the package litellm with prices and windows. It is read without an import, which would take seconds."""


class ProviderClient(OpenAICompatibleClient):
    """One model of a provider of the table.

    Example:
        ```python
        RLM("openai/gpt-5-mini", "ollama/qwen3:4b")
        ```

    Args:
        name: `provider/model`.
        model_name: Name in reports.
        api_key: Key in place of the variable's.
        headers: Sent with each request.
        usd_per_million_tokens, context_tokens: As `OpenAICompatibleClient` has them. What is left out is taken from
            litellm's table, if litellm is installed.
        options: Further fields of the request's body; `api_base` is the address.

    Raises:
        ConfigurationError: The key is not set.
    """

    def __init__(
        self,
        name: str,
        *,
        model_name: str | None = None,
        api_key: str | None = None,
        headers: Mapping[str, str] | None = None,
        usd_per_million_tokens: tuple[float, float] | None = None,
        context_tokens: int | None = None,
        **options: Any,
    ) -> None:
        self._provider, model = named(name) or ("", name)
        self._described = PROVIDERS[self._provider]
        if usd_per_million_tokens is None and not self._described.keys:
            usd_per_million_tokens = (0.0, 0.0)
        super().__init__(
            options.pop("api_base", None) or address(self._provider),
            model,
            api_key=api_key or key(self._provider),
            headers=headers,
            options=options,
            usd_per_million_tokens=usd_per_million_tokens,
            context_tokens=context_tokens,
            model_name=model_name or name,
        )
        if missing := "" if api_key else missing_key(self._provider):
            raise ConfigurationError(
                f"model {self.model_name!r} needs {missing}, which is not set: export it, "
                "or use the model 'offline', which needs no key"
            )
        self._is_loaded = False

    async def loaded(self) -> None:
        """Take price and window from litellm's table, where they were left out and it is installed."""
        if self._is_loaded:
            return
        table = await asyncio.to_thread(_listed_facts)
        listed_as = self._described.listed_as or self._provider
        facts = table.get(f"{listed_as}/{self._model}") or table.get(self._model) or {}
        inputs, outputs = facts.get("input_cost_per_token"), facts.get("output_cost_per_token")
        if self._prices is None and isinstance(inputs, int | float) and isinstance(outputs, int | float):
            self._prices = inputs * 1e6, outputs * 1e6
            self.is_priced = True
        window = facts.get("max_input_tokens")
        self.context_tokens = self.context_tokens or (window if isinstance(window, int) and window > 0 else None)
        self._is_loaded = True

    async def preflight(self) -> None:
        """Ask a server on this machine for the model. A provider is not asked: its list lacks names that it takes."""
        await self.loaded()
        if not self._described.keys:
            await super().preflight()

    async def complete(self, request: LMRequest) -> LMReply:
        """Send one request; see `OpenAICompatibleClient.complete`."""
        await self.loaded()
        return await super().complete(request)

    def _fields(self, request: LMRequest) -> dict[str, Any]:
        body = super()._fields(request)
        if (limit := self._described.output_limit) != "max_tokens" and "max_tokens" in body:
            body[limit] = body.pop("max_tokens")
        if not self._described.tells_usage:
            body.pop("stream_options", None)
        return body


@functools.cache
def _listed_facts() -> dict[str, dict[str, Any]]:
    """Return litellm's table of prices and windows; empty if it is not installed."""
    try:
        found = importlib.util.find_spec("litellm")
        return msgspec.json.decode(Path(found.origin or "").with_name(_PRICES_FILE).read_bytes()) if found else {}
    except (ImportError, OSError, ValueError, msgspec.MsgspecError):
        return {}
