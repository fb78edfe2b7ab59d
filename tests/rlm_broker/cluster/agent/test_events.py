"""Events on their way: in order, in few messages, and dropped rather than waited for."""

import asyncio
import contextlib
from collections.abc import AsyncIterator

import msgspec
import pytest

from rlm_broker.cluster.agent import events as module
from rlm_broker.cluster.agent.events import EventSender
from rlm_broker.cluster.link import LinkLost
from rlm_broker.cluster.messages import MOST_EVENTS, Happened
from rlm_broker.events.event import BlockPrinted, Event
from tests.support.links import linked


def printed(number: int, text: str = "x") -> Event:
    return BlockPrinted("1", 0, 1, "stdout", text, tree="tree", n=number)


@contextlib.asynccontextmanager
async def sending() -> AsyncIterator[tuple[EventSender, list[list[tuple[str, int, int]]]]]:
    """A sender, and its messages as they arrive: of each event its name, its number, and how many it stands for."""
    got: list[list[tuple[str, int, int]]] = []
    async with linked() as (at_broker, at_agent):

        async def receive() -> None:
            async for message, _ in at_broker.receive():
                if isinstance(message, Happened):
                    events = [msgspec.json.decode(each) for each in message.events]
                    got.append([(event["event"], event["n"], event.get("count", 1)) for event in events])

        receiving = asyncio.create_task(receive())
        yield EventSender(at_agent, 1), got
        await at_agent.aclose()
        await receiving


async def test_events_arrive_in_order_and_batches() -> None:
    async with sending() as (sender, got):
        for number in range(1, 501):
            sender.add(printed(number))
        await sender.aclose()
    assert [number for message in got for _, number, _ in message] == [*range(1, 501)]
    assert len(got) < 10


async def test_no_message_has_more_events_than_allowed(monkeypatch: pytest.MonkeyPatch) -> None:
    """The orchestrator ends a link with more. An event that is too large alone is counted as missed."""
    monkeypatch.setattr("rlm_broker.cluster.events.EVENTS_BYTES", 300_000)
    monkeypatch.setattr(module, "BATCH_CHARS", 1 << 22)
    async with sending() as (sender, got):
        for number in range(1, 1_501):
            sender.add(printed(number))
        sender.add(printed(1_501, "x" * 400_000))
        await sender.aclose()
    assert max(map(len, got)) <= MOST_EVENTS
    assert got[-1][0][0] == "events_missed"
    assert sum(count for message in got for _, _, count in message) == 1_501


async def test_the_oldest_are_missed_if_the_link_is_slow(monkeypatch: pytest.MonkeyPatch) -> None:
    """Dropped events are counted, and the count stands in their place."""
    monkeypatch.setattr(module, "MOST_CHARS", 10_000)
    async with sending() as (sender, got):
        for number in range(1, 31):
            sender.add(printed(number, "x" * 1_000))
        await sender.aclose()
    events = [event for message in got for event in message]
    name, last, missed = events[0]
    assert (name, missed) == ("events_missed", last)
    assert [number for _, number, _ in events[1:]] == [*range(last + 1, 31)]


async def test_an_event_larger_than_a_message_is_missed(monkeypatch: pytest.MonkeyPatch) -> None:
    async with sending() as (sender, got):
        monkeypatch.setattr("rlm_broker.cluster.link.FRAME_BYTES", 2_000)
        sender.add(printed(1, "x" * 2_000))
        await sender.aclose()
        sender.add(printed(2))
        await sender.aclose()
    assert [event for message in got for event in message] == [("events_missed", 1, 1), ("block_printed", 2, 1)]


async def test_text_that_is_no_utf8_arrives() -> None:
    """A lone surrogate in printed text is written out."""
    async with sending() as (sender, got):
        sender.add(printed(1, "\ud800"))
        await sender.aclose()
    assert len(got) == 1


async def test_a_lost_link_is_told_at_the_end() -> None:
    """Adding never fails; closing says that the link is lost."""
    async with linked() as (at_broker, at_agent):
        sender = EventSender(at_agent, 1)
        at_broker.close()
        await at_agent.lost()
        for number in range(3):
            sender.add(printed(number))
        with pytest.raises(LinkLost):
            await sender.aclose()
