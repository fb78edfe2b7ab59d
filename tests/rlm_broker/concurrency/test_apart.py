"""Pieces of work that have a turn of the event loop each."""

import asyncio
from functools import partial

import pytest

from rlm_broker.concurrency.apart import Apart


async def test_no_two_pieces_share_a_turn() -> None:
    turn, apart = 0, Apart()
    done_in: list[int] = []

    async def count_turns() -> None:
        nonlocal turn
        while True:
            turn += 1
            await asyncio.sleep(0)

    counting = asyncio.create_task(count_turns())
    await asyncio.gather(*(apart.do(lambda: done_in.append(turn)) for _ in range(20)))
    counting.cancel()
    assert len(done_in) == len(set(done_in)) == 20


async def test_cancelled_piece_is_done_all_the_same() -> None:
    apart = Apart()
    done: list[int] = []
    tasks = [asyncio.create_task(apart.do(partial(done.append, number))) for number in range(3)]
    await asyncio.sleep(0)
    tasks[2].cancel()
    with pytest.raises(asyncio.CancelledError):
        await tasks[2]
    await asyncio.gather(*tasks[:2])
    assert sorted(done) == [0, 1, 2]
