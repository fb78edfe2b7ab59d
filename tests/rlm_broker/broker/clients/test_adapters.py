"""Clients of users: each optional ability is used, and none is required."""

import asyncio
import gc
from pathlib import Path
from typing import Any

import pytest

from rlm_broker import RLM, Cache, ConfigurationError, Limits, LMHandler, Model, ModelFailed
from rlm_broker.broker.clients.adapters import FieldClient, adapted, client_of, original
from rlm_broker.broker.clients.base import BaseClient, LMReply, LMRequest
from rlm_broker.broker.clients.function import FunctionClient
from rlm_broker.broker.clients.litellm import LiteLLMClient
from rlm_broker.broker.clients.offline import OfflineClient
from rlm_broker.broker.clients.openai_compatible import OpenAICompatibleClient
from rlm_broker.broker.clients.script import ScriptedClient
from rlm_broker.results import ChatMessage
from rlm_broker.usage import Usage
from tests.support.waiting import WAIT_S

REQUEST = LMRequest((ChatMessage("user", "?"),))


class Plain:
    """Has what a client needs, and no base class. Its first calls wait until as many run as `together` says."""

    def __init__(self, model_name: str = "plain", together: int = 1) -> None:
        self.model_name = model_name
        self.together = together
        self.are_together = asyncio.Event()
        self.closed = 0
        self.running = self.most = self.calls = 0

    async def complete(self, request: LMRequest) -> LMReply:
        del request
        self.calls += 1
        self.running += 1
        self.most = max(self.most, self.running)
        if self.running >= self.together:
            self.are_together.set()
        async with asyncio.timeout(WAIT_S):
            await self.are_together.wait()
        await asyncio.sleep(0)
        self.running -= 1
        return LMReply("hi", Usage(1, 2, 3, 0.5))

    async def aclose(self) -> None:
        self.closed += 1


class Able(Plain):
    """Has all optional abilities."""

    context_tokens = 2_000
    max_concurrent = 2
    fingerprint = "able"
    is_priced = False

    async def preflight(self) -> None:
        raise ModelFailed("the server is down")


class OnlyToCall:
    """Cannot even be closed."""

    model_name = "only-to-call"

    async def complete(self, request: LMRequest) -> LMReply:
        del request
        return LMReply("called", Usage(1))


def abilities(client: BaseClient) -> tuple[Any, ...]:
    return client.context_tokens, client.max_concurrent, client.fingerprint, client.is_priced


async def test_client_with_the_needed_methods_alone_has_no_ability() -> None:
    client = adapted(Plain())
    assert abilities(client) == (None, None, None, None)
    assert (client.model_name, client.why_unusable) == ("plain", None)
    await client.preflight()
    client.start_loading()
    await client.loaded()
    assert (await client.complete(REQUEST)).text == "hi"


async def test_client_abilities_are_read_on_use() -> None:
    theirs = Able()
    client = adapted(theirs)
    assert abilities(client) == (2_000, 2, "able", False)
    with pytest.raises(ModelFailed, match="the server is down"):
        await client.preflight()
    theirs.context_tokens, theirs.model_name = 9, "renamed"
    assert (client.context_tokens, client.model_name) == (9, "renamed")
    await client.aclose()
    assert theirs.closed == 1


def test_object_keeps_one_wrapper_while_in_use() -> None:
    theirs = Plain()
    client = adapted(theirs)
    assert adapted(theirs) is client
    assert adapted(client) is client
    assert original(client) is theirs
    assert adapted(Plain()) is not client
    del client
    gc.collect()
    assert original(adapted(theirs)) is theirs


def test_clients_of_this_package_are_not_wrapped() -> None:
    own: list[BaseClient] = [
        ScriptedClient([]),
        OfflineClient(),
        FunctionClient(lambda _: ""),
        LiteLLMClient("openai/x"),
        OpenAICompatibleClient("http://localhost:1/v1", "m"),
    ]
    for client in own:
        assert adapted(client) is client_of(client) is original(client) is client


def test_client_kind_follows_from_the_given_model() -> None:
    class Theirs:
        def completion(self, prompt: Any) -> str:
            return str(prompt)

    assert original(client_of(plain := Plain())) is plain
    assert isinstance(client_of(Theirs()), FieldClient)
    assert isinstance(client_of(lambda _: ""), FunctionClient)
    with pytest.raises(ConfigurationError, match="a client or a function, not int"):
        client_of(3)  # type: ignore[arg-type]


async def test_handler_returns_the_given_client_and_bounds_calls(tmp_path: Path) -> None:
    root, named = Able(together=2), Plain("named", together=6)
    async with LMHandler(root, cache=Cache(tmp_path / "cache")) as handler:
        handler.register_client("fast", named)
        assert (handler.get_client(), handler.get_client("fast")) == (root, named)
        with pytest.raises(ConfigurationError, match="is taken by another client"):
            handler.register_client("fast", Plain("named"))
        requests = [LMRequest((ChatMessage("user", str(number)),)) for number in range(6)]
        await asyncio.gather(*(handler.complete(root, request) for request in requests))
        await asyncio.gather(*(handler.complete(named, request) for request in requests))
        assert (root.most, named.most) == (2, 6)
        assert (await handler.complete(root, requests[0])).usage.stored_calls == 1, "it has a fingerprint"
        assert (await handler.complete(named, requests[0])).usage.stored_calls == 0
    assert (root.calls, named.calls, root.closed, named.closed) == (6, 7, 0, 0)


async def test_run_checks_the_users_clients_first() -> None:
    with pytest.raises(ModelFailed, match="the server is down"):
        await RLM(Able(), limits=Limits(max_depth=0)).acompletion("x", "?")
    unpriced = Plain()
    unpriced.is_priced = False  # type: ignore[attr-defined]
    with pytest.raises(ConfigurationError, match="the price of model 'plain' is not known"):
        await RLM(unpriced, limits=Limits(max_depth=0, max_budget_usd=1)).acompletion("x", "?")
    assert unpriced.calls == 0


async def test_run_needs_only_name_and_complete() -> None:
    done = await RLM(OnlyToCall(), limits=Limits(max_depth=0)).acompletion("x", "?")  # type: ignore[arg-type]
    assert done.response == "called"


def test_token_count_of_the_original_is_used() -> None:
    class Counting:
        model_name = "counting"

        def count_tokens(self, text: str) -> object:
            return len(text) if text != "odd" else "many"

        async def complete(self, request: LMRequest) -> LMReply:
            return LMReply(str(request.chars), Usage(total_calls=1))

        async def aclose(self) -> None:
            """Release no resources: it has none."""

    client = adapted(Counting())
    assert client.counts_tokens
    assert (client.count_tokens("four"), client.count_tokens("odd")) == (4, None)
    assert not adapted(ScriptedClient(["x"])).counts_tokens


def test_window_of_a_foreign_client_is_taken() -> None:
    class Small:
        model_name = "small"
        context_tokens = 8_000

        def completion(self, prompt: Any) -> str:
            return str(prompt)

    assert adapted(Small()).context_tokens == 8_000
    Small.context_tokens = -1
    assert adapted(Small()).context_tokens is None


def test_the_window_of_a_model_may_be_said() -> None:
    assert Model(name="m", base_url="http://127.0.0.1:1/v1", context_tokens=8_000).client().context_tokens == 8_000
    assert LiteLLMClient("openai/gpt-5-mini", context_tokens=9_000).context_tokens == 9_000
    with pytest.raises(ConfigurationError, match="offline calls no server"):
        Model(name="offline", context_tokens=5)


async def test_none_from_a_client_is_an_empty_reply() -> None:
    class Silent(Plain):
        def __init__(self, reply: Any) -> None:
            super().__init__()
            self.reply = reply

        async def complete(self, request: LMRequest) -> Any:
            await super().complete(request)
            return self.reply

    for reply in (None, LMReply(None, Usage(1, 2, 3))):  # type: ignore[arg-type]
        assert (await adapted(Silent(reply)).complete(REQUEST)).text == ""
