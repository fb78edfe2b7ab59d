"""The feeding of a batch: lazy, in a thread, and with each id once."""

import asyncio
import threading
from collections.abc import AsyncIterator, Iterator
from contextlib import aclosing
from typing import Any

import pytest

from rlm_broker.batch.feed import MOST_AHEAD, Feeding, digest_of, require_items, total_of
from rlm_broker.batch.items import BatchItem
from rlm_broker.batch.journal import key_of
from rlm_broker.errors import ConfigurationError
from tests.support.waiting import turns, until


def item(number: int) -> dict[str, Any]:
    return {"id": f"{number}", "context": "c"}


async def fed_ids(items: Any, known: dict[bytes, bytes] | None = None) -> tuple[list[str], int]:
    skipped: list[int] = []
    feeding = Feeding(items, {} if known is None else known, skipped.append)
    return [fed.item.id async for fed in feeding.fed()], sum(skipped)


async def test_iterables_of_all_kinds_are_fed_in_order() -> None:
    async def slowly() -> AsyncIterator[dict[str, Any]]:
        for number in range(5):
            yield item(number)

    wanted = [f"{number}" for number in range(5)]
    assert await fed_ids(slowly()) == (wanted, 0)
    assert await fed_ids(item(number) for number in range(5)) == (wanted, 0)
    assert await fed_ids([item(number) for number in range(300)]) == ([f"{number}" for number in range(300)], 0)
    assert total_of([item(1), item(2)]) == 2
    assert total_of(iter([item(1)])) is None


async def test_feeding_is_no_further_ahead_than_one_step() -> None:
    pulled: list[int] = []

    def items() -> Iterator[dict[str, Any]]:
        for number in range(10_000):
            pulled.append(number)
            yield item(number)

    async with aclosing(Feeding(items(), {}, print).fed()) as feeding:
        await anext(feeding)
        await turns(50)
        assert len(pulled) <= MOST_AHEAD


async def test_generator_that_blocks_holds_neither_the_loop_nor_items_before() -> None:
    blocked, go_on = threading.Event(), threading.Event()

    def items() -> Iterator[dict[str, Any]]:
        yield item(0)
        blocked.set()
        go_on.wait()
        yield item(1)

    async with aclosing(Feeding(items(), {}, print).fed()) as feeding:
        assert (await anext(feeding)).item.id == "0"
        second = asyncio.ensure_future(anext(feeding))
        await until(blocked.is_set)
        await turns()
        go_on.set()
        assert (await second).item.id == "1"


async def test_finished_items_are_left_out() -> None:
    known = {key_of(f"{number}"): digest_of(BatchItem(f"{number}", "c")) for number in range(0, 200, 2)}
    ids, skipped = await fed_ids([item(number) for number in range(200)], known)
    assert ids == [f"{number}" for number in range(1, 200, 2)]
    assert skipped == 100


async def test_other_question_under_a_finished_id_is_refused() -> None:
    known = {key_of("1"): digest_of(BatchItem("1", "other"))}
    with pytest.raises(ConfigurationError, match=r"item 2 with the id '1' has another question or context"):
        await fed_ids([item(0), item(1)], known)


@pytest.mark.parametrize("known", [{}, {key_of("0"): digest_of(BatchItem("0", "c"))}])
async def test_id_that_comes_twice_is_refused(known: dict[bytes, bytes]) -> None:
    with pytest.raises(ConfigurationError, match="item 3 has the id '0', which an item before it has, too"):
        await fed_ids([item(0), item(1), item(0)], known)


async def test_items_before_an_error_are_fed() -> None:
    def items() -> Iterator[dict[str, Any]]:
        yield item(0)
        yield item(1)
        raise OSError("gone")

    feeding, ids = Feeding(items(), {}, print), []
    with pytest.raises(OSError, match="gone"):  # noqa: PT012
        async for fed in feeding.fed():
            ids.append(fed.item.id)
    assert ids == ["0", "1"]


@pytest.mark.parametrize("items", [5, "items", {"id": "a"}])
def test_items_that_are_no_iterable_are_refused(items: object) -> None:
    with pytest.raises(ConfigurationError, match=f"items must be an iterable of items, not {type(items).__name__}"):
        require_items(items)
