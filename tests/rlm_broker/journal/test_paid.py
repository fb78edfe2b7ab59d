"""Paid calls of a question: none is paid twice by a further attempt."""

import asyncio
import gc
from typing import Any

import pytest

from rlm_broker.errors import ModelFailed
from rlm_broker.journal.paid import PaidCall, PaidCalls
from rlm_broker.usage import Usage
from tests.support.paying import CLIENT, Provider, request
from tests.support.waiting import turns, until


@pytest.fixture
async def provider() -> Provider:
    return Provider()


async def test_further_attempt_pays_no_answered_call_again(provider: Provider) -> None:
    """Equal requests have their answers in their order, and only a call beyond those is sent."""
    provider.answers.set()
    paid = PaidCalls()
    first = await asked(paid, provider, *"aab")
    again = await asked(paid, provider, *"abaa")
    assert first == ["a 1", "a 2", "b 3"]
    assert again == ["a 1", "b 3", "a 2", "a 4"]
    assert provider.asked == ["a", "a", "b", "a"]
    assert paid.summary.total == Usage(4, 40, 4, 2.0)
    assert paid.by_depth == {0: Usage(4, 40, 4, 2.0)}
    assert paid.replayed.usage == Usage(3, 30, 3, 1.5)


async def asked(paid: PaidCalls, provider: Provider, *texts: str) -> list[str]:
    attempt = paid.attempt(provider)
    return [(await attempt.complete(CLIENT, request(text))).response for text in texts]


async def test_requests_that_differ_are_other_calls(provider: Provider) -> None:
    provider.answers.set()
    attempt = PaidCalls().attempt(provider)
    others: tuple[dict[str, Any], ...] = ({}, {"sample": 1}, {"model": "x"}, {"depth": 1}, {"temperature": 0.5})
    paid = PaidCalls()
    for more in others:
        await paid.attempt(provider).complete(CLIENT, request("a", **more))
    assert len(provider.asked) == len(others)
    assert attempt.routing is provider.routing


async def test_call_under_way_is_joined_by_the_next_attempt(provider: Provider) -> None:
    paid = PaidCalls()
    texts: list[str] = []
    lost = paid.attempt(provider)
    before: list[str] = []
    waiting = asyncio.ensure_future(lost.complete(CLIENT, request("a", on_text=before.append)))
    await until(lambda: provider.asked)
    lost.abandon()
    waiting.cancel()
    await asyncio.wait({waiting})
    assert waiting.cancelled()
    joining = asyncio.ensure_future(paid.attempt(provider).complete(CLIENT, request("a", on_text=texts.append)))
    await turns()
    provider.answers.set()
    assert (await joining).response == "a 1"
    assert provider.asked == ["a"]
    assert (before, texts) == ([], ["a 1"])
    assert paid.summary.total.total_calls == 1


async def test_answer_that_came_between_attempts_is_taken_once(provider: Provider) -> None:
    """A second call with that request is another call: it does not get the same answer."""
    paid = PaidCalls()
    lost = paid.attempt(provider)
    waiting = asyncio.ensure_future(lost.complete(CLIENT, request("a")))
    await until(lambda: provider.asked)
    lost.abandon()
    waiting.cancel()
    provider.answers.set()
    await until(lambda: paid.summary.total.total_calls)
    assert await asked(paid, provider, "a", "a") == ["a 1", "a 2"]


async def test_cancelled_call_ends_at_the_provider(provider: Provider) -> None:
    waiting = asyncio.ensure_future(PaidCalls().attempt(provider).complete(CLIENT, request("a")))
    await until(lambda: provider.asked)
    waiting.cancel()
    await asyncio.wait({waiting})
    assert provider.cancelled == ["a"]


async def test_abandoned_calls_end_with_their_question(provider: Provider) -> None:
    paid = PaidCalls()
    attempt = paid.attempt(provider)
    waiting = [asyncio.ensure_future(attempt.complete(CLIENT, request(text))) for text in "ab"]
    await until(lambda: len(provider.asked) == 2)
    attempt.abandon()
    for task in waiting:
        task.cancel()
    await asyncio.wait(waiting)
    assert provider.cancelled == []
    await paid.aclose()
    assert sorted(provider.cancelled) == ["a", "b"]


async def test_failed_call_is_asked_again_and_never_reported(
    provider: Provider, caplog: pytest.LogCaptureFixture
) -> None:
    """asyncio would report an error that no task has read, also of a call that was abandoned."""
    paid = PaidCalls()
    attempt = paid.attempt(provider)
    waiting = asyncio.ensure_future(attempt.complete(CLIENT, request("a")))
    await until(lambda: provider.asked)
    attempt.abandon()
    waiting.cancel()
    provider.error = ModelFailed("no")
    provider.answers.set()
    await asyncio.wait({waiting})
    await turns()
    with pytest.raises(ModelFailed):
        await asked(paid, provider, "a")
    provider.error = None
    assert await asked(paid, provider, "a") == ["a 3"]
    gc.collect()
    assert caplog.text == ""


async def test_answer_waits_until_it_is_written_down(provider: Provider) -> None:
    written: list[PaidCall] = []
    disk = asyncio.Event()

    async def keep(paid: PaidCall) -> None:
        written.append(paid)
        await disk.wait()

    provider.answers.set()
    waiting = asyncio.ensure_future(PaidCalls(keep=keep).attempt(provider).complete(CLIENT, request("a", depth=2)))
    await until(lambda: written)
    assert not waiting.done()
    disk.set()
    assert (await waiting).response == "a 1"
    assert written[0].depth == 2
