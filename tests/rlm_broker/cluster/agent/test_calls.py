"""Calls of models that a node makes by its orchestrator."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable
from typing import Any

import pytest

from rlm_broker.broker.clients.base import CallId, LMRequest
from rlm_broker.broker.routing import Routing
from rlm_broker.cluster.agent.calls import RemoteCalls
from rlm_broker.cluster.agent.exchange import Exchange
from rlm_broker.cluster.agent.models import RemoteModel
from rlm_broker.cluster.messages import Ask, ModelSpec, Reply, ReplyText, Retried
from rlm_broker.errors import ModelFailed, UnknownModel
from rlm_broker.results import Call, ChatMessage
from rlm_broker.usage import Usage
from tests.support.links import linked

MODEL = RemoteModel(ModelSpec("gpt"))


@contextlib.asynccontextmanager
async def calling(*answers: Callable[[Ask], Any]) -> AsyncIterator[tuple[RemoteCalls, list[Ask]]]:
    """Calls whose orchestrator answers each of them with these messages; and what it was asked."""
    asked: list[Ask] = []
    async with linked() as (at_broker, at_agent):
        exchange = Exchange(at_agent, 3)

        async def answer() -> None:
            async for message, _ in at_broker.receive():
                if isinstance(message, Ask):
                    asked.append(message)
                    for make in answers:
                        at_broker.post(make(message))

        async def take() -> None:
            async for message, _ in at_agent.receive():
                exchange.take(message)  # type: ignore[arg-type]

        tasks = [asyncio.create_task(answer()), asyncio.create_task(take())]
        yield RemoteCalls(exchange, Routing(MODEL)), asked
        at_broker.close()
        await asyncio.wait(tasks)


def request(**fields: Any) -> LMRequest:
    return LMRequest((ChatMessage("user", "Who?"),), **fields)


async def test_all_of_a_request_is_sent() -> None:
    """The orchestrator can make the same request of it; the session is the run that asks."""
    messages = (ChatMessage("system", "You are."), ChatMessage("user", [{"type": "text", "text": "Who?"}]))
    given = LMRequest(messages, "gpt", 9, 2, "q", True, 1, None, CallId("1.2", 3, 4), True, 0.5)
    async with calling(lambda ask: Reply(3, ask.call, "gpt", "Ada")) as (calls, asked):
        await calls.complete(MODEL, given, 7.0, session=(1, "1.2"))
    sent = (("system", "You are."), ("user", [{"type": "text", "text": "Who?"}]))
    assert asked == [Ask(3, 1, "1.2", sent, 7.0, "gpt", 9, 2, "q", True, 1, CallId("1.2", 3, 4), True, 0.5, False)]


async def test_an_answer_has_its_usage_and_its_notes() -> None:
    async with calling(lambda ask: Reply(3, ask.call, "gpt-5", "", (1, 20, 3, 0.5), 1, 7, "gpt", "empty")) as (
        calls,
        _,
    ):
        call = await calls.complete(MODEL, request())
    assert call == Call("gpt-5", "", Usage(1, 20, 3, 0.5, 1, 7), call.execution_time, "gpt", "empty")


async def test_pieces_and_retries_are_told() -> None:
    """They reach the run before the answer, in their order."""
    told: list[object] = []
    answers = (
        lambda ask: Retried(3, ask.call, 2, 0.5, "busy"),
        lambda ask: ReplyText(3, ask.call, "A"),
        lambda ask: ReplyText(3, ask.call, "da"),
        lambda ask: Reply(3, ask.call, "gpt", "Ada"),
    )
    async with calling(*answers) as (calls, asked):
        await calls.complete(MODEL, request(on_text=told.append), on_retry=lambda *retry: told.append(retry))
        assert told == [(2, 0.5, "busy"), "A", "da"]
        assert asked[0].wants_text
        await calls.complete(MODEL, request())  # what no one wants to be told has no effect


@pytest.mark.parametrize("cause", ["transient", "request", "provider"])
async def test_a_failure_keeps_its_cause(cause: Any) -> None:
    async with calling(lambda ask: Reply(3, ask.call, failure="no luck", cause=cause)) as (calls, _):
        with pytest.raises(ModelFailed, match="no luck") as raised:
            await calls.complete(MODEL, request())
    assert raised.value.cause == cause


async def test_a_name_that_the_orchestrator_refuses() -> None:
    async with calling(lambda ask: Reply(3, ask.call, failure="no x here", cause="unknown_model")) as (calls, _):
        with pytest.raises(UnknownModel, match="no x here"):
            await calls.complete(MODEL, request(model="x"))


async def test_a_prompt_larger_than_a_message_is_refused() -> None:
    """The call fails as a request that no model takes, and the link stays."""
    async with calling(lambda ask: Reply(3, ask.call, "gpt", "Ada")) as (calls, asked):
        with pytest.raises(ModelFailed, match="cannot be sent to gpt") as raised:
            await calls.complete(MODEL, LMRequest((ChatMessage("user", "x" * (65 << 20)),)))
        assert (raised.value.cause, asked) == ("request", [])
        assert (await calls.complete(MODEL, request())).response == "Ada"
