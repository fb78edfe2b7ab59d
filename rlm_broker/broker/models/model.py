"""The description of one model by its user: its address, the options of its requests, and their rates."""

import os
from collections.abc import Callable, Mapping
from typing import Annotated, Any, Never, Self

from msgspec import Meta

from rlm_broker.broker.clients.adapters import FieldLike, client_for
from rlm_broker.broker.clients.base import BaseClient, Client
from rlm_broker.errors import ConfigurationError
from rlm_broker.events.redaction import is_secret_name
from rlm_broker.values.fields import FINITE, Fields, NonNegativeInt, PositiveFloat, PositiveInt, Text
from rlm_broker.values.validation import suggestion

SAMPLING = frozenset(
    {"temperature", "top_p", "top_k", "min_p", "seed", "stop", "max_tokens", "max_completion_tokens"}
    | {"frequency_penalty", "presence_penalty", "repetition_penalty", "reasoning_effort", "verbosity", "n"}
)
"""Names in `Model.options` that change only what a model says, not where requests go or with which key."""
FROM_ENVIRONMENT = "env:"
"""Prefix of the name of an environment variable holding a secret, for example "env:OPENAI_API_KEY"."""
Price = Annotated[float, Meta(ge=0, le=FINITE)]
Prices = Annotated[tuple[Price, Price], Meta(description="two finite numbers of at least 0")]


class Model(Fields):
    """Description of one model. Fields left out are decided by the provider.

    Example:
        ```python
        Model(name="openai/gpt-5-mini", options={"reasoning_effort": "low"}, requests_per_minute=500)
        Model(name="qwen3", base_url="http://localhost:8000/v1", context_tokens=32_768)
        ```

    Raises:
        ConfigurationError: A field does not exist, or a value is not allowed for its field.
    """

    _hidden = frozenset({"api_key", "headers"})

    name: Text = ""
    """Name such as "openai/gpt-5-mini" or "ollama/qwen3"; with a `base_url`, as that server knows it.

    If it is empty, it is the name of the entry, in a settings file or in `Models.named`.
    """
    base_url: Text | None = None
    """Address of a server with OpenAI's chat completions API, which is called directly and without litellm."""
    api_key: Text | None = None
    """API key; "env:NAME" reads the variable NAME. Left out: the provider's variable, or no key with a `base_url`."""
    headers: Annotated[Mapping[str, str], Meta(description="texts by name")] = {}
    """Further headers of each request, by name; a value "env:NAME" reads the variable NAME."""
    options: Annotated[Mapping[str, Any], Meta(description="values by name")] = {}
    """Sampling options and other fields of the request: temperature, top_p, seed, reasoning_effort, ..."""
    usd_per_million_tokens: Prices | None = None
    """Prices of a million input and output tokens in US dollars. Left out: litellm's, or unknown with a `base_url`."""
    context_tokens: PositiveInt | None = None
    """Size of the context window in tokens. Left out: litellm's or the server's number, else 128,000 is assumed."""
    max_concurrent: PositiveInt | None = None
    """Maximum concurrent calls; further calls wait, and sessions take turns. Left out: 256."""
    requests_per_minute: PositiveFloat | None = None
    """Maximum requests started in any 60 seconds; further calls wait."""
    tokens_per_minute: PositiveFloat | None = None
    """Maximum tokens in any 60 seconds; further calls wait. A call's tokens are estimated, then corrected after it."""
    max_retries: NonNegativeInt = 4
    """Maximum further attempts after a failure that may pass: status 408, 409, 425, 429, 5xx, a broken connection."""
    attempt_timeout_s: PositiveFloat | None = None
    """Seconds of one attempt; then it fails and may be retried. Left out: all the time that the call has left."""
    fallbacks: Annotated[tuple[str, ...], Meta(description="a list of texts")] = ()
    """Names of models called in its place if it fails, in order; not if the request itself is at fault."""
    cooldown_s: PositiveFloat = 30.0
    """Seconds during which its fallbacks are called first, after three failed calls in a row."""

    @classmethod
    def from_dict(cls, given: Mapping[str, Any], where: str = "Model") -> Self:
        """Return the description in a dict, such as a table of a settings file.

        Args:
            given: Values by the names of fields.
            where: Words on where the description stands. A sentence on a wrong value begins with them.

        Raises:
            ConfigurationError: A field does not exist, or a value is not allowed for its field.
        """
        return super().from_dict(given, where)

    def _fill(self, given: Any, source: Any) -> None:
        where = source or "Model"
        if not isinstance(given, Mapping):
            raise ConfigurationError(f"{where}: give values by the names of fields")
        for name in given:
            if name in SAMPLING:
                raise ConfigurationError(f"{where}: there is no {name!r}: give sampling arguments in `options`")
            if name not in self.fields:
                raise ConfigurationError(f"{where}: there is no {name!r}{suggestion(str(name), self.fields)}")
        super()._fill(given, where)
        self.__dict__.update(headers={**self.headers}, options={**self.options})  # the default is of all models
        if self.name == "offline" and (
            self.base_url or self.api_key or self.headers or self.options or self.context_tokens
        ):
            raise ConfigurationError(f"{where}: the model offline calls no server: give it no other fields")
        for option in self.options:
            if is_secret_name(option):
                raise ConfigurationError(
                    f"{where}: options.{option} would be shown: give keys as api_key, and headers as headers"
                )

    def _refuse(self, mistakes: Mapping[str, str], source: Any) -> Never:
        """Raise an error that names no value: it may be a key."""
        raise ConfigurationError(f"{source}: {'; '.join(f'{name}: {advice}' for name, advice in mistakes.items())}")

    def client(self) -> BaseClient:
        """Return a new client of the model. No request is sent.

        Example:
            ```python
            client = Model(name="qwen3", base_url="http://localhost:8000/v1").client()
            print((await client.complete(request)).text)
            ```

        Raises:
            ConfigurationError: A named variable is not set, or the model could not be called.
            UnknownModel: The name is not a model's.
        """
        headers = {name: _secret(value, f"header {name}", self.name) for name, value in self.headers.items()}
        api_key = None if self.api_key is None else _secret(self.api_key, "api_key", self.name)
        if self.base_url is not None:
            from rlm_broker.broker.clients.openai_compatible import OpenAICompatibleClient  # its import takes 0.15 s

            return OpenAICompatibleClient(
                self.base_url,
                self.name,
                api_key=api_key,
                headers=headers,
                options=self.options,
                usd_per_million_tokens=self.usd_per_million_tokens,
                context_tokens=self.context_tokens,
            )
        options = dict(self.options)
        options |= {} if api_key is None else {"api_key": api_key}
        options |= {"extra_headers": headers} if headers else {}
        window = {} if self.context_tokens is None else {"context_tokens": self.context_tokens}
        return client_for(self.name, usd_per_million_tokens=self.usd_per_million_tokens, **window, **options)


Given = str | Client | FieldLike | Callable[..., Any] | Model
"""Any form in which a model may be given.

It is a name, a description, a client, a client of another runtime, or a function of `(messages)` or `(messages,
model)`.
"""


def _secret(text: str, what: str, model: str) -> str:
    if not text.startswith(FROM_ENVIRONMENT):
        return text
    variable = text.removeprefix(FROM_ENVIRONMENT)
    if not variable:
        raise ConfigurationError(f"model {model!r}: write the name of a variable after {FROM_ENVIRONMENT}")
    value = os.environ.get(variable)
    if not value:
        raise ConfigurationError(f"model {model!r} needs {variable} for its {what}, which is not set: export it")
    return value
