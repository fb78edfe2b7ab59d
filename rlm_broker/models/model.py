"""What a user says of one model: where it is, what it is sent, and how often."""

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

from rlm_broker.clients.base import BaseClient, Client
from rlm_broker.clients.field import FieldLike
from rlm_broker.clients.named import client_for
from rlm_broker.errors import ConfigurationError
from rlm_broker.redaction import is_secret_name
from rlm_broker.validation import complaints, suggestion

SAMPLING = frozenset(
    {"temperature", "top_p", "top_k", "min_p", "seed", "stop", "max_tokens", "max_completion_tokens"}
    | {"frequency_penalty", "presence_penalty", "repetition_penalty", "reasoning_effort", "verbosity", "n"}
)
"""Names of `Model.options` that change what a model says, and nothing else."""
FROM_ENVIRONMENT = "env:"
"""Before the name of the variable that holds a secret."""
HIDDEN = Field(repr=False, exclude=True)
USD = Annotated[float, Field(ge=0)]


class Model(BaseModel):
    """One model: where it is, what it is sent, and how often. What is not said is left to the provider.

    Raises:
        ConfigurationError: There is no such field, or it cannot have the value.
    """

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
    context_tokens: PositiveInt | None = None
    """How much it can read. Left out: what litellm or the server says; where they do not, 128,000 is assumed."""
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

    @model_validator(mode="wrap")
    @classmethod
    def _refuse_in_words(cls, given: Any, validate: ModelWrapValidatorHandler[Self], info: ValidationInfo) -> Self:
        """Raise this package's error. The context of the validation may say where the description stands."""
        where = info.context or "Model"
        for name in given if isinstance(given, dict) else ():
            if name in SAMPLING:
                raise ConfigurationError(f"{where}: there is no {name!r}: sampling arguments are given in `options`")
            if name not in cls.model_fields:
                raise ConfigurationError(f"{where}: there is no {name!r}{suggestion(str(name), cls.model_fields)}")
        try:
            model = validate(given)
        except ValidationError as error:
            raise ConfigurationError(f"{where}: {complaints(error, 'it')}") from None
        if model.name == "offline" and (
            model.base_url or model.api_key or model.headers or model.options or model.context_tokens
        ):
            raise ConfigurationError(f"{where}: the model offline takes no options, and nothing is sent anywhere")
        for option in model.options:
            if is_secret_name(option):
                raise ConfigurationError(
                    f"{where}: options.{option} would be shown: give keys as api_key, and headers as headers"
                )
        return model

    def client(self) -> BaseClient:
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
                context_tokens=self.context_tokens,
            )
        options = dict(self.options)
        options |= {} if api_key is None else {"api_key": api_key}
        options |= {"extra_headers": headers} if headers else {}
        window = {} if self.context_tokens is None else {"context_tokens": self.context_tokens}
        return client_for(self.name, usd_per_million_tokens=self.usd_per_million_tokens, **window, **options)


Given = str | Client | FieldLike | Callable[..., Any] | Model
"""How a model may be given: its name, its description, a client, a client of another runtime, or a function of
`(messages)` or of `(messages, model)`."""


def _secret(text: str, what: str, model: str) -> str:
    if not text.startswith(FROM_ENVIRONMENT):
        return text
    variable = text.removeprefix(FROM_ENVIRONMENT)
    if not variable:
        raise ConfigurationError(f"model {model!r}: after {FROM_ENVIRONMENT} the name of a variable is missing")
    value = os.environ.get(variable)
    if not value:
        raise ConfigurationError(f"model {model!r} needs {variable} for its {what}, which is not set: export it")
    return value
