"""The handler from Python: its life, its models, its calls."""

import asyncio
import json
import socket
import threading
from typing import Any

import pytest

from rlm_broker.broker.clients.base import LMReply, LMRequest
from rlm_broker.errors import ConfigurationError, ModelFailed
from rlm_broker.results import ChatMessage
from rlm_broker.run.lm_handler import LMHandler
from rlm_broker.usage import Usage
from sandbox_worker.wire.frames import PREFIX, encode_frame
from tests.support.forked_python import python
from tests.support.socket_peer import MAX_FRAME_BYTES, WAIT_S
from tests.support.stand_ins import Echo, Hanging


def test_handler_runs_from_code_without_a_loop() -> None:
    handler = LMHandler(Echo("root"), other_backend_client=Echo("sub"))
    address = handler.start()
    assert handler.start() == address == handler.address
    assert handler.completion("hello") == "ok hello"
    assert handler.completion([{"role": "user", "content": "hi"}], model="sub") == "ok hi"
    summary = handler.get_usage_summary().model_usage_summaries
    assert {name: usage.total_calls for name, usage in summary.items()} == {"root": 1, "sub": 1}
    handler.stop()
    handler.stop()
    assert handler.address == ("127.0.0.1", 0)
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(address)


def test_handler_tells_its_clients_and_address() -> None:
    root, sub, fast = Echo("root"), Echo("sub"), Echo("echo-fast")
    handler = LMHandler(root, "127.0.0.2", 4321, sub)
    handler.register_client("fast", fast)
    assert (handler.default_client, handler.other_backend_client) == (root, sub)
    assert handler.clients == {"root": root, "sub": sub, "fast": fast}
    assert all(handler.get_client(name) is client for name, client in handler.clients.items())
    assert (handler.host, handler.port, handler.address) == ("127.0.0.2", 4321, ("127.0.0.2", 4321))
    with LMHandler(root) as opened:
        assert opened.address == (opened.host, opened.port) == opened.listener.address
    assert opened.address == ("127.0.0.1", 0)
    alone = LMHandler(FieldClient())
    assert (alone.other_backend_client, alone.clients) == (None, {"field": alone.default_client})
    assert isinstance(alone.default_client, FieldClient)
    twins = LMHandler(one := Echo("same"), other_backend_client=Echo("same"))
    assert twins.clients == {"same": one}


class FieldClient:
    """A client of the reference runtime."""

    model_name = "field"

    def completion(self, prompt: object) -> str:
        return str(prompt)


def test_many_threads_may_start_ask_and_count_at_once() -> None:
    handler = LMHandler(Echo("root"))
    answers: list[str] = []
    addresses: set[tuple[str, int]] = set()

    def work() -> None:
        addresses.add(handler.start())
        answers.append(handler.completion("x"))

    threads = [threading.Thread(target=work) for _ in range(32)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(WAIT_S)
    assert answers == ["ok x"] * 32
    assert addresses == {handler.address}
    total = handler.get_usage_summary().total
    assert (total.total_calls, total.total_input_tokens, total.total_output_tokens) == (32, 320, 160)
    assert total.total_cost == pytest.approx(0.32)
    handler.stop()


def test_attach_works_from_code_without_a_loop() -> None:
    ours, theirs = socket.socketpair()
    with LMHandler(Echo("root"), one_shot=True) as handler, ours:
        handler.attach(theirs)
        assert answer_to(ours, "hello") == "ok hello"


def answer_to(caller: socket.socket, prompt: str) -> str:
    caller.settimeout(WAIT_S)
    caller.sendall(encode_frame(json.dumps({"prompt": prompt}).encode(), MAX_FRAME_BYTES))
    with caller.makefile("rb") as incoming:
        (length,) = PREFIX.unpack(incoming.read(PREFIX.size))
        return str(json.loads(incoming.read(length))["chat_completion"]["response"])


async def test_call_names_the_served_and_the_asked_model() -> None:
    client = Echo("root")
    async with LMHandler(client) as handler:
        handler.register_client("fast", client)
        for asked, reported in ((None, None), ("root", None), ("fast", "fast")):
            call = await handler.complete(client, LMRequest((ChatMessage("user", "x"),), model=asked))
            assert (call.root_model, call.requested_model) == ("root", reported)


class Meeting(Echo):
    """Replies when so many calls are there at the same time."""

    def __init__(self, together: int) -> None:
        super().__init__("meeting")
        self.barrier = asyncio.Barrier(together)
        self.running = self.most = 0

    async def complete(self, request: LMRequest) -> LMReply:
        self.running += 1
        self.most = max(self.most, self.running)
        try:
            await asyncio.wait_for(self.barrier.wait(), WAIT_S)
            return await super().complete(request)
        finally:
            self.running -= 1


async def test_handler_batch_keeps_order_and_slots_of_failures() -> None:
    client = Meeting(3)
    async with LMHandler(client) as handler:
        message = {"role": "user", "content": "c"}
        calls = await handler.abatch_completion(["a", "boom", message, [message], "b", "d"], max_concurrent=3)
        assert [call.response for call in calls] == ["ok a", "", "ok c", "ok c", "ok b", "ok d"]
        assert [call.problem for call in calls] == [None, "boom", None, None, None, None]
        assert {call.root_model for call in calls} == {"meeting"}
        assert [call.usage for call in calls[:2]] == [Usage(1, 10, 5, 0.01), Usage()]
        assert all(call.execution_time > 0 for call in calls)
        assert client.most == 3
        assert await handler.abatch_completion([]) == []
        assert handler.get_usage_summary().total_calls == 5


class CancelsItself(Echo):
    async def complete(self, request: LMRequest) -> LMReply:
        if request.messages[-1].content == "boom":
            task = asyncio.current_task()
            assert task is not None
            task.cancel()
            await asyncio.sleep(0)
        return await super().complete(request)


async def test_self_cancelling_client_fails_only_its_slot() -> None:
    async with LMHandler(CancelsItself("root")) as handler:
        calls = await handler.abatch_completion(["a", "boom"], max_concurrent=1)
    assert [(call.response, call.problem) for call in calls] == [
        ("ok a", None),
        ("", "the client cancelled its own call"),
    ]


def test_invalid_batch_is_refused_before_sending() -> None:
    cases: list[tuple[dict[str, Any], str]] = [
        ({"prompts": "text"}, "prompts must be a list of prompts, not str"),
        ({"prompts": iter(["a"])}, "prompts must be a list of prompts, not list_iterator"),
        ({"prompts": ["a", 5]}, r"prompts\[1\] must be a str or dict or list, not int"),
        ({"prompts": ["a", {"role": "me"}]}, r"prompts\[1\]: the 'role' of a chat message must be"),
        ({"prompts": ["a"], "max_concurrent": 0}, "max_concurrent must be 1 or more, not 0"),
        ({"prompts": ["a"], "max_concurrent": "3"}, "max_concurrent must be an int, not str"),
        ({"prompts": ["a"], "model": "nope"}, "no client for model 'nope'; known: root"),
    ]
    with LMHandler(Echo("root")) as handler:
        for given, why in cases:
            with pytest.raises(ConfigurationError, match=why):
                handler.batch_completion(**given)
        assert handler.get_usage_summary().total_calls == 0


def test_ctrl_c_ends_all_calls_of_a_batch() -> None:
    code = """
import asyncio, os, signal
from rlm_broker import LMHandler

class Hanging:
    model_name = "hanging"
    begun = ended = 0
    async def complete(self, request):
        self.begun += 1
        if self.begun == 3:
            os.kill(os.getpid(), signal.SIGINT)
        try:
            await asyncio.Event().wait()
        finally:
            self.ended += 1

client = Hanging()
with LMHandler(client) as handler:
    try:
        handler.batch_completion(["x"] * 9, max_concurrent=3)
    except KeyboardInterrupt:
        print("interrupted", client.begun, client.ended)
"""
    done = python("-c", code)
    assert done.stdout == "interrupted 3 3\n", done.stderr


async def test_a_call_past_its_time_fails_and_is_cancelled() -> None:
    client = Hanging()
    async with LMHandler(client, call_timeout_s=0.05) as handler:
        with pytest.raises(ModelFailed, match=r"llm_query timed out after 0\.05s"):
            await handler.complete(client, LMRequest(()))
    assert client.cancelled.is_set()
