"""`Allowance`: parts of an amount, order of arrival, and cancelled holders."""

import asyncio
import random

import pytest

from rlm_broker.concurrency.allowance import Allowance

WAIT_S = 60


class Holders:
    """Tasks that hold parts of one allowance until the test releases them."""

    def __init__(self, amount: int) -> None:
        self.allowance = Allowance(amount)
        self.held = 0
        self.most = 0

    async def hold(self, part: int, until: asyncio.Event) -> None:
        async with self.allowance.held(part):
            self.held += part
            self.most = max(self.most, self.held)
            try:
                await until.wait()
            finally:
                self.held -= part


async def _settled() -> None:
    for _ in range(5):
        await asyncio.sleep(0)


async def test_parts_beyond_the_amount_wait_in_order() -> None:
    holders, first, rest = Holders(10), asyncio.Event(), asyncio.Event()
    tasks = [asyncio.create_task(holders.hold(part, until)) for part, until in ((6, first), (6, rest), (1, rest))]
    await _settled()
    assert holders.held == 6  # the small one does not overtake the large one
    first.set()
    await _settled()
    assert holders.held == 7
    rest.set()
    await asyncio.wait_for(asyncio.gather(*tasks), WAIT_S)


async def test_part_larger_than_the_amount_is_held_alone() -> None:
    holders, until = Holders(10), asyncio.Event()
    large = asyncio.create_task(holders.hold(1000, until))
    small = asyncio.create_task(holders.hold(1, until))
    await _settled()
    assert holders.held == 1000
    until.set()
    await asyncio.wait_for(asyncio.gather(large, small), WAIT_S)
    assert holders.most == 1000


@pytest.mark.parametrize("seed", range(20))
async def test_cancelled_holders_and_waiters_lose_nothing(seed: int) -> None:
    chance, holders, until = random.Random(seed), Holders(10), asyncio.Event()
    tasks = [asyncio.create_task(holders.hold(chance.randrange(1, 8), until)) for _ in range(12)]
    for _ in range(6):
        for task in tasks:
            if chance.random() < 0.2:
                task.cancel()
        await asyncio.sleep(0)
    until.set()
    await asyncio.wait(tasks, timeout=WAIT_S)
    assert all(task.done() for task in tasks)
    assert holders.most <= 10
    async with asyncio.timeout(WAIT_S), holders.allowance.held(10):
        pass
