"""The scripted client: its replies in order, its usage and its failures."""

import asyncio

import pytest

from rlm_broker.broker.clients.base import LMReply, LMRequest
from rlm_broker.broker.clients.script import ScriptedClient
from rlm_broker.errors import ConfigurationError, ModelFailed
from rlm_broker.results import ChatMessage
from rlm_broker.usage import Usage


def request(text: str = "one two three") -> LMRequest:
    return LMRequest((ChatMessage("system", "be brief"), ChatMessage("user", text)))


async def test_replies_come_in_order_with_their_words_as_tokens() -> None:
    client = ScriptedClient(["a b", "c"], cost_per_call=0.25)
    assert await client.complete(request()) == LMReply("a b", Usage(1, 5, 2, 0.25))
    assert await client.complete(request("x")) == LMReply("c", Usage(1, 3, 1, 0.25))
    assert client.requests == [request(), request("x")]


async def test_only_words_in_content_parts_count() -> None:
    parts = [{"type": "text", "text": "four words are here"}, {"type": "image_url", "image_url": {}}, "odd"]
    reply = await ScriptedClient([""]).complete(LMRequest((ChatMessage("user", parts),)))
    assert reply.usage == Usage(1, 4, 0, None)


@pytest.mark.parametrize(("replies", "counted"), [([], "0 replies"), (["a"], "1 reply")])
async def test_script_that_ran_out_tells_its_length(replies: list[str], counted: str) -> None:
    client = ScriptedClient(replies, "actor")
    for _ in replies:
        await client.complete(request())
    with pytest.raises(ModelFailed, match=rf"^actor: call {len(replies) + 1} of a script with {counted}$"):
        await client.complete(request())
    assert len(client.requests) == len(replies) + 1


async def test_an_exception_in_the_script_fails_that_call_only() -> None:
    client = ScriptedClient([ValueError("boom"), ModelFailed("as it is"), "fine"])
    with pytest.raises(ModelFailed, match=r"^scripted: ValueError: boom$"):
        await client.complete(request())
    with pytest.raises(ModelFailed, match=r"^as it is$"):
        await client.complete(request())
    assert (await client.complete(request())).text == "fine"


async def test_function_sees_the_request_and_may_fail() -> None:
    client = ScriptedClient(lambda asked: str(asked.messages[-1].content).upper())
    assert (await client.complete(request("loud"))).text == "LOUD"
    with pytest.raises(ModelFailed, match=r"^scripted: ZeroDivisionError: division by zero$"):
        await ScriptedClient(lambda _: str(1 / 0)).complete(request())


async def test_concurrent_calls_take_replies_in_order() -> None:
    client = ScriptedClient([str(number) for number in range(20)], delay_s=0.001)
    replies = await asyncio.gather(*(client.complete(request()) for _ in range(20)))
    assert [reply.text for reply in replies] == [str(number) for number in range(20)]


def test_bare_string_is_no_script_of_letters() -> None:
    with pytest.raises(ConfigurationError, match="list"):
        ScriptedClient("abc")
