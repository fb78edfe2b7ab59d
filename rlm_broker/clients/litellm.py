"""Models by name, at any provider that litellm knows. The only module that imports litellm."""

import asyncio
import difflib
import functools
import importlib.util
import json
import os
import re
import sys
import threading
import warnings
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

from rlm_broker.clients import failures
from rlm_broker.clients.base import BaseClient, LMReply, LMRequest
from rlm_broker.errors import ConfigurationError, ModelFailed, UnknownModel, require_kind
from rlm_broker.redaction import is_secret_name, secrets_in
from rlm_broker.results import Usage

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
    {"ollama", "ollama_chat"}  # a server of one's own, at the place where it usually is
    | {"bedrock", "sagemaker", "vertex_ai"}  # credentials may come from files or the machine: only a call can tell
)
_SERVERS = {"hosted_vllm": "HOSTED_VLLM_API_BASE", "lm_studio": "LM_STUDIO_API_BASE", "llamafile": "LLAMAFILE_API_BASE"}
"""Providers that are servers of one's own: without their address litellm would send the conversation to OpenAI."""

_BARE_NAMES: tuple[tuple[re.Pattern[str], str], ...] = (
    (re.compile(r"gpt-(?!oss)|chatgpt-|o\d+(-|$)"), "openai"),  # gpt-oss has open weights and many hosts
    (re.compile(r"claude-"), "anthropic"),
    (re.compile(r"gemini-"), "gemini"),
    (re.compile(r"(mistral|magistral|ministral|codestral)-"), "mistral"),
    (re.compile(r"deepseek-"), "deepseek"),
    (re.compile(r"grok-"), "xai"),
)

_READ_BY_IMPORT = {
    "LITELLM_LOCAL_MODEL_COST_MAP": "True",  # else it fetches a price list
    "LITELLM_LOCAL_ANTHROPIC_BETA_HEADERS": "True",  # else it fetches a table of headers
    "LITELLM_LOG": "ERROR",
    "LITELLM_MODE": "PRODUCTION",  # else it reads a file .env, of whatever folder this is
}
"""Variables that litellm reads when it is imported. Those that a user has set are left as they are."""
_FILTERED = ("Accessing the.*attribute on the instance", "conflict with protected namespace")
"""Parts of the messages that its import has Python ignore, wherever they come from. A third, "`ReadOnly` qualifier",
stays ignored: its calls cause it."""

LIKENESS = 0.8
"""Ratio of `difflib` from which on a provider's name is taken for a misspelt one."""

MAX_CONCURRENT = 256
"""Requests at the same time; further calls wait in turn."""


def is_hosted(model_name: str) -> bool:
    """Whether a name can only lead to a well-known provider, and to no address."""
    provider, _, model = (full_name(model_name) or "").partition("/")
    return provider in _KEYS and "://" not in model


def providers_with_keys() -> dict[str, str]:
    """Return the well-known providers whose key is set: provider -> the variable that has it. It imports nothing."""
    found = {name: next(filter(os.environ.get, variables), None) for name, variables in _KEYS.items()}
    return {name: variable for name, variable in found.items() if variable is not None}


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


class LiteLLMClient(BaseClient):
    """A model at a provider, called through litellm.

    One call is one request: retries are the handler's business.

    Args:
        model_name: `provider/model`, or a well-known bare name.
        max_concurrent: Calls at the same time.
        usd_per_million_tokens: Of input and of output; None takes litellm's prices.
        context_tokens: How much the model can read; None takes litellm's number.
        options: Passed to litellm as they are (`temperature`, `api_base`, `api_key`, `extra_headers`, `timeout`, ...).

    Raises:
        ConfigurationError: litellm is not installed, or `stream` is no option.
    """

    def __init__(
        self,
        model_name: str,
        *,
        max_concurrent: int = MAX_CONCURRENT,
        usd_per_million_tokens: tuple[float, float] | None = None,
        context_tokens: int | None = None,
        **options: Any,
    ) -> None:
        require_kind("the model's name", model_name, str)
        if "stream" in options:
            raise ConfigurationError(
                f"{model_name}: stream is no option: a reply is streamed to whoever follows the run"
            )
        _require_installed(model_name)
        if usd_per_million_tokens is not None:
            require_kind("usd_per_million_tokens", usd_per_million_tokens, tuple, list)
            if len(usd_per_million_tokens) != 2:
                raise ConfigurationError("usd_per_million_tokens are two prices: of input and of output")
            names = ("input_cost_per_token", "output_cost_per_token")
            options |= {name: usd / 1e6 for name, usd in zip(names, usd_per_million_tokens, strict=True)}
        self.model_name = model_name
        self.max_concurrent = max_concurrent
        self._options = options
        self._context_tokens = context_tokens
        self._litellm_name = full_name(model_name) or model_name

    @property
    def context_tokens(self) -> int | None:  # type: ignore[override]
        """How much the model can read, once litellm is there to know it."""
        if self._context_tokens is not None or not prefetch().done():
            return self._context_tokens
        try:
            found = prefetch().result().get_model_info(self._litellm_name).get("max_input_tokens")
        except Exception:  # noqa: BLE001 - litellm raises a plain Exception for what it does not know
            return None
        return found if isinstance(found, int) and found > 0 else None

    counts_tokens = True

    def count_tokens(self, text: str) -> int | None:
        """Count by the tokenizer that litellm has for the model; None while litellm is being imported."""
        if not prefetch().done():
            return None
        try:
            return int(prefetch().result().token_counter(model=self._litellm_name, text=text))
        except Exception:  # noqa: BLE001 - a tokenizer may have to be downloaded
            return None

    @property
    def fingerprint(self) -> str:  # type: ignore[override]
        """What its replies depend on, beside the request."""
        public = {name: value for name, value in self._options.items() if not is_secret_name(name)}
        return json.dumps([self._litellm_name, public], sort_keys=True, default=str)

    @property
    def is_priced(self) -> bool | None:  # type: ignore[override]
        """Whether litellm knows what its calls cost; None before it is there."""
        if "input_cost_per_token" in self._options:
            return True
        if not prefetch().done():
            return None
        try:
            info = prefetch().result().get_model_info(self._litellm_name)
        except Exception:  # noqa: BLE001 - litellm raises a plain Exception for what it does not know
            return False
        return info.get("input_cost_per_token") is not None

    def start_loading(self) -> None:
        """Begin litellm's import, which takes seconds."""
        prefetch()

    async def loaded(self) -> None:
        """Wait for litellm's import: from then on it is known what its model costs.

        Raises:
            ModelFailed: It cannot be imported.
        """
        try:
            await asyncio.wrap_future(prefetch())
        except Exception as error:  # noqa: BLE001 - an import may fail in any way
            raise self._failed(error) from None

    def check(self) -> None:
        """See whether a call could be made at all, before anything is started. Nothing is sent.

        For a provider that is not well known it imports litellm, which takes seconds.

        Raises:
            ConfigurationError: The provider's key is in no environment variable; it names them.
            UnknownModel: No provider has that name.
        """
        provider = self._litellm_name.partition("/")[0]
        if (variable := _SERVERS.get(provider)) and not (self._options.get("api_base") or os.environ.get(variable)):
            raise ConfigurationError(
                f"model {self.model_name!r} is on a server of your own, and nothing says where: set {variable}, or "
                "give its base_url and the name that the model has there"
            )
        if variable or self._options.get("api_key") or provider in _KEYLESS:
            return
        if provider not in _KEYS:
            _refuse_misspelt(self.model_name, provider)
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
        try:
            litellm = await asyncio.wrap_future(prefetch())
            response = await self._asked(litellm, request)
        except Exception as error:  # noqa: BLE001 - six of litellm's own errors have no base class that it exports
            # Without its cause: that one's text, and the request it holds, have the key in them.
            raise self._failed(error) from None
        if response is None or not response.choices:
            raise ModelFailed(f"{self.model_name}: the provider's answer has no choices")
        choice = response.choices[0]
        text = choice.message.content
        return LMReply(text or "", self._usage(litellm, response), failures.no_text(text, choice.finish_reason))

    async def aclose(self) -> None:
        """Nothing is held here: litellm keeps connections per event loop and closes them when idle or at exit."""

    async def _asked(self, litellm: Any, request: LMRequest) -> Any:
        """Not in `complete`, whose frame is in the traceback of its errors: here the key is among the variables."""
        messages = [{"role": message.role, "content": message.content} for message in request.messages]
        call = {"model": self._litellm_name, "messages": messages, "drop_params": True, "max_retries": 0}
        call |= self._options
        if request.max_completion_tokens is not None:
            limits = [request.max_completion_tokens, call.get("max_tokens")]
            call["max_tokens"] = min(limit for limit in limits if isinstance(limit, int))
        if request.temperature is not None:
            call["temperature"] = request.temperature
        if request.on_text is None:
            return await litellm.acompletion(**call)
        return await _streamed(litellm, call, request.on_text)

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

    def _failed(self, error: Exception) -> ModelFailed:
        kind = type(error).__name__
        text = str(error).partition("Traceback (most recent call last)")[0]
        text = re.sub(rf"\A(\s*(litellm\.)?{re.escape(kind)}:)+", "", text)
        status = getattr(error, "status_code", None)
        cause = failures.cause_of(status) if isinstance(status, int) else "provider"
        headers = getattr(error, "litellm_response_headers", None) or {}  # its `response` is made up, without any
        said = failures.one_line(text, secrets_in(self._options))
        return ModelFailed(f"{self.model_name}: {kind}: {said}", cause, failures.retry_after_s(headers))


def _require_installed(model_name: str) -> None:
    """Raises: ConfigurationError."""
    if "litellm" in sys.modules:
        return
    try:
        is_there = importlib.util.find_spec("litellm") is not None
    except ImportError:
        is_there = False
    if not is_there:
        raise ConfigurationError(
            f"model {model_name!r} is called through litellm, which is not installed: pip install 'rlm-broker[litellm]'"
        )


def _refuse_misspelt(model_name: str, provider: str) -> None:
    """Refuse a provider that is most likely a well-known one misspelt, without the seconds of litellm's import.

    Of the 166 further providers that litellm 1.100 knows, none is so like a well-known one.
    """
    known = [*_KEYS, *_KEYLESS, *_SERVERS]
    if close := difflib.get_close_matches(provider.lower(), known, 1, LIKENESS):
        meant = model_name.replace(provider, close[0], 1)
        raise UnknownModel(f"no provider is known for model {model_name!r}; did you mean {meant}?")


def _import_litellm() -> Any:
    """Import it with `_READ_BY_IMPORT` set, and leave environment and warnings as they were."""
    ours = {name: value for name, value in _READ_BY_IMPORT.items() if name not in os.environ}
    os.environ.update(ours)
    try:
        import litellm

        litellm.suppress_debug_info = True  # else it prints advertisements to stdout
        litellm.telemetry = False
        litellm.drop_params = True
        litellm.disable_hf_tokenizer_download = True  # else it asks a model hub for tokenizers
        if not _beta_headers_are_read():
            ours.pop("LITELLM_LOCAL_ANTHROPIC_BETA_HEADERS", None)  # then it has to stay
    finally:
        for name, value in ours.items():
            if os.environ.get(name) == value:
                del os.environ[name]
        _forget_filters()
    return litellm


def _beta_headers_are_read() -> bool:
    """Have it read the table of headers that it comes with. By itself it reads one at the first call that needs it."""
    try:
        from litellm import anthropic_beta_headers_manager as manager

        manager._load_beta_headers_config()
    except Exception:  # noqa: BLE001 - this is no promise of litellm's: another release may have it elsewhere
        return False
    return True


def _forget_filters() -> None:
    """Remove the filters that its import adds for all warnings of the process, the user's own included."""
    for each in list(warnings.filters):
        pattern = getattr(each[1], "pattern", None) or each[1]
        if isinstance(pattern, str) and any(part in pattern for part in _FILTERED) and each[2] is Warning:
            warnings.filters.remove(each)  # type: ignore[attr-defined]  # a list, as the interpreter itself has it


async def _streamed(litellm: Any, call: dict[str, Any], on_text: Callable[[str], None]) -> Any:
    """The whole response, whose text was told as it came."""
    chunks = []
    async for chunk in await litellm.acompletion(**call, stream=True, stream_options={"include_usage": True}):
        chunks.append(chunk)
        if chunk.choices and (text := chunk.choices[0].delta.content):
            on_text(text)
    return litellm.stream_chunk_builder(chunks, messages=call["messages"])


def _is_free(litellm: Any, name: str) -> bool:
    price: dict[str, Any] = next(filter(None, map(litellm.model_cost.get, _names_of_price(name))), {})
    return price.get("input_cost_per_token") == 0 and price.get("output_cost_per_token") == 0


def _names_of_price(name: str) -> tuple[str, str]:
    return name, name.partition("/")[2]
