"""Models by name, at any provider that litellm supports. This is the only module that imports litellm."""

import asyncio
import functools
import importlib.util
import json
import os
import re
import socket
import sys
import threading
import warnings
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from typing import Any

from rlm_broker.broker.clients import failures
from rlm_broker.broker.clients.base import (
    IMPORTING,
    BaseClient,
    LMReply,
    LMRequest,
    call_headers,
    with_finish_reason,
)
from rlm_broker.broker.clients.providers import PROVIDERS, full_name
from rlm_broker.errors import ConfigurationError, ModelFailed, UnknownModel, require_kind
from rlm_broker.events.redaction import is_secret_name, secrets_in
from rlm_broker.usage import Usage

_KEYS: dict[str, tuple[str, ...]] = {
    "anthropic": ("ANTHROPIC_API_KEY", "ANTHROPIC_AUTH_TOKEN"),
    **{each.listed_as or name: each.keys for name, each in PROVIDERS.items() if each.keys},
}
"""Well-known provider → the variables of which one must be set. They are checked without importing litellm."""

_KEYLESS = frozenset(
    {"ollama", "ollama_chat"}  # a local server with a default address
    | {"bedrock", "sagemaker", "vertex_ai"}  # credentials may come from files or the machine, so only a call shows
)
_SERVERS = {"hosted_vllm": "HOSTED_VLLM_API_BASE", "lm_studio": "LM_STUDIO_API_BASE", "llamafile": "LLAMAFILE_API_BASE"}
"""Provider on the user's own server → the variable with its address. Without that litellm calls OpenAI instead."""

_READ_BY_IMPORT = {
    "LITELLM_LOCAL_MODEL_COST_MAP": "True",  # else the import fetches a price list
    "LITELLM_LOCAL_ANTHROPIC_BETA_HEADERS": "True",  # else a call fetches a table of headers
    "LITELLM_LOG": "ERROR",
    "LITELLM_MODE": "PRODUCTION",  # else the import reads the file .env of the current folder
}
"""Variables for litellm's import. They are set only meanwhile, and the user's own are kept."""
_FILTERED = ("Accessing the.*attribute on the instance", "conflict with protected namespace")
"""Parts of warnings silenced by litellm's import for the whole process; these filters are removed again. A third,
"`ReadOnly` qualifier", stays: calls of litellm raise it."""
LIKENESS = 0.8
"""Minimum ratio of `difflib` at which an unknown provider's name is taken for a misspelt known one."""
MAX_CONCURRENT = 256
"""Default maximum of concurrent requests of one client; further calls wait."""


@functools.cache
def prefetch() -> "Future[Any]":
    """Start litellm's import, of 2 to 4 seconds, on a daemon thread; return a future of the module."""
    future: Future[Any] = Future()
    future.set_running_or_notify_cancel()  # from now on a cancelled call cancels its wait alone
    IMPORTING.add("litellm")

    def load() -> None:
        try:
            future.set_result(_import_litellm())
        except BaseException as error:  # noqa: BLE001 - raised by those who wait for the future
            future.set_exception(error)
        finally:
            IMPORTING.discard("litellm")

    threading.Thread(target=load, name="import-litellm", daemon=True).start()
    return future


class LiteLLMClient(BaseClient):
    """A model at a provider, called through litellm. One call is one request: the handler makes retries.

    Example:
        ```python
        RLM(LiteLLMClient("anthropic/claude-sonnet-4-5", temperature=0.2, max_concurrent=8))
        ```

    Args:
        model_name: `provider/model`, or a well-known bare name.
        max_concurrent: Maximum concurrent calls; further ones wait.
        usd_per_million_tokens: Prices of input and output in US dollars; None takes litellm's prices.
        context_tokens: Size of the model's context window in tokens; None takes litellm's number.
        options: Further arguments for litellm, for example `temperature`, `api_base`, `api_key`, `extra_headers`,
            `timeout`.

    Raises:
        ConfigurationError: litellm is not installed, an argument is of the wrong type, or `stream` is among the
            options.
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
                f"{model_name}: leave out the option stream: replies of followed runs are streamed"
            )
        _require_installed(model_name)
        if usd_per_million_tokens is not None:
            require_kind("usd_per_million_tokens", usd_per_million_tokens, tuple, list)
            if len(usd_per_million_tokens) != 2:
                raise ConfigurationError("usd_per_million_tokens must be two prices: of input and of output")
            names = ("input_cost_per_token", "output_cost_per_token")
            options |= {name: usd / 1e6 for name, usd in zip(names, usd_per_million_tokens, strict=True)}
        self.model_name = model_name
        self.max_concurrent = max_concurrent
        self._options = options
        self._context_tokens = context_tokens
        self._litellm_name = full_name(model_name) or model_name

    @staticmethod
    def is_hosted(model_name: str) -> bool:
        """Whether a name can lead only to a well-known provider, and to no other address.

        Example:
            ```python
            print(LiteLLMClient.is_hosted("gpt-5-mini"))  # True
            ```
        """
        provider, _, model = (full_name(model_name) or "").partition("/")
        return provider in _KEYS and "://" not in model

    @staticmethod
    def is_installed() -> bool:
        """Whether the package litellm is installed; it is not imported.

        Example:
            ```python
            print(LiteLLMClient.is_installed())
            ```
        """
        try:
            return "litellm" in sys.modules or importlib.util.find_spec("litellm") is not None
        except ImportError:
            return False

    @staticmethod
    def providers_with_keys() -> dict[str, str]:
        """Return the well-known providers whose key is set: provider -> the variable that has it.

        Example:
            ```python
            print(LiteLLMClient.providers_with_keys())
            ```
        """
        found = {name: next(filter(os.environ.get, variables), None) for name, variables in _KEYS.items()}
        return {name: variable for name, variable in found.items() if variable is not None}

    @property
    def context_tokens(self) -> int | None:  # type: ignore[override]
        """Size of the model's context window in tokens; None until litellm is imported, or if it does not know."""
        if self._context_tokens is not None or not prefetch().done():
            return self._context_tokens
        try:
            found = prefetch().result().get_model_info(self._litellm_name).get("max_input_tokens")
        except Exception:  # noqa: BLE001 - litellm raises a plain Exception for unknown models
            return None
        return found if isinstance(found, int) and found > 0 else None

    counts_tokens = True

    def count_tokens(self, text: str) -> int | None:
        """Count with litellm's tokenizer for the model; None while litellm is being imported, or if it has none."""
        if not prefetch().done():
            return None
        try:
            return int(prefetch().result().token_counter(model=self._litellm_name, text=text))
        except Exception:  # noqa: BLE001 - some tokenizers would have to be downloaded
            return None

    @property
    def fingerprint(self) -> str:  # type: ignore[override]
        """Text on which replies depend besides the request: the model and all options but secrets."""
        public = {name: value for name, value in self._options.items() if not is_secret_name(name)}
        return json.dumps([self._litellm_name, public], sort_keys=True, default=str)

    @property
    def is_priced(self) -> bool | None:  # type: ignore[override]
        """Whether the cost of its calls will be known; None until litellm is imported."""
        if "input_cost_per_token" in self._options:
            return True
        if not prefetch().done():
            return None
        try:
            info = prefetch().result().get_model_info(self._litellm_name)
        except Exception:  # noqa: BLE001 - litellm raises a plain Exception for unknown models
            return False
        return info.get("input_cost_per_token") is not None

    def start_loading(self) -> None:
        """Start litellm's import in the background. It takes 2 to 4 seconds."""
        prefetch()

    async def loaded(self) -> None:
        """Wait for litellm's import; from then on `is_priced` and `context_tokens` are final.

        Example:
            ```python
            client = LiteLLMClient("openai/gpt-5-mini")
            await client.loaded()
            print(client.is_priced)  # True
            ```

        Raises:
            ModelFailed: litellm cannot be imported.
        """
        try:
            await asyncio.wrap_future(prefetch())
        except Exception as error:  # noqa: BLE001 - an import may fail in any way
            raise self._failed(error) from None

    def check(self) -> None:
        """Check whether a call could be made at all. No request is sent. For a provider that is not well known it
        imports litellm, which takes seconds.

        Raises:
            ConfigurationError: The provider's key is not set; the message names its variables.
            UnknownModel: The provider does not exist.
        """
        provider = self._litellm_name.partition("/")[0]
        if (variable := _SERVERS.get(provider)) and not (self._options.get("api_base") or os.environ.get(variable)):
            raise ConfigurationError(
                f"model {self.model_name!r} is on a server of your own: set {variable} to its address, or "
                "give its base_url and the name that the model has there"
            )
        if variable or self._options.get("api_key") or provider in _KEYLESS:
            return
        if provider not in _KEYS:
            refuse_misspelt(self.model_name, provider)
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
        """Send one request. Cancelling closes the connection. The cost is None if the price is not known.

        Raises:
            ModelFailed: The call failed; the message has the provider's own words in one line, without secrets.
        """
        try:
            litellm = await asyncio.wrap_future(prefetch())
            response = await self._asked(litellm, request)
        except Exception as error:  # noqa: BLE001 - six of litellm's errors share no exported base class
            # `from None`: the text of the cause, and its request, contain the key.
            raise self._failed(error) from None
        if response is None or not response.choices:
            raise ModelFailed(f"{self.model_name}: the provider's answer has no choices")
        choice = response.choices[0]
        text = choice.message.content
        problem = failures.no_text(text, choice.finish_reason)
        given = getattr(choice, "logprobs", None)
        extra = {} if given is None else {"logprobs": given if isinstance(given, dict) else given.model_dump()}
        told = with_finish_reason(extra, choice.finish_reason)
        return LMReply(text or "", self._usage(litellm, response), problem, extra=told)

    async def aclose(self) -> None:
        """Release no resources: litellm closes its connections when idle or at exit."""

    async def _asked(self, litellm: Any, request: LMRequest) -> Any:
        """Call litellm. Apart from `complete`, because tracebacks of its errors would show the key among variables."""
        messages = [{"role": message.role, "content": message.content} for message in request.messages]
        call: dict[str, Any] = {"model": self._litellm_name, "messages": messages, "drop_params": True}
        call |= {"max_retries": 0, **self._options}
        if request.sample and isinstance(call.get("seed"), int):  # else all samples would be one
            call["seed"] += request.sample
        if headers := call_headers.get():
            call["extra_headers"] = {**headers, **(call.get("extra_headers") or {})}
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
        # litellm also gives 0 if the provider counted no tokens or the price is missing, so 0 needs a check.
        if cost == 0 and not (input_tokens + output_tokens > 0 and self._is_free(litellm)):
            cost = None
        cached = getattr(getattr(counted, "prompt_tokens_details", None), "cached_tokens", None) or 0
        return Usage(1, input_tokens, output_tokens, cost, 0, cached)

    def _is_free(self, litellm: Any) -> bool:
        """Whether the caller's price is 0, or litellm's own for the model if the caller gave none."""
        price: Mapping[str, Any] = self._options
        if "input_cost_per_token" not in price:
            price = next(filter(None, map(litellm.model_cost.get, _names_of_price(self._litellm_name))), {})
        return price.get("input_cost_per_token") == 0 and price.get("output_cost_per_token") == 0

    def _failed(self, error: Exception) -> ModelFailed:
        kind = type(error).__name__
        text = str(error).partition("Traceback (most recent call last)")[0]
        text = re.sub(rf"\A(\s*(litellm\.)?{re.escape(kind)}:)+", "", text)
        status = getattr(error, "status_code", None)
        cause = failures.cause_of(status) if isinstance(status, int) else "provider"
        headers = getattr(error, "litellm_response_headers", None) or {}  # its `response` is made up by litellm
        said = failures.one_line(text, secrets_in(self._options))
        after_s, is_lasting = failures.retry_after_s(headers), failures.is_lasting(status) or _is_unresolved(error)
        return ModelFailed(f"{self.model_name}: {kind}: {said}", cause, after_s, is_lasting=is_lasting)


def _is_unresolved(error: BaseException | None) -> bool:
    """Whether the cause of an error is the name of a host that does not resolve."""
    while error is not None and not isinstance(error, socket.gaierror):
        error = error.__cause__ or error.__context__
    return error is not None


def _require_installed(model_name: str) -> None:
    """Raise `ConfigurationError` if litellm is not installed."""
    if not LiteLLMClient.is_installed():
        refuse_misspelt(model_name, (full_name(model_name) or model_name).partition("/")[0])
        raise ConfigurationError(
            f"model {model_name!r} is called through litellm, which is not installed: pip install 'rlm-broker[litellm]'"
        )


def refuse_misspelt(model_name: str, provider: str) -> None:
    """Raise `UnknownModel` if a provider is most likely a misspelt well-known one, without importing litellm. None of
    its 166 further providers (1.100) has so similar a name."""
    known = {*_KEYS, *_KEYLESS, *_SERVERS, *PROVIDERS}
    if provider in known:
        return
    import difflib

    if close := difflib.get_close_matches(provider.lower(), known, 1, LIKENESS):
        meant = model_name.replace(provider, close[0], 1)
        raise UnknownModel(f"no provider is known for model {model_name!r}; did you mean {meant}?")


def _import_litellm() -> Any:
    """Import litellm with `_READ_BY_IMPORT` set, then restore the environment and the warning filters."""
    ours = {name: value for name, value in _READ_BY_IMPORT.items() if name not in os.environ}
    os.environ.update(ours)
    try:
        import litellm

        litellm.suppress_debug_info = True  # else errors print advertisements to stdout
        litellm.telemetry = False
        litellm.drop_params = True
        litellm.disable_hf_tokenizer_download = True  # else it downloads tokenizers from a model hub
        if not _beta_headers_are_read():
            ours.pop("LITELLM_LOCAL_ANTHROPIC_BETA_HEADERS", None)  # the first call reads it, so it stays set
    finally:
        for name, value in ours.items():
            if os.environ.get(name) == value:
                del os.environ[name]
        _forget_filters()
    return litellm


def _beta_headers_are_read() -> bool:
    """Have litellm read its bundled table of headers now; return whether it did. By itself it does so in a call."""
    try:
        from litellm import anthropic_beta_headers_manager as manager

        manager._load_beta_headers_config()
    except Exception:  # noqa: BLE001 - not a public function: another release may lack it
        return False
    return True


def _forget_filters() -> None:
    """Remove the filters of litellm's import, for warnings of the whole process."""
    for each in list(warnings.filters):
        pattern = getattr(each[1], "pattern", None) or each[1]
        if isinstance(pattern, str) and any(part in pattern for part in _FILTERED) and each[2] is Warning:
            warnings.filters.remove(each)  # type: ignore[attr-defined]  # it is a list at run time


async def _streamed(litellm: Any, call: dict[str, Any], on_text: Callable[[str], None]) -> Any:
    """Pass on the text of a response as it arrives, and return all of it."""
    chunks = []
    async for chunk in await litellm.acompletion(**call, stream=True, stream_options={"include_usage": True}):
        chunks.append(chunk)
        if chunk.choices and (text := chunk.choices[0].delta.content):
            on_text(text)
    return litellm.stream_chunk_builder(chunks, messages=call["messages"])


def _names_of_price(name: str) -> tuple[str, str]:
    return name, name.partition("/")[2]
