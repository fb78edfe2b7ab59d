"""The handler from Python: its life, its models, its calls."""

import asyncio
import json
import socket
import threading

import pytest

from rlm_broker.clients.base import LMRequest
from rlm_broker.errors import ConfigurationError, ModelFailed, UnknownModel
from rlm_broker.lm_handler import LMHandler
from rlm_broker.results import ChatMessage
from sandbox_worker.wire.frames import PREFIX, encode_frame
from tests.support.socket_peer import MAX_FRAME_BYTES, WAIT_S, Peer
from tests.support.stand_ins import Echo, Hanging


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
    assert handler.address is None
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(address)


def test_a_handler_that_was_stopped_may_be_started_again_and_serves() -> None:
    handler = LMHandler(Echo("root"), one_shot=True)
    handler.start()
    handler.stop()
    with socket.create_connection(handler.start()) as caller:
        assert answer_to(caller, "again") == "ok again"
    handler.stop()


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


def test_both_kinds_of_with_close_the_port() -> None:
    async def address_inside() -> tuple[str, int] | None:
        async with LMHandler(Echo("root")) as handler:
            return handler.address

    with LMHandler(Echo("root")) as handler:
        plain = handler.address
    for address in (plain, asyncio.run(address_inside())):
        assert address is not None
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection(address)


async def test_attach_serves_a_socket_that_is_connected_already() -> None:
    ours, theirs = socket.socketpair()
    async with LMHandler(Echo("root"), one_shot=True) as handler:
        await handler.listener.attach(theirs)
        async with Peer(*await asyncio.open_connection(sock=ours)) as peer:
            assert (await peer.ask({"prompt": "hello"}))["chat_completion"]["response"] == "ok hello"


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


def test_registered_clients_are_found_by_name_and_unknown_names_are_refused() -> None:
    handler = LMHandler(Echo("root"), other_backend_client=Echo("sub"))
    extra = Echo("extra")
    handler.register_client("fast", extra)
    assert handler.get_client("fast") is extra
    assert handler.get_client(depth=0).model_name == "root"
    assert [handler.get_client(depth=depth).model_name for depth in (1, 2, 5)] == ["sub"] * 3
    with pytest.raises(UnknownModel, match="no client for model 'nope'; known: root, sub, fast"):
        handler.get_client("nope")


async def test_a_call_names_the_model_that_served_and_the_one_that_was_asked_for() -> None:
    client = Echo("root")
    async with LMHandler(client) as handler:
        handler.register_client("fast", client)
        for asked, reported in ((None, None), ("root", None), ("fast", "fast")):
            call = await handler.complete(client, LMRequest((ChatMessage("user", "x"),), model=asked))
            assert (call.root_model, call.requested_model) == ("root", reported)


async def test_a_call_past_its_time_fails_and_is_cancelled() -> None:
    client = Hanging()
    async with LMHandler(client, call_timeout_s=0.05) as handler:
        with pytest.raises(ModelFailed, match=r"llm_query timed out after 0\.05s"):
            await handler.complete(client, LMRequest(()))
    assert client.cancelled.is_set()


async def test_a_call_that_is_cancelled_from_outside_ends_at_the_provider_and_is_no_failure() -> None:
    client = Hanging()
    async with LMHandler(client) as handler:
        call = asyncio.create_task(handler.complete(client, LMRequest(())))
        await asyncio.wait_for(client.asked.wait(), WAIT_S)
        call.cancel()
        with pytest.raises(asyncio.CancelledError):
            await call
    assert client.cancelled.is_set()


def test_a_port_beyond_loopback_is_refused_unless_the_risk_is_named() -> None:
    with pytest.raises(ConfigurationError, match=r"refusing to listen on 0\.0\.0\.0"):
        LMHandler(Echo("root"), host="0.0.0.0")
    with LMHandler(Echo("root"), host="0.0.0.0", insecure_bind=True) as handler:
        assert handler.port
