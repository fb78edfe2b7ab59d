"""Models of the table of providers: the address, the key, the request, the price, and servers on this machine."""

import asyncio
import socket

import pytest

from rlm_broker.broker.clients import provider_client, providers
from rlm_broker.broker.clients.adapters import client_for
from rlm_broker.broker.clients.base import LMReply, LMRequest
from rlm_broker.broker.clients.providers import PROVIDERS, address, providers_here
from rlm_broker.errors import ConfigurationError, UnknownModel
from rlm_broker.results import ChatMessage
from tests.support.fake_openai import FakeOpenAI, completion, streamed


@pytest.fixture(autouse=True)
def _no_table(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(provider_client, "_listed_facts", dict)


def asked(name: str, *, streams: bool = False) -> LMReply:
    async def call() -> LMReply:
        client = client_for(name)
        try:
            await client.preflight()
            on_text = (lambda _: None) if streams else None
            request = LMRequest((ChatMessage("user", "x"),), max_completion_tokens=9, on_text=on_text)
            return await client.complete(request)
        finally:
            await client.aclose()

    return asyncio.run(call())


def test_request_goes_to_the_address_with_the_key_and_the_fields_of_its_provider(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    fields = {"openai/gpt-5": "max_completion_tokens", "groq/openai/gpt-oss": "max_tokens", "mistral/m": "max_tokens"}
    for name, limit in fields.items():
        provider, _, model = name.partition("/")
        with FakeOpenAI(streamed("yes"), models=["another"]) as server:
            monkeypatch.setenv(f"{provider.upper()}_BASE_URL", server.base_url)
            monkeypatch.setenv(f"{provider.upper()}_API_KEY", f"sk-{provider}")
            assert asked(name, streams=True).text == "yes"
        sent = server.requests[-1]
        assert (sent["model"], sent[limit]) == (model, 9)
        assert len({"max_tokens", "max_completion_tokens"} & sent.keys()) == 1
        assert ("stream_options" in sent) == (provider != "mistral")
        assert server.headers[-1]["authorization"] == f"Bearer sk-{provider}"


def test_key_that_is_not_set_is_named() -> None:
    with pytest.raises(ConfigurationError, match="model 'xai/grok-4' needs XAI_API_KEY, which is not set: export it"):
        client_for("xai/grok-4")
    assert client_for("xai/grok-4", api_key="sk-given").model_name == "xai/grok-4"


def test_price_and_window_come_from_the_table_of_litellm(monkeypatch: pytest.MonkeyPatch) -> None:
    facts = {"input_cost_per_token": 1e-6, "output_cost_per_token": 2e-6, "max_input_tokens": 5_000}
    monkeypatch.setattr(provider_client, "_listed_facts", lambda: {"together_ai/m": facts})
    monkeypatch.setenv("TOGETHER_API_KEY", "key")
    with FakeOpenAI(completion("yes", 1_000, 100)) as server:
        monkeypatch.setenv("TOGETHER_BASE_URL", server.base_url)
        assert asked("together/m").usage.total_cost == pytest.approx(0.0012)
        assert asked("together/other").usage.total_cost is None
    client = client_for("together/m")
    assert (client.is_priced, client.context_tokens) == (False, None)
    asyncio.run(client.loaded())
    assert (client.is_priced, client.context_tokens) == (True, 5_000)


def test_server_on_this_machine_is_free_and_asked_for_its_models(monkeypatch: pytest.MonkeyPatch) -> None:
    with FakeOpenAI(completion("yes", 10, 5), models=["qwen3", "small"]) as server:
        monkeypatch.setenv("OLLAMA_API_BASE", server.base_url.removesuffix("/v1"))
        assert asked("ollama/qwen3").usage.total_cost == 0
        with pytest.raises(UnknownModel, match="has no model 'other'; it has: qwen3, small"):
            asked("ollama/other")


def test_servers_on_this_machine_are_found_within_a_deadline(monkeypatch: pytest.MonkeyPatch) -> None:
    with FakeOpenAI(completion("yes"), models=["qwen3"]) as server, socket.create_server(("127.0.0.1", 0)) as silent:
        port = silent.getsockname()[1]
        for name, base_url in (
            ("LLAMACPP", server.base_url),
            ("VLLM", f"http://127.0.0.1:{port}/v1"),
            ("OLLAMA", "http://gpu.invalid:1/v1"),
            ("LMSTUDIO", "http://127.0.0.1:1/v1"),
        ):
            monkeypatch.setenv(f"{name}_BASE_URL", base_url)
        monkeypatch.setattr(providers, "LOOK_S", 0.5)
        here = {each.name: each for each in asyncio.run(providers_here())}
    assert [name for name, each in here.items() if each.models] == ["llamacpp"]
    assert here["llamacpp"].models == ["qwen3"]
    assert here["vllm"].missing == f"no vLLM answers at http://127.0.0.1:{port}/v1"


def test_every_provider_has_an_address_and_only_local_ones_have_no_key() -> None:
    for name, each in PROVIDERS.items():
        assert address(name) == each.base_url
        assert each.base_url.startswith("https://" if each.keys else "http://localhost:")
