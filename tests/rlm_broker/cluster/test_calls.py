"""Calls of models of one run, over all of its attempts."""

import asyncio
from typing import Any

import pytest

from rlm_broker.cluster.calls import RunCalls
from rlm_broker.cluster.messages import Ask, Reply
from rlm_broker.errors import ModelFailed
from rlm_broker.journal.paid import PaidCalls
from rlm_broker.limits import Limits
from rlm_broker.run.lm_handler import LMHandler
from rlm_broker.run.prompts.instructions import Instructions
from rlm_broker.run.request import RunRequest
from rlm_broker.run.tools import Tools
from rlm_broker.usage import Usage
from tests.support.nodes import Gated
from tests.support.waiting import until


def run_calls(handler: LMHandler, limits: Limits | None = None, **more: Any) -> RunCalls:
    request = RunRequest(instructions=Instructions(), limits=limits or Limits(), tools=Tools(), **more)
    return RunCalls(request, handler, handler.routing, "tree")


def ask(text: str, call: int = 1, **more: Any) -> Ask:
    return Ask(1, call, "1", (("user", text),), 60.0, **more)


def untold(*_: object) -> None:
    """Hear of a further attempt."""


async def made(calls: Any, text: str, **more: Any) -> Reply:
    reply: Reply = await calls.answer(ask(text, **more), None, untold)
    return reply


async def test_the_usage_of_attempts_counts_once() -> None:
    """An answer from the attempt before is counted once. Calls that this one alone has paid stay in the usage."""
    calls = run_calls(LMHandler(Gated(lambda _: "yes")))
    first = calls.attempt()
    await made(first, "one")
    await made(first, "two", depth=1)
    await made(first, "three", depth=1)
    second = calls.attempt()
    await made(second, "one")
    assert calls.usage_by_depth() == {0: Usage(1, 10, 5, 0.25), 1: Usage(2, 20, 10, 0.5)}
    assert calls.usage_summary().total_cost == 0.75


async def test_calls_of_an_earlier_process_are_part_of_the_usage() -> None:
    """A batch that goes on brings the paid calls: their usage is that of the run, and none is sent again."""
    model = Gated(lambda _: "yes")
    handler = LMHandler(model)
    paid = PaidCalls()
    earlier = run_calls(handler, completing=paid.attempt)
    await made(earlier.attempt(), "one")
    later = run_calls(handler, completing=paid.attempt)
    await made(later.attempt(), "one")
    assert model.asked == ["one"]
    assert later.usage_summary().total_cost == 0.25
    assert later.charged == {}


async def test_an_abandoned_call_goes_on() -> None:
    """The next attempt joins a call that is under way; at the end of the run such calls end."""
    model = Gated(lambda _: "yes")
    model.held |= {"one": asyncio.Event(), "two": asyncio.Event()}
    calls = run_calls(LMHandler(model))
    first = calls.attempt()
    tasks = [asyncio.ensure_future(made(first, text)) for text in ("one", "two")]
    await until(lambda: len(model.asked) == 2)
    first.abandon()
    for task in tasks:
        task.cancel()
    await asyncio.wait(tasks)
    joined = asyncio.ensure_future(made(calls.attempt(), "one"))
    model.held["one"].set()
    assert (await joined).text == "yes"
    assert model.asked == ["one", "two"]
    await calls.aclose()
    assert model.cancelled == ["two"]


async def test_a_failure_crosses_with_its_cause() -> None:
    def fails(_: object) -> str:
        raise ModelFailed("too long", "request")

    reply = await made(run_calls(LMHandler(Gated(fails))).attempt(), "one")
    assert (reply.failure, reply.cause) == ("too long", "request")


@pytest.mark.parametrize("timeout_s", [1e9, 0.05])
async def test_a_call_takes_no_longer_than_the_run_allows(timeout_s: float) -> None:
    """The shorter one of the node's and the run's time holds."""
    model = Gated(lambda _: "yes")
    model.held["one"] = asyncio.Event()
    calls = run_calls(LMHandler(model), Limits(call_timeout_s=0.05 if timeout_s > 1 else 60))
    reply = await calls.attempt().answer(Ask(1, 1, "1", (("user", "one"),), timeout_s), None, untold)
    assert "0.05" in (reply.failure or "")


async def test_pieces_of_a_reply_are_told() -> None:
    """A reply that was paid before is told as one piece."""
    told: list[str] = []
    calls = run_calls(LMHandler(Gated(lambda _: "yes")))
    await made(calls.attempt(), "one")
    await calls.attempt().answer(ask("one"), told.append, untold)
    assert told == ["yes"]
