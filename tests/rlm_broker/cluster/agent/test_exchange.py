"""Requests of a run and their answers, over a real link."""

import asyncio
import contextlib
from collections.abc import AsyncIterator
from typing import Any

import pytest

from rlm_broker.cluster.agent.exchange import Exchange
from rlm_broker.cluster.link import Link, LinkLost
from rlm_broker.cluster.messages import FromAgent, Judge, Judged, Leave, Reply, ReplyText, ToolReply, UseTool
from rlm_broker.errors import ProtocolViolation
from tests.support.links import linked


@contextlib.asynccontextmanager
async def exchanging() -> AsyncIterator[tuple[Exchange, Link[FromAgent], Any]]:
    """An exchange, the orchestrator's link, and the messages that this one gets."""
    async with linked() as (at_broker, at_agent):
        exchange = Exchange(at_agent, 7)
        messages = at_broker.receive()

        async def received() -> object:
            while True:
                message, _ = await anext(messages)
                if message.__struct_config__.tag != "load":
                    return message

        yield exchange, at_broker, received


async def test_each_request_gets_its_own_answer() -> None:
    """Answers may come in any order; one that no request waits for is dropped."""
    async with exchanging() as (exchange, _, received):
        first, second = (
            asyncio.create_task(exchange.asked(Judge(7, exchange.number(), text), Judged)) for text in ("a", "b")
        )
        assert [await received(), await received()] == [Judge(7, 1, "a"), Judge(7, 2, "b")]
        for answer in (Judged(7, 2, "no"), Judged(7, 2, "late"), Judged(7, 9), Judged(7, 1)):
            exchange.take(answer)
        assert (await first, await second) == (Judged(7, 1), Judged(7, 2, "no"))
        exchange.take(Judged(7, 1, "late"))


async def test_a_cancelled_request_is_left() -> None:
    """The orchestrator learns that the caller waits no more, and pieces of an answer reach no caller."""
    told: list[object] = []
    async with exchanging() as (exchange, _, received):
        task = asyncio.create_task(exchange.asked(Judge(7, exchange.number(), "a"), Judged, told.append))
        await received()
        exchange.take(ReplyText(7, 1, "x"))
        task.cancel()
        assert await received() == Leave(7, 1)
        exchange.take(ReplyText(7, 1, "y"))
        with pytest.raises(asyncio.CancelledError):
            await task
    assert told == [ReplyText(7, 1, "x")]


async def test_an_answer_of_another_class_is_refused() -> None:
    async with exchanging() as (exchange, _, received):
        task = asyncio.create_task(exchange.asked(UseTool(7, exchange.number(), "f", "{}", 1.0), ToolReply))
        await received()
        exchange.take(Reply(7, 1))
        with pytest.raises(ProtocolViolation, match="answered UseTool with Reply"):
            await task


async def test_a_lost_link_fails_requests() -> None:
    async with exchanging() as (exchange, at_broker, _):
        at_broker.close()
        await exchange._link.lost()
        with pytest.raises(LinkLost):
            await exchange.asked(Judge(7, exchange.number(), "a"), Judged)
