"""Responses that are kept, their events for many followers, and REPLs that live on between them."""

import asyncio
import contextlib
import json
import weakref
from collections.abc import AsyncIterator
from typing import Any

import pytest

from rlm_broker import RLM, ScriptedClient
from rlm_broker.serve.errors import ApiError
from rlm_broker.serve.hosting.owner import Owner
from rlm_broker.serve.hosting.repls import HeldRepls
from rlm_broker.serve.responses import store
from rlm_broker.serve.responses.bodies import Resource
from rlm_broker.serve.responses.store import LastingRepl, Made, ResponseEvents, Responses

ALICE, BOB = Owner("alice"), Owner("bob")


class _Run:
    """A stand-in for a run: the store does not look at it."""


def made(number: int, *, given_bytes: int = 0) -> Made:
    run: Any = weakref.ref(_Run())
    item = {"id": f"msg_{number}o0001"}
    resource = Resource(f"resp_{number}", "m", {}, output=[item])
    return Made(ALICE, resource, ResponseEvents(), run, (), (), given_bytes, True)


async def test_response_and_its_items_are_known_to_their_owner_alone() -> None:
    responses = Responses(keep_s=60)
    responses.add(made(1))
    assert responses.get(ALICE, "resp_1").resource.id == "resp_1"
    assert responses.item(ALICE, "msg_1o0001", "input.0.id") == {"id": "msg_1o0001"}
    for owner, id in ((BOB, "resp_1"), (ALICE, "resp_2")):
        with pytest.raises(ApiError, match="there is no response") as refused:
            responses.get(owner, id, "response_id")
        assert (refused.value.status, refused.value.param) == (404, "response_id")
    for owner, id in ((BOB, "msg_1o0001"), (ALICE, "msg_1o0002"), (ALICE, "x")):
        with pytest.raises(ApiError, match="there is no item"):
            responses.item(owner, id, "input.0.id")


async def test_ended_responses_make_room(monkeypatch: pytest.MonkeyPatch) -> None:
    """Beyond their number and their bytes the oldest go; those that go on stay."""
    monkeypatch.setattr(store, "MOST_KEPT", 2)
    monkeypatch.setattr(store, "MOST_KEPT_BYTES", 100)
    responses, every = Responses(keep_s=60), [made(number, given_bytes=10) for number in range(4)]
    every.append(made(4, given_bytes=95))
    for one in every:
        responses.add(one)
    for one in every[1:]:
        responses.end(one)
    kept = []
    for one in every:
        with contextlib.suppress(ApiError):
            kept.append(responses.get(ALICE, one.resource.id))
    assert kept == [every[0], every[4]]
    responses.forget(every[4])
    with pytest.raises(ApiError):
        responses.get(ALICE, "resp_4")


async def test_made_waits_for_its_repl() -> None:
    one = made(1)
    await one.returned()
    given_back = asyncio.Event()
    one.returning = asyncio.create_task(_waited(given_back))
    waiting = asyncio.create_task(one.returned())
    await asyncio.sleep(0)
    assert not waiting.done()
    given_back.set()
    await waiting


async def _waited(event: asyncio.Event) -> None:
    await event.wait()


# -- events ----------------------------------------------------------------------------------------------------------


async def numbers(journal: ResponseEvents, after: int = -1) -> list[int]:
    lines = [event.split(b"data: ")[1] async for event in journal.follow(after)]
    return [json.loads(line)["sequence_number"] for line in lines]


async def test_journal_is_the_same_for_all_followers() -> None:
    """A follower gets all events, whether it comes before them, among them, or after the end."""
    journal = ResponseEvents()
    early = asyncio.ensure_future(numbers(journal))
    await asyncio.sleep(0)
    journal.add("a", {})
    journal.add("b", {"x": 1})
    amid = asyncio.ensure_future(numbers(journal))
    await asyncio.sleep(0)
    journal.add("c", {})
    journal.close()
    assert await early == await amid == await numbers(journal) == [0, 1, 2]
    assert await numbers(journal, after=1) == [2]
    assert await numbers(journal, after=2) == []


async def test_journal_says_which_events_were_dropped() -> None:
    journal = ResponseEvents(most_bytes=1_000)
    for number in range(100):
        journal.add("a", {"text": "x" * 50, "number": number})
    journal.close()
    assert journal.bytes <= 1_000
    with pytest.raises(ApiError, match="start after 9") as refused:
        journal.require(-1)
    assert refused.value.status == 410
    first = 100 - len(journal.events())
    assert await numbers(journal, after=first - 1) == list(range(first, 100))


async def test_journal_tells_a_slow_follower_what_it_missed() -> None:
    journal = ResponseEvents(most_bytes=1_000)
    journal.add("a", {})
    following = aiter(journal.follow())
    await anext(following)
    for _ in range(100):
        journal.add("a", {"text": "x" * 50})
    with pytest.raises(ApiError, match="were dropped"):
        await anext(following)


async def test_journal_refuses_a_number_to_come() -> None:
    journal = ResponseEvents()
    journal.add("a", {})
    journal.require(0)
    with pytest.raises(ApiError, match="no event 7 yet"):
        journal.require(7)


async def test_journal_forgets_a_follower_that_left() -> None:
    journal = ResponseEvents()
    following = asyncio.ensure_future(numbers(journal))
    await asyncio.sleep(0)
    following.cancel()
    await asyncio.wait({following})
    assert not journal._waiting


# -- REPLs -----------------------------------------------------------------------------------------------------------


@pytest.fixture
async def rlm() -> AsyncIterator[RLM]:
    async with RLM(ScriptedClient(lambda _: "```repl\nFINAL(1)\n```")) as it:
        yield it


async def used(rlm: RLM, repls: HeldRepls) -> LastingRepl:
    """A REPL that one run has had."""
    repl = LastingRepl(rlm, repls, ALICE, 60)
    async with repl.lent():
        run = rlm.start("c", "?", repl=repl.persistent)
        repl.run = run.id
        await run
    return repl


async def test_repl_is_a_container_between_runs(rlm: RLM) -> None:
    async with HeldRepls() as repls:
        repl = await used(rlm, repls)
        assert repl.is_held
        assert repls.get(ALICE, repl.id).run == repl.run
        async with repl.lent():
            assert repls.get(ALICE, repl.id).users == 1
            await rlm.start("d", "?", repl=repl.persistent)
        await repl.close()
        assert not repl.is_held
        await repl.close()


async def test_oldest_repl_makes_room(rlm: RLM, monkeypatch: pytest.MonkeyPatch) -> None:
    """REPLs of responses displace each other, and no container that the owner has made itself."""
    monkeypatch.setattr(store, "MOST_IDLE", 2)
    async with HeldRepls() as repls, contextlib.AsyncExitStack() as stack:
        own = await stack.enter_async_context(rlm.sandbox.repl("mine"))
        held = repls.hold(ALICE, own, own.aclose)
        lived = [await used(rlm, repls) for _ in range(3)]
        assert [repl.is_held for repl in lived] == [False, True, True]
        assert repls.get(ALICE, held.id) is held


async def test_repl_that_was_never_opened_is_not_held(rlm: RLM) -> None:
    async with HeldRepls() as repls:
        repl = LastingRepl(rlm, repls, ALICE, 60)
        async with repl.lent():
            pass
        assert not repl.is_held
        assert not len(repls)
