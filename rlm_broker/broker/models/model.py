"""The description of one model by its user: its address, the options of its requests, and their rates."""

import os
from collections.abc import Callable, Mapping
from typing import Annotated, Any, Self

from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    ModelWrapValidatorHandler,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    ValidationError,
    ValidationInfo,
    model_validator,
)

from rlm_broker.broker.clients.adapters import FieldLike, client_for
from rlm_broker.broker.clients.base import BaseClient, Client
from rlm_broker.errors import ConfigurationError
from rlm_broker.events.redaction import is_secret_name
from rlm_broker.values.validation import complaints, suggestion

SAMPLING = frozenset(
    {"temperature", "top_p", "top_k", "min_p", "seed", "stop", "max_tokens", "max_completion_tokens"}
    | {"frequency_penalty", "presence_penalty", "repetition_penalty", "reasoning_effort", "verbosity", "n"}
)
"""Names in `Model.options` that change only what a model says, not where requests go or with which key."""
FROM_ENVIRONMENT = "env:"
"""Prefix of the name of an environment variable holding a secret, for example "env:OPENAI_API_KEY"."""
HIDDEN = Field(repr=False, exclude=True)
"""Field that may hold a secret: neither `repr` nor `model_dump` shows it."""
USD = Annotated[float, Field(ge=0)]


class Model(BaseModel):
    """Description of one model. Fields left out are decided by the provider.

    Example:
        ```python
        Model(name="openai/gpt-5-mini", options={"reasoning_effort": "low"}, requests_per_minute=500)
        Model(name="qwen3", base_url="http://localhost:8000/v1", context_tokens=32_768)
        ```

    Raises:
        ConfigurationError: A field does not exist, or a value is not allowed for its field.
    """

    model_config = ConfigDict(
        frozen=True, extra="forbid", allow_inf_nan=False, use_attribute_docstrings=True, hide_input_in_errors=True
    )

    name: str = ""
    """Name such as "openai/gpt-5-mini" or "ollama/qwen3"; with a `base_url`, as that server knows it.

    If it is empty, it is the name of the entry, in a settings file or in `Models.named`.
    """
    base_url: str | None = None
    """Address of a server with OpenAI's chat completions API, which is called directly and without litellm."""
    api_key: Annotated[str | None, HIDDEN] = None
    """API key; "env:NAME" reads the variable NAME. Left out: the provider's variable, or no key with a `base_url`."""
    headers: Annotated[Mapping[str, str], HIDDEN] = {}
    """Further headers of each request, by name; a value "env:NAME" reads the variable NAME."""
    options: Mapping[str, Any] = {}
    """Sampling options and other fields of the request: temperature, top_p, seed, reasoning_effort, ..."""
    usd_per_million_tokens: tuple[USD, USD] | None = None
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
    fallbacks: tuple[str, ...] = ()
    """Names of models called in its place if it fails, in order; not if the request itself is at fault."""
    cooldown_s: PositiveFloat = 30.0
    """Seconds during which its fallbacks are called first, after three failed calls in a row."""

    @model_validator(mode="wrap")
    @classmethod
    def _refuse_in_words(cls, given: Any, validate: ModelWrapValidatorHandler[Self], info: ValidationInfo) -> Self:
        """Raise `ConfigurationError` in place of pydantic's error.

        The context of the validation is the words saying where the description stands, such as a file and a table.
        """
        where = info.context or "Model"
        for name in given if isinstance(given, dict) else ():
            if name in SAMPLING:
                raise ConfigurationError(f"{where}: there is no {name!r}: give sampling arguments in `options`")
            if name not in cls.model_fields:
                raise ConfigurationError(f"{where}: there is no {name!r}{suggestion(str(name), cls.model_fields)}")
        try:
            model = validate(given)
        except ValidationError as error:
            raise ConfigurationError(f"{where}: {complaints(error, 'it')}") from None
        if model.name == "offline" and (
            model.base_url or model.api_key or model.headers or model.options or model.context_tokens
        ):
            raise ConfigurationError(f"{where}: the model offline calls no server: give it no other fields")
        for option in model.options:
            if is_secret_name(option):
                raise ConfigurationError(
                    f"{where}: options.{option} would be shown: give keys as api_key, and headers as headers"
                )
        return model

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
