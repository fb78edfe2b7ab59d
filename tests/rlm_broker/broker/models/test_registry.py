"""Clients and handlers, made from settings of models."""

import pytest

from rlm_broker.broker.broker import Broker
from rlm_broker.broker.clients.litellm import LiteLLMClient
from rlm_broker.broker.clients.openai_compatible import OpenAICompatibleClient
from rlm_broker.broker.clients.provider_client import ProviderClient
from rlm_broker.broker.clients.script import ScriptedClient
from rlm_broker.broker.models.model import Model
from rlm_broker.broker.models.models import Models
from rlm_broker.broker.models.registry import Registry
from rlm_broker.broker.routing import Route
from rlm_broker.errors import ConfigurationError, ModelFailed, UnknownModel
from rlm_broker.limits import Limits, RunLimits
from rlm_broker.rlm import RLM
from tests.support.fake_openai import FakeOpenAI, completion, failure

LIMITS = Limits()


@pytest.fixture(autouse=True)
def _no_keys(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("OPENAI_API_KEY", raising=False)


def test_model_name_follows_from_its_description(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SOME_KEY", "sk-of-the-test")
    models = Registry(
        "fast",
        Model(name="openai/gpt-5-mini", api_key="env:SOME_KEY", options={"temperature": 0}),
        Models({"fast": Model(base_url="http://localhost:1/v1", name="qwen"), "plain": "offline"}),
        Broker,
    )
    assert isinstance(models.root, OpenAICompatibleClient)
    assert models.root is models.named["fast"]
    assert models.root.model_name == "qwen"
    assert isinstance(models.sub, ProviderClient)
    assert models.named["plain"].model_name == "offline"


async def test_retries_rates_and_fallbacks_of_a_description_hold() -> None:
    with FakeOpenAI(failure(401, "no")) as broken, FakeOpenAI(completion("hi")) as sound:
        completed = await RLM(
            "primary",
            models={
                "spare": Model(base_url=sound.base_url, name="spare-model"),
                "primary": Model(base_url=broken.base_url, fallbacks=("spare",), max_retries=0),
            },
            limits=Limits(max_depth=0),
        ).acompletion("hello")
    assert completed.response == "hi"
    assert completed.usage_summary.model_usage_summaries.keys() == {"spare-model"}
    assert (len(broken.requests), len(sound.requests)) == (1, 1)


def test_routes_are_checked_when_the_models_are_known() -> None:
    one, other = ScriptedClient(["x"], "one"), ScriptedClient(["x"], "other")
    with pytest.raises(ConfigurationError, match="leads to no client: choose one of named, one"):
        RLM(one, models=Models({"named": other}, routes=[Route(to="missing", match="a")]))
    handler = Registry(one, None, Models({"named": other}, [Route(to="named", match="gpt-*")]), Broker).handler(LIMITS)
    assert handler.routing.pick_for_code("gpt-5", 1) is other


async def test_budget_without_a_price_is_refused_early() -> None:
    with FakeOpenAI(completion("hi")) as server:
        unpriced = Model(base_url=server.base_url, name="m")
        rlm = RLM(unpriced, limits=Limits(max_budget_usd=1))
        with pytest.raises(ConfigurationError, match="the price of model 'm' is not known; give its usd_per_million"):
            await rlm.acompletion("hello", "?")
        priced = unpriced.replace(usd_per_million_tokens=(1.0, 1.0))
        done = await RLM(priced, limits=Limits(max_budget_usd=1, max_depth=0)).acompletion("hello")
    assert done.usage_summary.total.total_cost == pytest.approx(8e-6)
    assert len(server.requests) == 1


async def test_litellm_knows_a_price_or_says_so() -> None:
    known, unknown = (LiteLLMClient(name, api_key="x") for name in ("openai/gpt-5-mini", "openai/nobody-knows"))
    await known.loaded()
    assert known.is_priced is True
    assert unknown.is_priced is False
    assert LiteLLMClient("openai/nobody-knows", usd_per_million_tokens=(1, 2)).is_priced is True


async def test_unreachable_server_is_told_before_the_sandbox_starts() -> None:
    with (
        FakeOpenAI(completion("hi"), models=["a"]) as server,
        pytest.raises(UnknownModel, match="has no model 'b'; it has: a"),
    ):
        await RLM(Model(base_url=server.base_url, name="b")).acompletion("x", "?")
    with pytest.raises(ModelFailed, match="Connection refused"):
        await RLM(Model(base_url=server.base_url, name="a")).acompletion("x", "?")


def test_models_exclude_a_handler_or_a_recording() -> None:
    with pytest.raises(ConfigurationError, match="a recording to replay: it brings its own models"):
        RLM("offline", models=Models(replay="somewhere"))


async def test_server_of_an_unused_model_may_be_down() -> None:
    down = Model(base_url="http://127.0.0.1:1/v1")
    done = await RLM("offline", models={"down": down}, limits=Limits(max_depth=0)).acompletion("x", "Who?")
    assert done.response is not None


async def test_budget_needs_the_price_of_each_fallback() -> None:
    with FakeOpenAI(completion("hi")) as server:
        priced = Model(base_url=server.base_url, name="m", usd_per_million_tokens=(1, 1), fallbacks=("spare",))
        spare = Model(base_url=server.base_url)
        with pytest.raises(ConfigurationError, match="the price of model 'spare' is not known"):
            await RLM(priced, models={"spare": spare}, limits=Limits(max_budget_usd=1)).acompletion("x", "?")
    assert server.requests == []


async def test_budget_of_one_run_needs_a_known_price() -> None:
    """The run is refused before its first call, also if the `RLM` itself has no budget."""
    unpriced = ScriptedClient(["FINAL(1)"] * 3)
    unpriced.is_priced = False
    async with RLM(unpriced) as rlm:
        with pytest.raises(ConfigurationError, match="max_budget_usd cannot be kept: the price of model 'scripted'"):
            await rlm.start("text", "?", limits=RunLimits(max_budget_usd=1.0))
        assert (await rlm.start("text", "?")).response == "1"
    async with RLM(ScriptedClient(["FINAL(1)"]), unpriced) as rlm:
        with pytest.raises(ConfigurationError, match="max_budget_usd cannot be kept"):
            await rlm.start("text", "?", limits=RunLimits(max_budget_usd=1.0))
