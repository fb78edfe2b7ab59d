"""Places for work: bounded, fair to owners, and given back when work is cancelled."""

import asyncio

import pytest

from rlm_broker.serve.hosting.owner import Busy, Owner, Places
from tests.support.waiting import turns

ALICE, BOB = Owner("alice"), Owner("bob")


async def test_owners_take_turns_and_queue_is_bounded() -> None:
    places, order, may_end = Places(1, 3), list[str](), asyncio.Event()

    async def work(owner: Owner) -> None:
        async with places.place(owner):
            await may_end.wait()
            order.append(owner.name)

    working = []
    for owner in (ALICE, ALICE, ALICE, BOB):
        working.append(asyncio.create_task(work(owner)))
        await turns()
    with pytest.raises(Busy, match="3 wait"):
        await work(BOB)
    may_end.set()
    await asyncio.gather(*working)
    assert order == ["alice", "alice", "bob", "alice"]


async def test_cancelled_work_gives_its_place_back() -> None:
    places, began = Places(1, 1), asyncio.Event()

    async def work() -> None:
        async with places.place(ALICE):
            began.set()
            await asyncio.Event().wait()

    working = asyncio.create_task(work())
    await began.wait()
    waiting = asyncio.create_task(work())
    await turns()
    for task in (waiting, working):
        task.cancel()
    await asyncio.wait({waiting, working})
    async with places.place(BOB):
        pass
