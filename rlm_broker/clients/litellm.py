"""Models by name, at any provider that litellm knows. The only module that imports litellm."""

import asyncio
import functools
import os
import re
import threading
from concurrent.futures import Future
from typing import Any

from rlm_broker.clients.base import LMReply, LMRequest
from rlm_broker.errors import ConfigurationError, ModelFailed, UnknownModel
from rlm_broker.types import Usage

_KEYS: dict[str, tuple[str, ...]] = {
    "anthropic": ("ANTHROPIC_API_KEY", "ANTHROPIC_AUTH_TOKEN"),
    "deepseek": ("DEEPSEEK_API_KEY",),
    "gemini": ("GEMINI_API_KEY", "GOOGLE_API_KEY"),
    "groq": ("GROQ_API_KEY",),
    "mistral": ("MISTRAL_API_KEY",),
    "openai": ("OPENAI_API_KEY",),
    "openrouter": ("OPENROUTER_API_KEY", "OR_API_KEY"),
    "together_ai": ("TOGETHERAI_API_KEY", "TOGETHER_API_KEY", "TOGETHER_AI_API_KEY"),
    "xai": ("XAI_API_KEY",),
}
"""Provider: the variables of which one must be set. These are checked without litellm's import."""

_KEYLESS = frozenset(
    {"ollama", "ollama_chat", "hosted_vllm", "lm_studio", "llamafile"}  # a server of one's own
    | {"bedrock", "sagemaker", "vertex_ai"}  # credentials may come from files or the machine: only a call can tell
)

_BARE_NAMES: tuple[tuple[re.Pattern[str], str], ...] = (
    (re.compile(r"gpt-(?!oss)|chatgpt-|o\d+(-|$)"), "openai"),  # gpt-oss has open weights and many hosts
    (re.compile(r"claude-"), "anthropic"),
    (re.compile(r"gemini-"), "gemini"),
    (re.compile(r"(mistral|magistral|ministral|codestral)-"), "mistral"),
    (re.compile(r"deepseek-"), "deepseek"),
    (re.compile(r"grok-"), "xai"),
)

_SECRET_NAME = re.compile(r"_(KEY|TOKEN|SECRET)\Z", re.IGNORECASE)
_MIN_SECRET_CHARS = 6
"""A shorter value is no secret, and hiding every "1" would garble the message."""

_MAX_ERROR_CHARS = 500


def full_name(model_name: str) -> str | None:
    """`provider/model` for a name with a provider or a well-known bare one (`gpt-5-mini`, `claude-sonnet-4-5`).

    None for any other name. Whether the provider exists is not looked at.
    """
    provider, slash, model = model_name.partition("/")
    if slash:
        return model_name if provider and model else None
    for pattern, known_provider in _BARE_NAMES:
        if pattern.match(model_name):
            return f"{known_provider}/{model_name}"
    return None


@functools.cache
def prefetch() -> "Future[Any]":
    """Begin litellm's import (2 to 4 seconds) on a background thread; the future holds the module.

    The thread is a daemon, so that a program that ends meanwhile does not wait for an import that nobody needs.
    """
    future: Future[Any] = Future()

    def load() -> None:
        future.set_running_or_notify_cancel()
        try:
            future.set_result(_import_litellm())
        except BaseException as error:  # noqa: BLE001 - it belongs to whoever waits for the module
            future.set_exception(error)

    threading.Thread(target=load, name="import-litellm", daemon=True).start()
    return future


class LiteLLMClient:
    """A model at a provider, called through litellm.

    One call is one request: retries are the handler's business, which counts and pays them.

    Args:
        model_name: `provider/model`, or a well-known bare name.
        options: Passed to litellm as they are (`temperature`, `api_base`, `api_key`, ...).

    Raises:
        ConfigurationError: `stream=True`: a client returns whole replies.
    """

    def __init__(self, model_name: str, **options: Any) -> None:
        if options.get("stream"):
            raise ConfigurationError(f"{model_name}: stream=True is not possible here: a client returns whole replies")
        self.model_name = model_name
        self._options = options
        self._litellm_name = full_name(model_name) or model_name

    @property
    def context_tokens(self) -> int | None:
        """How much the model can read, once litellm is there to know it."""
        if not prefetch().done():
            return None
        try:
            found = prefetch().result().get_model_info(self._litellm_name).get("max_input_tokens")
        except Exception:  # noqa: BLE001 - litellm raises a plain Exception for what it does not know
            return None
        return found if isinstance(found, int) and found > 0 else None

    def check(self) -> None:
        """See whether a call could be made at all, before anything is started. Nothing is sent.

        For a provider that is not well known it imports litellm, which takes seconds.

        Raises:
            ConfigurationError: The provider's key is in no environment variable; it names them.
            UnknownModel: No provider has that name.
        """
        provider = self._litellm_name.partition("/")[0]
        if self._options.get("api_key") or provider in _KEYLESS:
            return
        if provider not in _KEYS:
            missing = " and ".join(self._missing_by_litellm(prefetch().result()))
        else:
            is_set = any(os.environ.get(variable) for variable in _KEYS[provider])
            missing = "" if is_set else " or ".join(_KEYS[provider])
        if missing:
            raise ConfigurationError(
                f"model {self.model_name!r} needs {missing}, which is not set: export it, "
                "or use the model 'offline', which needs no key"
            )

    async def complete(self, request: LMRequest) -> LMReply:
        """Ask the provider once. Cancelling closes the connection.

        The cost is None where litellm does not know the model's price.

        Raises:
            ModelFailed: With the provider's own words in one line; no secret of the environment is in it.
        """
        messages = [{"role": message.role, "content": message.content} for message in request.messages]
        options = {"drop_params": True, "max_retries": 0, **self._options}
        if request.max_completion_tokens is not None:
            options["max_tokens"] = request.max_completion_tokens
        try:
            litellm = await asyncio.wrap_future(prefetch())
            response = await litellm.acompletion(model=self._litellm_name, messages=messages, **options)
        except Exception as error:  # noqa: BLE001 - six of litellm's own errors have no base class that it exports
            # Without its cause: that one's text, and the request it holds, have the key in them.
            raise ModelFailed(f"{self.model_name}: {self._one_line(error)}") from None
        if not response.choices:
            raise ModelFailed(f"{self.model_name}: the provider's answer has no choices")
        return LMReply(response.choices[0].message.content or "", self._usage(litellm, response))

    async def aclose(self) -> None:
        """Nothing is held here: litellm keeps connections per event loop and closes them when idle or at exit."""

    def _missing_by_litellm(self, litellm: Any) -> list[str]:
        try:
            litellm.get_llm_provider(self._litellm_name, api_base=self._options.get("api_base"))
        except litellm.exceptions.BadRequestError:
            raise UnknownModel(
                f"no provider is known for model {self.model_name!r}; "
                "valid names look like 'openai/gpt-5-mini', 'anthropic/claude-sonnet-4-5' or 'offline'"
            ) from None
        found = litellm.validate_environment(self._litellm_name, api_base=self._options.get("api_base"))
        return [] if found["keys_in_environment"] else list(found["missing_keys"])

    def _usage(self, litellm: Any, response: Any) -> Usage:
        counted = getattr(response, "usage", None)
        input_tokens = getattr(counted, "prompt_tokens", None) or 0
        output_tokens = getattr(counted, "completion_tokens", None) or 0
        cost = response._hidden_params.get("response_cost")
        # litellm computes 0 from tokens that the provider did not count, and from a price that is missing.
        if cost == 0 and not (input_tokens + output_tokens > 0 and _is_free(litellm, self._litellm_name)):
            cost = None
        return Usage(1, input_tokens, output_tokens, cost)

    def _one_line(self, error: Exception) -> str:
        kind = type(error).__name__
        text = str(error).partition("Traceback (most recent call last)")[0]
        text = re.sub(rf"\A(\s*(litellm\.)?{re.escape(kind)}:)+", "", text)
        text = " ".join(_redacted(text, self._options).split())
        return f"{kind}: {text if len(text) <= _MAX_ERROR_CHARS else text[:_MAX_ERROR_CHARS] + '...'}"


def _import_litellm() -> Any:
    # Read by litellm during its import. Without the first two it fetches a price list and a table of headers, without
    # the third it asks a model hub for tokenizers. As defaults, so that a user can have it otherwise.
    os.environ.setdefault("LITELLM_LOCAL_MODEL_COST_MAP", "True")
    os.environ.setdefault("LITELLM_LOCAL_ANTHROPIC_BETA_HEADERS", "True")
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    os.environ.setdefault("LITELLM_LOG", "ERROR")
    import litellm

    litellm.suppress_debug_info = True  # else it prints advertisements to stdout
    litellm.telemetry = False
    litellm.drop_params = True
    return litellm


def _is_free(litellm: Any, name: str) -> bool:
    price = litellm.model_cost.get(name) or litellm.model_cost.get(name.partition("/")[2]) or {}
    return price.get("input_cost_per_token") == 0 and price.get("output_cost_per_token") == 0


def _redacted(text: str, options: dict[str, Any]) -> str:
    named = [*os.environ.items(), *options.items()]
    secrets = {value for name, value in named if _SECRET_NAME.search(name) and isinstance(value, str)}
    for secret in sorted(secrets, key=len, reverse=True):  # one may be part of another
        if len(secret) >= _MIN_SECRET_CHARS:
            text = text.replace(secret, "[redacted]")
    return text
