"""Client objects of other RLM runtimes."""

import asyncio
import threading
import time
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import pytest

from rlm_broker.broker.clients.adapters import FieldClient, adapted
from rlm_broker.broker.clients.base import LMRequest
from rlm_broker.errors import ConfigurationError, ModelFailed
from rlm_broker.results import ChatMessage
from rlm_broker.run.lm_handler import LMHandler
from rlm_broker.usage import Usage


@dataclass
class LastUsage:
    total_calls: int
    total_input_tokens: int
    total_output_tokens: int
    total_cost: float | None = None


class Theirs:
    """Written as the field's clients are: one 'last usage' for all calls."""

    def __init__(self) -> None:
        self.model_name = "theirs"
        self.prompts: list[Any] = []
        self.running = self.most = 0
        self._last: LastUsage | None = None
        self._lock = threading.Lock()

    def completion(self, prompt: Any, model: str | None = None) -> str:
        assert model is None
        with self._lock:
            self.prompts.append(prompt)
            self.running += 1
            self.most = max(self.most, self.running)
        text = prompt[-1]["content"]
        self._last = LastUsage(1, len(text), 1, len(text) / 100)
        time.sleep(0.002)
        with self._lock:
            self.running -= 1
        return f"{text}!"

    def get_last_usage(self) -> LastUsage:
        assert self._last is not None
        return self._last

    def get_usage_summary(self) -> None:
        raise AssertionError("the sum over all calls is not the usage of one call")


class TheirsAsync(Theirs):
    async def acompletion(self, prompt: Any) -> str:
        await asyncio.sleep(0)
        return self.completion(prompt)


class WithoutUsage:
    model_name = "without"

    def __init__(self) -> None:
        self.together = threading.Barrier(4, timeout=20)

    def completion(self, prompt: Any) -> str:
        self.together.wait()
        return str(prompt[-1]["content"])


def request(text: str) -> LMRequest:
    return LMRequest((ChatMessage("system", "s"), ChatMessage("user", text)))


@pytest.mark.parametrize("kind", [Theirs, TheirsAsync])
async def test_call_usage_is_exact_with_last_usage_client(kind: type[Theirs]) -> None:
    theirs = kind()
    client = FieldClient(theirs)
    handler = LMHandler(client)
    texts = ["x" * n for n in range(1, 31)]
    calls = await asyncio.gather(*(handler.complete(client, request(text)) for text in texts))
    for text, call in zip(texts, calls, strict=True):
        assert (call.root_model, call.response) == ("theirs", f"{text}!")
        assert call.usage == Usage(1, len(text), 1, len(text) / 100)
    assert theirs.most == 1
    assert theirs.prompts[0][0] == {"role": "system", "content": "s"}


async def test_client_without_usage_runs_concurrently() -> None:
    client = FieldClient(WithoutUsage())
    replies = await asyncio.gather(*(client.complete(request("x")) for _ in range(4)))
    assert {reply.usage for reply in replies} == {Usage(1, 0, 0, None)}


async def test_client_exception_is_a_failed_call() -> None:
    class Broken(Theirs):
        def completion(self, prompt: Any, model: str | None = None) -> str:
            raise KeyError(prompt[-1]["content"], model)

    class Confused(Theirs):
        def get_last_usage(self) -> LastUsage:
            raise RuntimeError("which one?")

    with pytest.raises(ModelFailed, match=r"^theirs: KeyError: "):
        await FieldClient(Broken()).complete(request("x"))
    with pytest.raises(ModelFailed, match=r"^theirs: get_last_usage: RuntimeError: which one\?$"):
        await FieldClient(Confused()).complete(request("x"))


async def test_object_has_one_turn_if_given_twice() -> None:
    theirs = Theirs()
    one, other = adapted(theirs), adapted(theirs)
    await asyncio.gather(*(client.complete(request("x" * n)) for n in range(1, 10) for client in (one, other)))
    assert theirs.most == 1


async def test_cancelled_call_in_a_thread_keeps_its_turn() -> None:
    theirs = Theirs()
    client = FieldClient(theirs)
    for _ in range(20):
        cancelled = asyncio.create_task(client.complete(request("cancelled")))
        await asyncio.sleep(0.001)
        cancelled.cancel()
        reply = await client.complete(request("four"))
        assert reply.usage == Usage(1, 4, 1, 0.04)
    assert theirs.most == 1


class Counting:
    """A client of the reference runtime: its usage is that of the last call that returned."""

    model_name = "counting"

    def __init__(self) -> None:
        self.at_once = self.most = 0
        self.prompts: list[Any] = []
        self._last = 0
        self._all = asyncio.Event()

    async def acompletion(self, prompt: Any) -> str:
        self.prompts.append(prompt)
        self.at_once += 1
        self.most = max(self.most, self.at_once)
        if self.at_once == 8:
            self._all.set()
        await self._all.wait()
        self._last = int(prompt)
        return f"answer {prompt}"

    def get_last_usage(self) -> Any:
        return SimpleNamespace(total_input_tokens=self._last, total_output_tokens=0)


async def test_async_client_with_usage_is_counted_exactly() -> None:
    client = Counting()
    async with LMHandler(client) as handler:  # as a model everywhere, without a wrapper
        requests = [LMRequest((ChatMessage("user", str(number)),)) for number in range(8)]
        calls = await asyncio.gather(*(handler.complete(handler.get_client(), request) for request in requests))
    assert client.most == 8
    assert client.prompts == [*map(str, range(8))]  # a text reaches it as text
    assert [call.usage.total_input_tokens for call in calls] == [*range(8)]
    assert id(handler.get_client()) == id(client)  # the object itself


def test_handler_refuses_an_object_that_is_no_client() -> None:
    for given in ("openai/gpt-5", len, 5):
        with pytest.raises(ConfigurationError, match="a client must be an object with `complete` or `completion`"):
            LMHandler(given)  # type: ignore[arg-type]
