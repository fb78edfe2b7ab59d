"""The field's one-shot protocol on the handler's port, over real sockets."""

import asyncio
import copy
import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from rlm_broker.broker.clients.base import LMReply, LMRequest
from rlm_broker.broker.clients.function import FunctionClient
from rlm_broker.results import ChatMessage
from rlm_broker.run.lm_handler import LMHandler
from rlm_broker.usage import Usage
from tests.support.socket_peer import WAIT_S, Peer
from tests.support.stand_ins import Echo, Hanging

GOLDEN = Path(__file__).parent / "transport" / "golden_wire.json"
FRAMES = {frame["name"]: frame for frame in json.loads(GOLDEN.read_text())["frames"]}


@pytest.fixture
async def handler() -> AsyncIterator[LMHandler]:
    async with LMHandler(Echo("root-model"), other_backend_client=Echo("sub-model"), one_shot=True) as opened:
        yield opened


async def ask(handler: LMHandler, **request: Any) -> dict[str, Any]:
    async with await Peer.to(handler.port) as peer:
        return await peer.ask(request)


def without_times(reply: dict[str, Any]) -> dict[str, Any]:
    for completion in [reply["chat_completion"], *(reply["chat_completions"] or [])]:
        if completion is not None:
            completion["execution_time"] = 0.0
    return reply


def expected(name: str) -> Any:
    """Return the recorded reply, corrected in the two cases in which the recording names a model that did not serve."""
    reply = copy.deepcopy(FRAMES[name]["response"])
    completion = reply["chat_completion"]
    if name == "message_list":  # the mock of the recording replied only that the prompt was a list
        completion["response"] = f"ok {FRAMES[name]['request']['prompt'][-1]['content']}"
    if name in ("single_depth2_default", "unknown_model_depth1"):
        (usage,) = completion["usage_summary"]["model_usage_summaries"].values()
        completion["usage_summary"]["model_usage_summaries"] = {"sub-model": usage}
        completion["root_model"] = "sub-model"
    if name == "unknown_model_depth1":
        completion["requested_model"] = "nope"
    return reply


@pytest.mark.parametrize("name", FRAMES)
async def test_a_recorded_request_gets_its_recorded_reply(handler: LMHandler, name: str) -> None:
    assert without_times(await ask(handler, **FRAMES[name]["request"])) == expected(name)


async def test_request_without_the_option_is_refused() -> None:
    """A request is refused with the reason if the option is off."""
    async with LMHandler(Echo("root")) as handler, await Peer.to(handler.port) as peer:
        reply = await peer.ask({"prompt": "hello"})
        assert "one_shot=True" in reply["error"]
        assert await peer.is_hung_up_on()


async def test_a_token_without_its_type_is_no_hello(handler: LMHandler) -> None:
    assert (await ask(handler, token="x"))["error"] == "Missing 'prompt' or 'prompts' in request."


async def test_connection_may_ask_again_after_the_reply(handler: LMHandler) -> None:
    async with await Peer.to(handler.port) as peer:
        for text in ("one", "two"):
            assert (await peer.ask({"prompt": text}))["chat_completion"]["response"] == f"ok {text}"


async def test_second_request_before_the_reply_is_refused() -> None:
    """A second request before the reply is refused and ends the first."""
    client = Hanging()
    async with LMHandler(client, one_shot=True) as handler, await Peer.to(handler.port) as peer:
        peer.send(b'{"prompt": "first"}')
        await asyncio.wait_for(client.asked.wait(), WAIT_S)
        assert "one request at a time" in (await peer.ask({"prompt": "second"}))["error"]
        await asyncio.wait_for(client.cancelled.wait(), WAIT_S)
        assert await peer.is_hung_up_on()


async def test_a_thousand_callers_at_once_are_all_answered(handler: LMHandler) -> None:
    async def call(number: int) -> str:
        return str((await ask(handler, prompt=str(number)))["chat_completion"]["response"])

    assert await asyncio.gather(*map(call, range(1000))) == [f"ok {number}" for number in range(1000)]


async def test_batch_bounds_concurrent_calls_and_keeps_order() -> None:
    """A batch makes at most the given number of concurrent calls and keeps its order."""
    running = most = 0

    async def last_first(messages: list[dict[str, Any]]) -> str:
        nonlocal running, most
        running += 1
        most = max(most, running)
        for _ in range(40 - int(messages[-1]["content"])):
            await asyncio.sleep(0)
        running -= 1
        return f"ok {messages[-1]['content']}"

    prompts = [str(number) for number in range(20)]
    async with LMHandler(FunctionClient(last_first), batch_max_concurrent=3, one_shot=True) as handler:
        reply = await ask(handler, prompts=prompts)
    assert [item["response"] for item in reply["chat_completions"]] == [f"ok {prompt}" for prompt in prompts]
    assert most == 3


async def test_reply_tells_its_usage_and_summary_the_sum(handler: LMHandler) -> None:
    """A reply tells the usage of its own call, and the summary tells that of all calls."""
    for _ in range(2):
        reply = await ask(handler, prompts=["a", "boom", "c"], depth=1)
        for completion in (reply["chat_completions"][0], reply["chat_completions"][2]):
            usage = completion["usage_summary"]["model_usage_summaries"]["sub-model"]
            assert (usage["total_calls"], usage["total_input_tokens"]) == (1, 10)
    (total,) = handler.get_usage_summary().model_usage_summaries.items()
    assert total == ("sub-model", Usage(4, 40, 20, 0.04))


async def test_late_call_is_answered_with_the_limit() -> None:
    """A call past its time is answered with the limit."""
    async with LMHandler(Hanging(), one_shot=True, call_timeout_s=0.05) as handler:
        assert (await ask(handler, prompt="x"))["error"] == "llm_query timed out after 0.05s"


class Broken(Echo):
    """Breaks in a way that no client may."""

    def __init__(self, how: BaseException | object) -> None:
        super().__init__("broken")
        self._how = how

    async def complete(self, request: LMRequest) -> LMReply:
        del request
        if isinstance(self._how, BaseException):
            raise self._how
        return self._how  # type: ignore[return-value]


@pytest.mark.parametrize(
    ("how", "error"),
    [
        (RuntimeError("a bug"), "broken: RuntimeError: a bug"),
        (TimeoutError("its own, of 5 s"), "broken: TimeoutError: its own, of 5 s"),
        (asyncio.CancelledError(), "broken: the client cancelled its own call"),
        ("text", "broken: the client returned str, not LMReply"),
        (LMReply(5, Usage(1)), "broken: the text of the client's reply is int, not str"),  # type: ignore[arg-type]
        (LMReply("x", None), "broken: the usage of the client's reply is NoneType, not Usage"),  # type: ignore[arg-type]
    ],
    ids=["raises", "times_out_itself", "cancels_itself", "returns_text", "text_is_a_number", "has_no_usage"],
)
async def test_client_error_always_gives_a_reply(how: object, error: str) -> None:
    """A caller gets a reply for each misbehaviour of a client."""
    async with LMHandler(Broken(how), one_shot=True) as handler:
        assert (await ask(handler, prompt="x"))["error"] == error
        batch = await ask(handler, prompts=["x", "y"])
    assert [item["error"] for item in batch["chat_completions"]] == [f"llm() call failed - {error}"] * 2


async def test_call_of_a_lost_caller_is_cancelled() -> None:
    """A call whose caller has left is cancelled at the provider."""
    client = Hanging()
    async with LMHandler(client, one_shot=True) as handler:
        async with await Peer.to(handler.port) as peer:
            peer.send(b'{"prompt": "hello"}')
            await asyncio.wait_for(client.asked.wait(), WAIT_S)
        await asyncio.wait_for(client.cancelled.wait(), WAIT_S)


async def test_stop_ends_calls_and_closes_the_port() -> None:
    """Stopping ends the calls that are under way and closes the port."""
    client = Hanging()
    async with LMHandler(client, one_shot=True) as handler:
        port = handler.port
        async with await Peer.to(port) as peer:
            peer.send(b'{"prompt": "hello"}')
            await asyncio.wait_for(client.asked.wait(), WAIT_S)
            await handler.aclose()
            assert client.cancelled.is_set()
            assert await peer.is_hung_up_on()
        with pytest.raises(ConnectionRefusedError):
            await asyncio.open_connection("127.0.0.1", port)
        await handler.aclose()
    assert handler.port == 0


async def test_chat_requests_take_turns_at_a_busy_client() -> None:
    """Requests of chat messages take turns at a client that is busy."""

    class Single(Echo):
        max_concurrent = 1

        async def complete(self, request: LMRequest) -> LMReply:
            await asyncio.sleep(0)
            return await super().complete(request)

    async with LMHandler(Single("root-model"), one_shot=True) as handler:
        many = [{"role": "user", "content": str(number)} for number in range(100)]
        batch = await ask(handler, prompts=many)
        assert [each["response"] for each in batch["chat_completions"]] == [f"ok {number}" for number in range(100)]
        replies = await asyncio.gather(*(ask(handler, prompt=prompt) for prompt in many[:8]))
    assert [reply["chat_completion"]["response"] for reply in replies] == [f"ok {number}" for number in range(8)]


async def test_callers_without_a_token_share_a_runs_part() -> None:
    """All callers without a token together have the share of one run."""
    order: list[str] = []

    class Slow(Echo):
        max_concurrent = 1

        async def complete(self, request: LMRequest) -> LMReply:
            order.append(str(request.messages[-1].content))
            await asyncio.sleep(0)
            return await super().complete(request)

    client = Slow("slow")
    async with LMHandler(client, one_shot=True) as handler:
        strangers = [asyncio.create_task(ask(handler, prompts=["stranger"] * 10)) for _ in range(20)]
        while len(order) < 20:
            await asyncio.sleep(0)
        begun = len(order)
        run = LMRequest((ChatMessage("user", "run"),))
        for _ in range(5):
            await handler.complete(client, run, session="a run")
        assert order[begun:].count("stranger") <= 10
        await asyncio.gather(*strangers)
        assert len(order) == 205
