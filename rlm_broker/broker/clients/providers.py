"""Providers that our own client calls by name: a table of addresses and variables of keys. All others need litellm."""

import asyncio
import os
import re
from collections.abc import Mapping
from typing import Any, Final, NamedTuple

import msgspec

LOOK_S = 0.3
"""Seconds in which a server on this machine has to answer that it is there."""
MOST_LISTED_BYTES = 1 << 20


class Served(msgspec.Struct):
    """One model of a server's own list, as `GET /models` answers. Other fields are ignored.

    Attributes:
        id: Its name at the server.
        max_model_len: Size of its context window in tokens, where the server says so; not checked.
    """

    id: str
    max_model_len: Any = None


class _Listed(msgspec.Struct):
    data: list[Served] = []


class Provider(NamedTuple):
    """One provider with OpenAI's chat completions.

    Attributes:
        base_url: Its address. The variables `NAME_BASE_URL` and `NAME_API_BASE` replace it.
        keys: Variables of which one must be set; none for a server on this machine.
        output_limit: Field of a request with the maximum tokens of a reply.
        tells_usage: Whether a streamed request may ask for its usage.
        listed_as: Its name in litellm's table of prices, if that is another one.
        title: Name for people, if that is another one.
    """

    base_url: str
    keys: tuple[str, ...] = ()
    output_limit: str = "max_tokens"
    tells_usage: bool = True
    listed_as: str = ""
    title: str = ""


class ProviderHere(NamedTuple):
    """Whether a provider can be called from here.

    Attributes:
        name: What the names of its models begin with.
        missing: What it lacks, in words; None if it can be called.
        has: The variable of its key, or the words for its server.
        models: Models of a server on this machine.
    """

    name: str
    missing: str | None
    has: str
    models: list[str]


PROVIDERS: Final[Mapping[str, Provider]] = {
    "openai": Provider("https://api.openai.com/v1", ("OPENAI_API_KEY",), "max_completion_tokens"),
    "openrouter": Provider("https://openrouter.ai/api/v1", ("OPENROUTER_API_KEY", "OR_API_KEY")),
    "groq": Provider("https://api.groq.com/openai/v1", ("GROQ_API_KEY",)),
    "together": Provider(
        "https://api.together.xyz/v1",
        ("TOGETHER_API_KEY", "TOGETHERAI_API_KEY", "TOGETHER_AI_API_KEY"),
        listed_as="together_ai",
    ),
    "deepseek": Provider("https://api.deepseek.com/v1", ("DEEPSEEK_API_KEY",)),
    "mistral": Provider("https://api.mistral.ai/v1", ("MISTRAL_API_KEY",), tells_usage=False),  # it does so unasked
    "xai": Provider("https://api.x.ai/v1", ("XAI_API_KEY",)),
    "gemini": Provider("https://generativelanguage.googleapis.com/v1beta/openai", ("GEMINI_API_KEY", "GOOGLE_API_KEY")),
    "ollama": Provider("http://localhost:11434/v1", title="Ollama"),
    "llamacpp": Provider("http://localhost:8080/v1", title="llama.cpp"),
    "vllm": Provider("http://localhost:8000/v1", title="vLLM"),
    "lmstudio": Provider("http://localhost:1234/v1", title="LM Studio"),
}
"""Name in front of a model's → its provider."""
_BARE_NAMES: tuple[tuple[re.Pattern[str], str], ...] = (
    (re.compile(r"gpt-(?!oss)|chatgpt-|o\d+(-|$)"), "openai"),  # gpt-oss models have many hosts
    (re.compile(r"claude-"), "anthropic"),
    (re.compile(r"gemini-"), "gemini"),
    (re.compile(r"(mistral|magistral|ministral|codestral)-"), "mistral"),
    (re.compile(r"deepseek-"), "deepseek"),
    (re.compile(r"grok-"), "xai"),
)
"""Form of a well-known name without its provider → the provider."""
_ALIASES = {each.listed_as: name for name, each in PROVIDERS.items() if each.listed_as}


def full_name(model_name: str) -> str | None:
    """Return `provider/model`, also for a well-known bare name such as `gpt-5-mini`; None for any other name.
    Whether the provider exists is not checked."""
    provider, slash, model = model_name.partition("/")
    if slash:
        return model_name if provider and model else None
    for pattern, known_provider in _BARE_NAMES:
        if pattern.match(model_name):
            return f"{known_provider}/{model_name}"
    return None


def named(name: str) -> tuple[str, str] | None:
    """Return the provider of the table and the model that a name `provider/model` means; None for any other name."""
    provider, slash, model = name.partition("/")
    provider = _ALIASES.get(provider, provider)
    return (provider, model) if slash and model and provider in PROVIDERS else None


def address(provider: str) -> str:
    """Return the address of a provider: that of its variables, else that of the table."""
    described, variable = PROVIDERS[provider], provider.upper()
    given = os.environ.get(f"{variable}_BASE_URL") or os.environ.get(f"{variable}_API_BASE")
    if not given:
        return described.base_url
    is_bare = not described.keys and "/" not in given.partition("://")[2].rstrip("/")
    return f"{given.rstrip('/')}/v1" if is_bare else given


def key(provider: str) -> str | None:
    """Return the key of a provider in the environment; None if there is none."""
    return next(filter(None, map(os.environ.get, PROVIDERS[provider].keys)), None)


def missing_key(provider: str) -> str:
    """Return the variables of which one should be set, as text; empty if one is, or none is needed."""
    return "" if key(provider) else " or ".join(PROVIDERS[provider].keys)


def served(body: bytes) -> list[Served]:
    """Return the models in an answer; none if it is not a list of models: the first call shows whether it works."""
    try:
        return msgspec.json.decode(body, type=_Listed).data
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        return []


async def providers_here() -> list[ProviderHere]:
    """Look which providers can be called from here. A server has `LOOK_S` seconds to say which models it has."""
    local = [name for name, each in PROVIDERS.items() if not each.keys]
    answers = await asyncio.gather(*(_models_at(address(name)) for name in local))
    models = dict(zip(local, answers, strict=True))
    return [_here(name, each, models.get(name) or []) for name, each in PROVIDERS.items()]


def _here(name: str, provider: Provider, models: list[str]) -> ProviderHere:
    if lacks := missing_key(name):
        return ProviderHere(name, f"{lacks} is not set", "", [])
    if provider.keys:
        return ProviderHere(name, None, next(filter(os.environ.get, provider.keys)), [])
    missing = None if models else f"no {provider.title} answers at {address(name)}"
    return ProviderHere(name, missing, f"{provider.title} on this machine", models)


async def _models_at(base_url: str) -> list[str] | None:
    """Return the models of a server on this machine; None without one. An address elsewhere is not asked."""
    scheme, _, rest = base_url.partition("://")
    place, _, path = rest.partition("/")
    host, _, port = place.partition(":")
    if scheme != "http" or host not in ("localhost", "127.0.0.1") or not port.isdecimal():
        return None
    try:
        async with asyncio.timeout(LOOK_S):
            reader, writer = await asyncio.open_connection("127.0.0.1", int(port))
            try:  # by HTTP/1.0, so that the body is not cut into chunks
                writer.write(f"GET /{path.rstrip('/')}/models HTTP/1.0\r\nHost: {place}\r\n\r\n".encode())
                head = (await reader.readuntil(b"\r\n\r\n")).lower()
                length = re.search(rb"\r\ncontent-length: *(\d{1,7})\r", head)
                body = await (reader.readexactly(int(length[1])) if length else reader.read(MOST_LISTED_BYTES))
            finally:
                writer.close()
    except (OSError, EOFError, TimeoutError, asyncio.LimitOverrunError):
        return None
    return [each.id for each in served(body)] if head.split(b" ", 2)[1:2] == [b"200"] else None
