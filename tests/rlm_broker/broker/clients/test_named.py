"""Clients by the name of their model."""

import subprocess
import sys

import pytest

from rlm_broker.broker.clients.adapters import client_for
from rlm_broker.broker.clients.litellm import LiteLLMClient
from rlm_broker.broker.clients.provider_client import ProviderClient
from rlm_broker.errors import UnknownModel


def test_model_with_its_key_keeps_the_typed_name(monkeypatch: pytest.MonkeyPatch) -> None:
    for variable in ("OPENAI_API_KEY", "ANTHROPIC_API_KEY", "TOGETHER_API_KEY"):
        monkeypatch.setenv(variable, "key")
    for name, kind in {
        "openai/gpt-5-mini": ProviderClient,
        "gpt-5-mini": ProviderClient,
        "together_ai/moonshotai/Kimi-K2": ProviderClient,
        "ollama/qwen3": ProviderClient,
        "anthropic/claude-sonnet-4-5": LiteLLMClient,
    }.items():
        client = client_for(name)
        assert isinstance(client, kind)
        assert client.model_name == name


def test_a_name_that_is_none_is_refused_with_examples() -> None:
    for name in ("", "  ", "nonsense", "Offline", "openai/", "/gpt-5-mini"):
        with pytest.raises(UnknownModel) as unknown:
            client_for(name)
        text = str(unknown.value)
        assert "'offline'" in text
        assert "'openai/gpt-5-mini'" in text
        assert repr(name) in text or not name.strip()


def test_naming_a_model_loads_no_heavy_module() -> None:
    code = (
        "import sys; from rlm_broker.broker.clients.adapters import client_for; has_http = 'aiohttp' in sys.modules\n"
        "client_for('openai/gpt-5-mini')\n"
        "print(has_http, sorted({'litellm', 'pydantic', 'rich'} & sys.modules.keys()))"
    )
    environment = {"PYTHONPATH": ":".join(sys.path), "OPENAI_API_KEY": "key"}
    ended = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=100, check=True, env=environment
    )
    assert ended.stdout == "False []\n"


def test_a_misspelt_provider_is_refused_without_litellm() -> None:
    meant = {
        "opnai/gpt-5-mini": "openai/gpt-5-mini",
        "OpenAI/gpt-5": "openai/gpt-5",
        "gemni/gemini-3": "gemini/gemini-3",
        "lmstudo/qwen3": "lmstudio/qwen3",
    }
    code = (
        "import sys; from rlm_broker.broker.clients.adapters import client_for\n"
        f"for name in {list(meant)!r}:\n"
        "    try: client_for(name)\n"
        "    except Exception as error: print(error)\n"
        "print('litellm' in sys.modules)"
    )
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    said = [f"no provider is known for model {name!r}; did you mean {other}?" for name, other in meant.items()]
    assert ended.stdout.splitlines() == [*said, "False"]
