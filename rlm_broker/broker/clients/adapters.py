"""Clients made of a user's model: a name, a client, a function, or the client object of another runtime.

The adapters have all abilities of a `BaseClient`, so that no other module checks for them.
"""

import asyncio
import inspect
import weakref
from collections.abc import Callable
from types import ModuleType
from typing import Any, Protocol, cast

from rlm_broker.broker.clients.base import BaseClient, Client, LMReply, LMRequest, with_text
from rlm_broker.broker.clients.function import FunctionClient
from rlm_broker.broker.clients.providers import full_name, named
from rlm_broker.errors import ConfigurationError, ModelFailed, UnknownModel
from rlm_broker.events.redaction import in_words
from rlm_broker.usage import Usage

_EXAMPLES = "'offline' (no key, no network), 'openai/gpt-5-mini' or 'anthropic/claude-sonnet-4-5'"

_BY_NAME = '"openai/gpt-5-mini", or Model(name=..., base_url=...)'
_INSTEAD = {
    "openai": 'Model(name="gpt-5-mini", base_url=..., api_key="env:OPENAI_API_KEY")',
    "anthropic": '"anthropic/claude-sonnet-4-5"',
    "ollama": '"ollama/NAME"',
    "litellm": _BY_NAME,
    "dspy": f"{_BY_NAME}, or a function: lambda messages: lm(messages=messages)[0]",
    "langchain_core": f"{_BY_NAME}, or a function: lambda messages: model.invoke(messages).content",
    "smolagents": f"{_BY_NAME}, or a function: lambda messages: model(messages).content",
    "transformers": 'a function: lambda messages: pipe(messages)[0]["generated_text"][-1]["content"]',
}
"""Package of a model object that cannot be called as a client is → what to give in its place."""


class SyncFieldLike(Protocol):
    """An object whose `completion` is called in a thread. `get_last_usage` and `model_name` are used if it has them.

    Example:
        ```python
        class Echo:
            def completion(self, prompt):
                return prompt if isinstance(prompt, str) else prompt[-1]["content"]

        RLM(Echo()).completion("text", "What is it?")
        ```
    """

    def completion(self, prompt: Any, /) -> str:
        """Return the reply to a text, or to a list of chat messages: dicts with `role` and `content`."""
        ...


class AsyncFieldLike(Protocol):
    """An object whose `acompletion` is awaited. `get_last_usage` and `model_name` are used if it has them.

    Example:
        ```python
        class Echo:
            async def acompletion(self, prompt):
                return prompt if isinstance(prompt, str) else prompt[-1]["content"]

        RLM(Echo()).completion("text", "What is it?")
        ```
    """

    async def acompletion(self, prompt: Any, /) -> str:
        """Return the reply; see `SyncFieldLike.completion`."""
        ...


FieldLike = SyncFieldLike | AsyncFieldLike
"""A client object of another runtime: any object with `completion(messages)` or `acompletion(messages)`."""


class FieldClient(BaseClient):
    """Calls an object with `completion(prompt)` or `acompletion(prompt)`.

    A prompt is a list of chat messages, or text if the request is a single text of the user.

    `get_last_usage()`, if the object has it, returns the usage of the last call; else tokens and cost are unknown. It
    must be read before another call ends:

    - An `acompletion` sets it in its last step on the event loop, so a read right after the await is exact.
    - Calls of `completion` run in threads, so they must run one after the other.

    Args:
        client: The object. It may have a `model_name` for reports, and its model's `context_tokens`.

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
            ModelFailed: The object raised, or returned no text.
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
            call.exception()  # read, or asyncio would log it if the caller was cancelled

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


def _of_original(name: str) -> Any:
    """Return a property for an attribute of the original, which may change; None if it has no such attribute."""
    return property(lambda self: getattr(self.original, name, None))


class BroughtClient(BaseClient):
    """Calls a client of the user, and has defaults for the optional abilities.

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
        """Have the original answer. None as a reply or as its text becomes an empty text."""
        reply: LMReply | None = await self.original.complete(request)
        return LMReply("", Usage(total_calls=1)) if reply is None else with_text(reply)

    @property
    def counts_tokens(self) -> bool:  # type: ignore[override]
        """Whether the original has a method `count_tokens`."""
        return callable(getattr(self.original, "count_tokens", None))

    def count_tokens(self, text: str) -> int | None:
        """Return the original's count, or None if it is no number of tokens."""
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
    """Return `client` if it is a `BaseClient`, else its wrapper: always the same, so that one queue has all its calls.

    Raises:
        ConfigurationError: It is not a client.
    """
    if isinstance(client, BaseClient):
        return client
    found = _wrappers.get(id(client))
    if found is None:
        if hasattr(client, "complete") and (hasattr(client, "model_name") or not is_field_client(client)):
            found = BroughtClient(cast("Client", client))
        elif is_field_client(client):
            found = FieldClient(client)
        else:
            raise ConfigurationError(
                f"a client must be an object with `complete` or `completion`, not {type(client).__name__}; for a "
                "function give FunctionClient(function), for a name use RLM"
            )
        _wrappers[id(client)] = found
    return found


def original(client: BaseClient) -> Client:
    """Return the user's object behind `client`."""
    return client.original if isinstance(client, BroughtClient | FieldClient) else client


def client_of(given: Client | FieldLike | Callable[..., Any]) -> BaseClient:
    """Return a client for a user's object.

    Raises:
        ConfigurationError: It is neither a client nor a function.
    """
    if isinstance(given, type):
        raise ConfigurationError(f"a model must be an object, not the class {given.__name__}: give an instance of it")
    is_client = hasattr(given, "complete") and hasattr(given, "model_name")
    instead = None if is_client else _instead_of(given)
    if instead is None and (is_client or is_field_client(given)):
        return adapted(cast("Client | FieldLike", given))
    if instead is None and callable(given):
        return FunctionClient(given)
    kind = f"{type(given).__name__}{'' if instead is None else f': write {instead}'}"
    raise ConfigurationError(f"a model must be a name, a Model, a client or a function, not {kind}")


def _instead_of(given: object) -> str | None:
    """Return what to write in place of a model object of another library; None for any other object."""
    modules = [given.__name__] if isinstance(given, ModuleType) else [each.__module__ for each in type(given).__mro__]
    return next((written for each in modules if (written := _INSTEAD.get(each.partition(".")[0]))), None)


def client_for(name: str, **options: Any) -> BaseClient:
    """Return the client of a model: `offline`, `provider/model`, or a well-known bare name such as `gpt-5-mini`.

    No request is sent. Providers of `providers.PROVIDERS` are called by our own client, all others through litellm.

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
        from rlm_broker.broker.clients.offline import OfflineClient

        return OfflineClient()
    if "://" in name:  # litellm would send the conversation to that address
        raise UnknownModel(
            f"{name!r} has an address in it; give that as base_url, and the name that the model has there"
        )
    full = full_name(name)
    if full is None:
        raise UnknownModel(f"{name!r} is not the name of a model; give 'provider/model', such as {_EXAMPLES}")
    if named(full):
        from rlm_broker.broker.clients.provider_client import ProviderClient

        headers = options.pop("extra_headers", None)
        return ProviderClient(full, model_name=name, headers=headers, **options)
    from rlm_broker.broker.clients.litellm import LiteLLMClient

    client = LiteLLMClient(name, **options)
    client.check()
    return client


_wrappers: "weakref.WeakValueDictionary[int, BroughtClient | FieldClient]" = weakref.WeakValueDictionary()
"""`id` of a user's object → its wrapper. The wrapper keeps the object alive, so the `id` is not reused."""
