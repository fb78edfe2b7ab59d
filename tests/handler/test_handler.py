"""The handler and its port, over real sockets."""

import asyncio
import copy
import json
import socket
import threading
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from rlm_broker.clients.base import LMReply, LMRequest
from rlm_broker.clients.function import FunctionClient
from rlm_broker.errors import ConfigurationError, ModelFailed, UnknownModel
from rlm_broker.handler.handler import LMHandler
from rlm_broker.types import Usage
from tests.handler.socket_peer import WAIT_S, Peer

GOLDEN = Path(__file__).parents[1] / "transport" / "golden_wire.json"
FRAMES = {frame["name"]: frame for frame in json.loads(GOLDEN.read_text())["frames"]}
OURS_SAYS_WHO_SERVED = {"single_depth2_default", "unknown_model_depth1"}


class Echo:
    """Replies as the recorded reference's mock does."""

    def __init__(self, model_name: str) -> None:
        self.model_name = model_name

    async def complete(self, request: LMRequest) -> LMReply:
        last = request.messages[-1].content
        if last == "boom":
            raise RuntimeError("mock failure")
        return LMReply(f"ok {last}", Usage(1, 10, 5, 0.01))

    async def aclose(self) -> None:
        """Nothing is held."""


class Hanging:
    """Never replies; says when it was asked and when that was cancelled."""

    model_name = "hanging"

    def __init__(self) -> None:
        self.asked = asyncio.Event()
        self.cancelled = asyncio.Event()

    async def complete(self, request: LMRequest) -> LMReply:
        del request
        self.asked.set()
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            self.cancelled.set()
            raise
        raise AssertionError

    async def aclose(self) -> None:
        """Nothing is held."""


@pytest.fixture
async def handler() -> AsyncIterator[LMHandler]:
    async with LMHandler(Echo("root-model"), other_backend_client=Echo("sub-model"), one_shot=True) as opened:
        yield opened


def without_times(reply: dict[str, Any]) -> dict[str, Any]:
    for completion in [reply["chat_completion"], *(reply["chat_completions"] or [])]:
        if completion is not None:
            completion["execution_time"] = 0.0
    return reply


# -- the one-shot protocol -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", [name for name, frame in FRAMES.items() if "response" in frame])
async def test_a_recorded_request_gets_its_recorded_reply_over_a_real_socket(handler: LMHandler, name: str) -> None:
    async with await Peer.to(handler.port) as peer:
        reply = without_times(await peer.ask(FRAMES[name]["request"]))
    recorded = copy.deepcopy(FRAMES[name]["response"])
    if name == "message_list":  # of which the recorded mock said only that it was a list
        recorded["chat_completion"]["response"] = f"ok {FRAMES[name]['request']['prompt'][-1]['content']}"
    assert reply.keys() == recorded.keys()
    if name in OURS_SAYS_WHO_SERVED:
        assert reply["chat_completion"]["root_model"] == "sub-model"
        assert reply["chat_completion"]["response"] == recorded["chat_completion"]["response"]
    elif recorded["error"] or any("error" in item for item in recorded["chat_completions"] or []):
        assert bool(reply["error"]) == bool(recorded["error"])
        assert [("error" in item, item["response"]) for item in reply["chat_completions"] or []] == [
            ("error" in item, item["response"]) for item in recorded["chat_completions"] or []
        ]
    else:
        assert reply == recorded


async def test_without_the_option_a_one_shot_request_is_refused_with_the_reason() -> None:
    async with LMHandler(Echo("root")) as handler, await Peer.to(handler.port) as peer:
        reply = await peer.ask({"prompt": "hello"})
        assert "one_shot=True" in reply["error"]
        assert await peer.is_hung_up_on()


async def test_a_token_without_its_type_is_no_hello(handler: LMHandler) -> None:
    async with await Peer.to(handler.port) as peer:
        assert (await peer.ask({"token": "x"}))["error"] == "Missing 'prompt' or 'prompts' in request."


async def test_one_connection_may_ask_again_after_the_reply(handler: LMHandler) -> None:
    async with await Peer.to(handler.port) as peer:
        for text in ("one", "two"):
            assert (await peer.ask({"prompt": text}))["chat_completion"]["response"] == f"ok {text}"


async def test_a_second_request_before_the_reply_is_refused() -> None:
    client = Hanging()
    async with LMHandler(client, one_shot=True) as handler, await Peer.to(handler.port) as peer:
        peer.send(b'{"prompt": "first"}')
        await asyncio.wait_for(client.asked.wait(), WAIT_S)
        assert "one request at a time" in (await peer.ask({"prompt": "second"}))["error"]


async def test_a_thousand_callers_at_once_are_all_answered(handler: LMHandler) -> None:
    async def call(number: int) -> str:
        async with await Peer.to(handler.port) as peer:
            return str((await peer.ask({"prompt": str(number)}))["chat_completion"]["response"])

    assert await asyncio.gather(*map(call, range(1000))) == [f"ok {number}" for number in range(1000)]


async def test_a_batch_keeps_its_order_and_the_failure_of_one_prompt_to_itself(handler: LMHandler) -> None:
    async with await Peer.to(handler.port) as peer:
        reply = await peer.ask({"prompts": ["a", "boom", "c"], "depth": 1})
    assert reply["error"] is None
    assert [item["response"] for item in reply["chat_completions"]] == ["ok a", "", "ok c"]
    assert reply["chat_completions"][1]["error"] == "llm() call failed - sub-model: RuntimeError: mock failure"


async def test_a_batch_makes_at_most_so_many_calls_at_a_time() -> None:
    running = most = 0

    async def slow(_messages: list[dict[str, Any]]) -> str:
        nonlocal running, most
        running += 1
        most = max(most, running)
        await asyncio.sleep(0.005)
        running -= 1
        return "ok"

    client = FunctionClient(slow)
    async with (
        LMHandler(client, batch_max_concurrent=3, one_shot=True) as handler,
        await Peer.to(handler.port) as peer,
    ):
        assert len((await peer.ask({"prompts": ["x"] * 20}))["chat_completions"]) == 20
    assert most == 3


async def test_what_a_caller_that_left_was_waiting_for_is_cancelled_at_the_provider() -> None:
    client = Hanging()
    async with LMHandler(client, one_shot=True) as handler:
        async with await Peer.to(handler.port) as peer:
            peer.send(b'{"prompt": "hello"}')
            await asyncio.wait_for(client.asked.wait(), WAIT_S)
        await asyncio.wait_for(client.cancelled.wait(), WAIT_S)


async def test_stopping_ends_the_calls_that_are_under_way_and_closes_the_port() -> None:
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
    assert (handler.address, handler.port) == (None, 0)


async def test_attach_serves_a_socket_that_is_connected_already(handler: LMHandler) -> None:
    ours, theirs = socket.socketpair()
    await handler.listener.attach(theirs)
    reader, writer = await asyncio.open_connection(sock=ours)
    async with Peer(reader, writer) as peer:
        assert (await peer.ask({"prompt": "hello"}))["chat_completion"]["response"] == "ok hello"


# -- from Python -----------------------------------------------------------------------------------------------------


def test_it_starts_once_answers_and_stops_from_code_without_a_loop() -> None:
    handler = LMHandler(Echo("root"), other_backend_client=Echo("sub"))
    address = handler.start()
    assert handler.start() == address == handler.address
    assert handler.completion("hello") == "ok hello"
    assert handler.completion([{"role": "user", "content": "hi"}], model="sub") == "ok hi"
    summary = handler.get_usage_summary().model_usage_summaries
    assert {name: usage.total_calls for name, usage in summary.items()} == {"root": 1, "sub": 1}
    handler.stop()
    handler.stop()
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(address)


def test_many_threads_may_ask_at_once_and_every_call_is_counted() -> None:
    with LMHandler(Echo("root")) as handler:
        answers: list[str] = []
        threads = [threading.Thread(target=lambda: answers.append(handler.completion("x"))) for _ in range(32)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(WAIT_S)
        assert answers == ["ok x"] * 32
        total = handler.get_usage_summary().total
        assert (total.total_calls, total.total_input_tokens, total.total_output_tokens) == (32, 320, 160)
        assert total.total_cost == pytest.approx(0.32)


def test_registered_clients_are_found_by_name_and_unknown_names_are_refused() -> None:
    handler = LMHandler(Echo("root"), other_backend_client=Echo("sub"))
    extra = Echo("extra")
    handler.register_client("fast", extra)
    assert handler.get_client("fast") is extra
    assert handler.get_client(depth=0).model_name == "root"
    assert [handler.get_client(depth=depth).model_name for depth in (1, 2, 5)] == ["sub"] * 3
    with pytest.raises(UnknownModel, match="no client for model 'nope'; known: root, sub, fast"):
        handler.get_client("nope")


async def test_a_call_past_its_time_fails_and_is_cancelled() -> None:
    client = Hanging()
    async with LMHandler(client, call_timeout_s=0.05) as handler:
        with pytest.raises(ModelFailed, match=r"llm_query timed out after 0\.05s"):
            await handler.complete(client, LMRequest(()))
    assert client.cancelled.is_set()


async def test_a_client_that_returns_something_else_is_named() -> None:
    class Wrong(Echo):
        async def complete(self, request: LMRequest) -> LMReply:
            del request
            return "text"  # type: ignore[return-value]

    client = Wrong("wrong")
    async with LMHandler(client) as handler:
        with pytest.raises(ModelFailed, match="wrong: the client returned str, not LMReply"):
            await handler.complete(client, LMRequest(()))


def test_a_port_beyond_loopback_is_refused_unless_the_risk_is_named() -> None:
    with pytest.raises(ConfigurationError, match=r"refusing to listen on 0\.0\.0\.0"):
        LMHandler(Echo("root"), host="0.0.0.0")
    with LMHandler(Echo("root"), host="0.0.0.0", insecure_bind=True) as handler:
        assert handler.port
