"""Models through litellm: names, keys, prices, and an import that leaves no trace in the process."""

import importlib
import traceback
from typing import Any

import pytest

from rlm_broker.broker.clients.base import LMRequest
from rlm_broker.broker.clients.litellm import _KEYLESS, _KEYS, _SERVERS, LiteLLMClient, prefetch, refuse_misspelt
from rlm_broker.broker.clients.providers import full_name
from rlm_broker.errors import ConfigurationError, ModelFailed, UnknownModel
from rlm_broker.results import ChatMessage
from rlm_broker.rlm import RLM
from tests.support.fake_openai import Answer, FakeOpenAI, completion, failure
from tests.support.obedient import obedient
from tests.support.service import serving

WAIT_S = 60
REQUEST = LMRequest((ChatMessage("system", "be brief"), ChatMessage("user", "hello")), max_completion_tokens=7)
VARIABLES = (
    "OPENAI_API_KEY",
    "ANTHROPIC_API_KEY",
    "ANTHROPIC_AUTH_TOKEN",
    "GEMINI_API_KEY",
    "GOOGLE_API_KEY",
    "GROQ_API_KEY",
    "NVIDIA_NIM_API_KEY",
)


@pytest.fixture(scope="module", autouse=True)
def _litellm_is_imported() -> None:
    """Import it before any test waits for an answer: on a busy machine that alone takes a minute."""
    importlib.import_module("litellm")


@pytest.fixture(autouse=True)
def _no_keys(monkeypatch: pytest.MonkeyPatch) -> None:
    for variable in VARIABLES:
        monkeypatch.delenv(variable, raising=False)


def client(server: FakeOpenAI, model_name: str = "openai/test-model", **options: Any) -> LiteLLMClient:
    return LiteLLMClient(model_name, api_base=server.base_url, api_key="sk-of-the-test", **options)


async def test_known_price_gives_a_cost() -> None:
    with FakeOpenAI(completion("hi", 1000, 10), completion("hi", 0, 0)) as server:
        named = client(server, "gpt-5-mini")
        priced, uncounted = [(await named.complete(REQUEST)).usage.total_cost for _ in range(2)]
    assert priced is not None
    assert 0 < priced < 0.01
    assert uncounted is None
    assert [request["model"] for request in server.requests] == ["gpt-5-mini"] * 2


async def test_free_model_costs_zero_and_unpriced_is_unknown() -> None:
    with FakeOpenAI(completion("hi")) as server:
        free = await client(server, "openai/free-model", input_cost_per_token=0, output_cost_per_token=0).complete(
            REQUEST
        )
        unpriced = await client(server, "openai/other-model").complete(REQUEST)
    assert (free.usage.total_cost, unpriced.usage.total_cost) == (0, None)


@pytest.mark.parametrize(
    ("answer", "kind"),
    [
        (failure(401, "wrong key sk-of-the-test, or\n was it env-secret-value?"), "AuthenticationError"),
        (failure(429, "slow down"), "RateLimitError"),
        (Answer(500, b"<html>oops</html>"), "InternalServerError"),
        (Answer(200, b"not json"), "Error"),
        (failure(400, "x" * 5000), "BadRequestError"),
    ],
    ids=["401", "429", "500", "not_json", "long"],
)
async def test_failed_call_is_one_request_without_secrets(
    answer: Answer, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SOME_VENDORS_SECRET", "env-secret-value")
    with FakeOpenAI(answer) as server, pytest.raises(ModelFailed) as failed:
        await client(server).complete(REQUEST)
    text = str(failed.value)
    assert text.startswith("openai/test-model: ")
    assert kind in text
    assert "\n" not in text
    assert len(text) < 600
    printed = "".join(traceback.format_exception(failed.value))
    assert "sk-of-the-test" not in printed
    assert "env-secret-value" not in printed
    assert len(server.requests) == 1
    if answer.status == 401:
        assert text.endswith("wrong key [redacted], or was it [redacted]?")


def test_well_known_name_gets_its_provider() -> None:
    whole = ["openai/gpt-5-mini", "openrouter/meta/llama"]
    known = [
        *("openai/gpt-5-mini", "openai/o3", "openai/o4-mini", "anthropic/claude-sonnet-4-5", "gemini/gemini-2.5-pro"),
        *("deepseek/deepseek-chat", "mistral/mistral-large-latest", "xai/grok-4"),
    ]
    assert [full_name(name) for name in whole] == whole
    assert [full_name(name.partition("/")[2]) for name in known] == known
    assert not any(map(full_name, ("gpt-oss-120b", "other", "/model", "provider/", "")))


@pytest.mark.parametrize(
    ("model_name", "variables"),
    [
        ("openai/gpt-5-mini", ["OPENAI_API_KEY"]),
        ("gpt-5-mini", ["OPENAI_API_KEY"]),
        ("claude-sonnet-4-5", ["ANTHROPIC_API_KEY", "ANTHROPIC_AUTH_TOKEN"]),
        ("gemini/gemini-2.5-pro", ["GEMINI_API_KEY", "GOOGLE_API_KEY"]),
        ("groq/llama", ["GROQ_API_KEY"]),
    ],
)
def test_missing_key_is_named(model_name: str, variables: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigurationError) as missing:
        LiteLLMClient(model_name).check()
    assert str(missing.value).startswith(f"model {model_name!r} needs {' or '.join(variables)}, which is not set")
    monkeypatch.setenv(variables[0], "")
    with pytest.raises(ConfigurationError):
        LiteLLMClient(model_name).check()
    monkeypatch.setenv(variables[-1], "key")
    LiteLLMClient(model_name).check()


def test_missing_key_of_a_rare_provider_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigurationError, match="'nvidia_nim/llama' needs NVIDIA_NIM_API_KEY, which is not set"):
        LiteLLMClient("nvidia_nim/llama").check()
    monkeypatch.setenv("NVIDIA_NIM_API_KEY", "key")
    LiteLLMClient("nvidia_nim/llama").check()


def test_key_variable_is_needed_only_if_used() -> None:
    LiteLLMClient("openai/gpt-5-mini", api_key="key").check()
    LiteLLMClient("ollama/llama3").check()


def test_a_stream_is_refused_at_construction() -> None:
    with pytest.raises(ConfigurationError, match="stream"):
        LiteLLMClient("openai/gpt-5-mini", stream=True)


@pytest.mark.parametrize("provider", ["hosted_vllm", "lm_studio", "llamafile"])
def test_own_server_needs_its_address(provider: str, monkeypatch: pytest.MonkeyPatch) -> None:
    variable = f"{provider.upper()}_API_BASE"
    monkeypatch.delenv(variable, raising=False)
    with pytest.raises(ConfigurationError, match=f"on a server of your own: set {variable}"):
        LiteLLMClient(f"{provider}/model").check()
    LiteLLMClient(f"{provider}/model", api_base="http://host/v1").check()
    monkeypatch.setenv(variable, "http://host/v1")
    LiteLLMClient(f"{provider}/model").check()


def test_litellm_providers_are_not_taken_for_misspelt() -> None:
    prefetch().result()
    import litellm

    for provider in map(str, [getattr(each, "value", each) for each in litellm.provider_list]):
        if provider not in {*_KEYS, *_KEYLESS, *_SERVERS}:
            refuse_misspelt(f"{provider}/model", provider)


def test_client_of_the_service_gets_answer_and_stream() -> None:
    litellm = importlib.import_module("litellm")
    with serving(RLM(obedient())) as served:
        named: Any = {"model": "openai/obedient", "base_url": served.base_url, "api_key": served.key}
        named["messages"] = [{"role": "user", "content": "Say hello."}]
        assert litellm.completion(**named).choices[0].message.content == "hello"
        pieces = [chunk.choices[0].delta for chunk in litellm.completion(**named, stream=True)]
    assert "".join(piece.content or "" for piece in pieces) == "hello"
    assert "FINAL(hello)" in "".join(getattr(piece, "reasoning_content", None) or "" for piece in pieces)


def test_unknown_provider_is_an_unknown_model() -> None:
    with pytest.raises(UnknownModel, match="no provider is known for model 'nowhere/model'"):
        LiteLLMClient("nowhere/model").check()
