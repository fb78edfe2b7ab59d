"""A log of events: the events that followers get, and those that a slow one misses."""

import asyncio

import pytest

from rlm_broker.events import log as logs
from rlm_broker.events.event import Event, EventsMissed, Replied
from rlm_broker.events.log import EVENT_CHARS, EventLog, text_chars


def event(n: int, text: str = "x") -> Replied:
    return Replied("1", 0, n, text, tree="t", n=n)


async def test_follower_reads_what_was_there_and_what_comes() -> None:
    log = EventLog()
    log.add(event(1))
    seen: list[Event] = []

    async def read() -> None:
        async for each in log.follow():
            seen.append(each)
            if each.n == 1:
                log.add(event(2))
                log.close()

    await read()
    assert [each.n for each in seen] == [1, 2]


async def test_slow_follower_gets_a_gap_for_dropped_events(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(logs, "MOST_CHARS", 3 * (EVENT_CHARS + text_chars(event(1, "x" * 10))))
    log = EventLog()
    for n in range(1, 11):
        log.add(event(n, "x" * 10))
    log.close()
    seen = [each async for each in log.follow()]
    assert isinstance(seen[0], EventsMissed)
    assert (seen[0].count, seen[0].n) == (7, 7)
    assert [each.n for each in seen[1:]] == [8, 9, 10]
    assert [each.n async for each in log.follow(8)] == [9, 10]


async def test_follower_that_waits_is_woken_by_the_end() -> None:
    log = EventLog()

    async def read() -> list[Event]:
        return [each async for each in log.follow()]

    waiting = asyncio.create_task(read())
    while not log._waiting:
        await asyncio.sleep(0)
    log.close()
    assert await waiting == []
    assert not log._waiting


async def test_event_above_the_bound_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(logs, "MOST_CHARS", 10)
    log = EventLog()
    log.add(event(1, "x" * 1_000))
    log.close()
    assert [each.n async for each in log.follow()] == [1]
