"""The field's one-shot protocol on the handler's port, over real sockets."""

import asyncio
import copy
import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from rlm_broker.broker.clients.base import LMReply, LMRequest
from rlm_broker.results import ChatMessage
from rlm_broker.run.lm_handler import LMHandler
from rlm_broker.usage import Usage
from sandbox_worker.wire.frames import PREFIX
from tests.support.socket_peer import WAIT_S, Peer
from tests.support.stand_ins import Echo, Hanging
from tests.support.tables import table
from tests.support.waiting import turns

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


@table("name", FRAMES)
async def test_a_recorded_request_gets_its_recorded_reply(handler: LMHandler, name: str) -> None:
    assert without_times(await ask(handler, **FRAMES[name]["request"])) == expected(name)


async def test_request_without_the_option_is_refused() -> None:
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


async def test_reply_tells_its_usage_and_summary_the_sum(handler: LMHandler) -> None:
    for _ in range(2):
        reply = await ask(handler, prompts=["a", "boom", "c"], depth=1)
        for completion in (reply["chat_completions"][0], reply["chat_completions"][2]):
            usage = completion["usage_summary"]["model_usage_summaries"]["sub-model"]
            assert (usage["total_calls"], usage["total_input_tokens"]) == (1, 10)
    (total,) = handler.get_usage_summary().model_usage_summaries.items()
    assert total == ("sub-model", Usage(4, 40, 20, 0.04))


async def test_call_of_a_lost_caller_is_cancelled() -> None:
    client = Hanging()
    async with LMHandler(client, one_shot=True) as handler:
        async with await Peer.to(handler.port) as peer:
            peer.send(b'{"prompt": "hello"}')
            await asyncio.wait_for(client.asked.wait(), WAIT_S)
        await asyncio.wait_for(client.cancelled.wait(), WAIT_S)


async def test_caller_that_sends_no_more_gets_the_rest_of_its_reply(handler: LMHandler) -> None:
    text = "x" * (6 << 20)  # its reply, with the prompt, is longer than the buffers of the kernel
    async with await Peer.to(handler.port) as peer:
        peer.send(json.dumps({"prompt": text}).encode())
        (length,) = PREFIX.unpack(await asyncio.wait_for(peer.reader.readexactly(PREFIX.size), WAIT_S))
        peer.writer.write_eof()
        await turns()
        reply = json.loads(await asyncio.wait_for(peer.reader.readexactly(length), WAIT_S))
        assert reply["chat_completion"]["response"] == f"ok {text}"
        assert await peer.is_hung_up_on()


async def test_callers_without_a_token_share_a_runs_part() -> None:
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
