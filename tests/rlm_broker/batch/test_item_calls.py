"""The calls of an item: none that was answered is paid twice."""

import asyncio
from typing import Any

import pytest

from rlm_broker.batch.item_calls import ItemCalls, Turns
from rlm_broker.batch.journal import AnsweredCall
from rlm_broker.broker.clients.base import CallId
from rlm_broker.errors import ModelFailed
from rlm_broker.results import Call, ChatMessage
from rlm_broker.usage import Usage
from tests.support.paying import CLIENT, Provider, request
from tests.support.waiting import until


@pytest.fixture
async def provider() -> Provider:
    return Provider()


async def asked(calls: ItemCalls, provider: Provider, *texts: str) -> list[str]:
    run = calls.before(provider)
    return [(await run.complete(CLIENT, request(text))).response for text in texts]


async def test_further_process_pays_no_answered_call_again(provider: Provider) -> None:
    """Equal requests have their answers in their order, and only a call beyond those is sent."""
    provider.answers.set()
    kept: list[AnsweredCall] = []

    async def keep(call: AnsweredCall) -> None:
        kept.append(call)

    first = ItemCalls(keep=keep)
    assert await asked(first, provider, *"aab") == ["a 1", "a 2", "b 3"]
    assert (first.replayed, first.summary.total) == (Usage(), Usage(3, 30, 3, 1.5))
    again = ItemCalls(kept, keep)
    assert await asked(again, provider, *"abaa") == ["a 1", "b 3", "a 2", "a 4"]
    assert provider.asked == ["a", "a", "b", "a"]
    assert again.replayed == Usage(3, 30, 3, 1.5)
    assert again.by_depth == {0: Usage(4, 40, 4, 2.0)}
    assert len(kept) == 4


async def test_requests_and_samples_that_differ_are_other_calls(provider: Provider) -> None:
    provider.answers.set()
    kept: list[AnsweredCall] = []

    async def keep(call: AnsweredCall) -> None:
        kept.append(call)

    others: tuple[dict[str, Any], ...] = ({}, {"sample": 1}, {"model": "x"}, {"depth": 1}, {"temperature": 0.5})
    for sample in (0, 1):
        for more in others:
            await ItemCalls(kept, keep, sample).before(provider).complete(CLIENT, request("a", **more))
    assert len(provider.asked) == len({call.key for call in kept}) == 2 * len(others)
    assert [call.depth for call in kept[:5]] == [0, 0, 0, 1, 0]


async def test_answer_waits_until_it_is_written_down(provider: Provider) -> None:
    disk, written = asyncio.Event(), list[AnsweredCall]()

    async def keep(call: AnsweredCall) -> None:
        written.append(call)
        await disk.wait()

    provider.answers.set()
    waiting = asyncio.ensure_future(asked(ItemCalls(keep=keep), provider, "a"))
    await until(lambda: written)
    assert not waiting.done()
    disk.set()
    assert await waiting == ["a 1"]


async def test_cancelled_or_failed_call_is_asked_again(provider: Provider) -> None:
    calls = ItemCalls()
    waiting = asyncio.ensure_future(asked(calls, provider, "a"))
    await until(lambda: provider.asked)
    waiting.cancel()
    await asyncio.wait({waiting})
    assert (waiting.cancelled(), provider.cancelled) == (True, ["a"])
    provider.error = ModelFailed("no")
    provider.answers.set()
    with pytest.raises(ModelFailed):
        await asked(calls, provider, "a")
    provider.error = None
    assert await asked(calls, provider, "a") == ["a 3"]


async def test_turns_are_those_of_loops_and_plain_completions(provider: Provider) -> None:
    provider.answers.set()
    runs: dict[str, Turns] = {}
    calls = ItemCalls(turns=runs).before(provider)
    for run, block, is_loop in (("1", 0, False), ("1.1", 2, True), ("1", 1, False)):
        await calls.complete(CLIENT, request("a", id=CallId(run, block, 1), is_loop=is_loop, depth=run.count(".")))
    assert {run: (each.depth, len(each.answers)) for run, each in runs.items()} == {"1": (0, 1), "1.1": (1, 1)}


def test_conversation_that_was_summarised_keeps_what_was_before() -> None:
    def said(*texts: str) -> tuple[ChatMessage, ...]:
        return tuple(ChatMessage("user", text) for text in texts)

    made = Turns(1)
    for texts, answer in ((("s", "q"), "1"), (("s", "q", "1", "o"), "2"), (("s", "summary"), "3")):
        asking = request("")
        asking = type(asking)(said(*texts))
        made.add(asking, Call("m", answer, Usage(), 0.0))
    assert [message.content for message in made.messages] == ["s", "q", "1", "o", "2", "s", "summary", "3"]
    assert [answer.response for answer in made.answers] == ["1", "2", "3"]
