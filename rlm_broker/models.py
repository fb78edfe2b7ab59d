"""From what a user says of models to clients that are ready to be called, and who is called when."""

import asyncio
import os
from collections.abc import Callable, Mapping, Sequence
from typing import Annotated, Any, Self, cast

from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    model_validator,
)

from rlm_broker.cache import Cache
from rlm_broker.clients.base import Client
from rlm_broker.clients.field import FieldClient, FieldLike, is_field_client
from rlm_broker.clients.function import FunctionClient
from rlm_broker.clients.litellm import LiteLLMClient, prefetch
from rlm_broker.clients.named import client_for
from rlm_broker.clients.recorded import RecordedClient
from rlm_broker.errors import ConfigurationError
from rlm_broker.handler.handler import LMHandler
from rlm_broker.handler.lane import Serving
from rlm_broker.handler.routing import ModelPolicy, Route
from rlm_broker.home import Home
from rlm_broker.limits import Limits
from rlm_broker.recording import Recording

FROM_ENVIRONMENT = "env:"
"""Before the name of the variable that holds a secret."""
HIDDEN = Field(repr=False, exclude=True)
USD = Annotated[float, Field(ge=0)]


class Model(BaseModel):
    """One model: where it is, what it is sent, and how often. What is not said is left to the provider."""

    model_config = ConfigDict(
        frozen=True, extra="forbid", allow_inf_nan=False, use_attribute_docstrings=True, hide_input_in_errors=True
    )

    name: str = ""
    """As litellm has it, "openai/gpt-5-mini"; with a `base_url`, as that server has it. Empty: that of its entry."""
    base_url: str | None = None
    """Of a server that speaks OpenAI's chat completions, called directly and without litellm."""
    api_key: Annotated[str | None, HIDDEN] = None
    """"env:NAME" reads the variable NAME. Left out: the provider's own variable, or with a `base_url` none."""
    headers: Annotated[Mapping[str, str], HIDDEN] = {}
    """Further ones of each request; "env:NAME" as with `api_key`."""
    options: Mapping[str, Any] = {}
    """Sampling and other fields of the request: temperature, top_p, seed, reasoning_effort, ..."""
    usd_per_million_tokens: tuple[USD, USD] | None = None
    """Prices of input and output. Left out: litellm's, or with a `base_url` unknown."""
    max_concurrent: PositiveInt | None = None
    """Calls at the same time; more are queued, and sessions take turns. Left out: 256."""
    requests_per_minute: PositiveFloat | None = None
    """Of any minute; more are queued."""
    tokens_per_minute: PositiveFloat | None = None
    """Of any minute, estimated before a call and corrected after it; more are queued."""
    max_retries: NonNegativeInt = 4
    """Further attempts after a failure that may pass: status 408, 409, 429, 5xx, a broken connection."""
    attempt_timeout_s: PositiveFloat | None = None
    """Of one attempt. Left out: all the time that the call has."""
    fallbacks: tuple[str, ...] = ()
    """Models that are asked in its place when it fails, in this order; not for what the request itself did wrong."""
    cooldown_s: PositiveFloat = 30.0
    """After three calls in a row that failed, how long its fallbacks are asked first."""

    @model_validator(mode="after")
    def _check_offline(self) -> Self:
        if self.name == "offline" and (self.base_url or self.api_key or self.headers or self.options):
            raise ValueError("the model offline takes no options, and nothing is sent anywhere")
        return self

    def client(self) -> Client:
        """A client of it. Nothing is sent.

        Raises:
            ConfigurationError: A variable that it names is not set, or nothing could be called that way.
        """
        headers = {name: _secret(value, f"header {name}", self.name) for name, value in self.headers.items()}
        api_key = None if self.api_key is None else _secret(self.api_key, "api_key", self.name)
        if self.base_url is not None:
            from rlm_broker.clients.openai_compatible import OpenAICompatibleClient  # 0.15 s that others need not pay

            return OpenAICompatibleClient(
                self.base_url,
                self.name,
                api_key=api_key,
                headers=headers,
                options=self.options,
                usd_per_million_tokens=self.usd_per_million_tokens,
            )
        options = dict(self.options)
        options |= {} if api_key is None else {"api_key": api_key}
        options |= {"extra_headers": headers} if headers else {}
        return client_for(self.name, usd_per_million_tokens=self.usd_per_million_tokens, **options)


Given = str | Client | FieldLike | Callable[..., Any] | Model
"""How a model may be given: its name, its description, a client, somebody else's client, or a function of `(messages)`
or of `(messages, model)`."""


class Models:
    """The models of one `RLM`: who they are, and the handler that calls them.

    Args:
        replay: Its calls are answered from there, and none of the others is made.

    Raises:
        ConfigurationError: A model, key or route that cannot be used.
    """

    def __init__(
        self,
        model: Given | None,
        sub_model: Given | None,
        models: Mapping[str, Given],
        routes: Sequence[Route],
        replay: Recording | None = None,
    ) -> None:
        self._routes = tuple(routes)
        self._made: list[Client] = []
        self._descriptions: dict[int, Model] = {}
        if replay is not None:
            told = replay.models
            self.root: Client = RecordedClient(replay, told.root)
            self.sub = None if told.sub is None else cast("Client", RecordedClient(replay, told.sub))
            self.named: dict[str, Client] = {name: RecordedClient(replay, name) for name in told.others}
            return
        self.named = {name: self._client(given, name) for name, given in models.items()}
        self.root = self._known("offline" if model is None else model)
        self.sub = None if sub_model is None else self._known(sub_model)
        self._fallbacks = {
            id: tuple(map(self._known, described.fallbacks)) for id, described in list(self._descriptions.items())
        }

    def handler(
        self, policy: ModelPolicy, limits: Limits, cache: Cache | None = None, home: Home | None = None
    ) -> LMHandler:
        """What calls them.

        Raises:
            ConfigurationError: A route that leads nowhere, or is never taken.
        """
        handler = LMHandler(
            self.root,
            other_backend_client=self.sub,
            model_policy=policy,
            open_client=client_for,
            call_timeout_s=limits.call_timeout_s,
            cache=cache,
            home=home,
        )
        for name, client in self.named.items():
            handler.register_client(name, client)
        for route in self._routes:
            handler.routing.add(route)
        for client in handler.routing.clients:
            if (described := self._descriptions.get(id(client))) is not None:
                handler.serve(client, _serving(described, self._fallbacks[id(client)]))
        return handler

    async def preflight(self, limits: Limits) -> None:
        """See whether they can be called, as far as that can be seen, before anything else is started.

        Raises:
            ModelFailed, UnknownModel: What every call would raise.
            ConfigurationError: There is a budget in dollars, and nobody knows what a model costs.
        """
        clients = {id(client): client for client in (self.root, self.sub, *self.named.values()) if client is not None}
        checks = [client.preflight() for client in clients.values() if hasattr(client, "preflight")]
        await asyncio.gather(*checks)
        if limits.max_budget_usd is None:
            return
        for client in clients.values():
            if isinstance(client, LiteLLMClient):
                await client.loaded()
            if getattr(client, "is_priced", None) is False:
                raise ConfigurationError(
                    f"max_budget_usd cannot be kept: the price of model {client.model_name!r} is not known; give its "
                    "usd_per_million_tokens, or bound max_tokens or max_llm_calls instead"
                )

    async def aclose(self) -> None:
        """Close the clients that were made here; those that were brought stay their makers'."""
        for client in self._made:
            await client.aclose()

    def _known(self, given: Given) -> Client:
        """A model that may be one of the named ones."""
        return self.named[given] if isinstance(given, str) and given in self.named else self._client(given)

    def _client(self, given: Given, name: str = "") -> Client:
        if isinstance(given, str):
            if not given:
                raise ConfigurationError("the model's name is empty: name one, or leave it out")
            given = Model(name=given)
        client = self._described(given, name) if isinstance(given, Model) else _brought(given)
        if isinstance(client, LiteLLMClient):
            prefetch()  # seconds that pass while the context is read and the sandbox starts
        return client

    def _described(self, model: Model, name: str) -> Client:
        model = model if model.name else model.model_copy(update={"name": name})
        client = model.client()
        self._made.append(client)
        self._descriptions[id(client)] = model
        return client


def _brought(given: Client | FieldLike | Callable[..., Any]) -> Client:
    if hasattr(given, "complete") and hasattr(given, "model_name"):
        return cast("Client", given)
    if is_field_client(given):
        return FieldClient(given)
    if callable(given):
        return FunctionClient(given)
    raise ConfigurationError(f"a model is a name, a Model, a client or a function, and not {type(given).__name__}")


def _serving(model: Model, fallbacks: tuple[Client, ...]) -> Serving:
    return Serving(
        max_concurrent=model.max_concurrent,
        requests_per_minute=model.requests_per_minute,
        tokens_per_minute=model.tokens_per_minute,
        max_retries=model.max_retries,
        attempt_timeout_s=model.attempt_timeout_s,
        fallbacks=fallbacks,
        cooldown_s=model.cooldown_s,
    )


def _secret(text: str, what: str, model: str) -> str:
    if not text.startswith(FROM_ENVIRONMENT):
        return text
    variable = text.removeprefix(FROM_ENVIRONMENT)
    value = os.environ.get(variable)
    if not value:
        raise ConfigurationError(f"model {model!r} needs {variable} for its {what}, which is not set: export it")
    return value
