"""REPLs that outlive a request: their handles, their bounds, their idle time and their end."""

import asyncio
import contextlib
from collections.abc import AsyncIterator
from typing import Any

import pytest
import pytest_asyncio

from rlm_broker import Sandbox
from rlm_broker.serve.hosting.owner import Busy, Owner, UnknownHandle
from rlm_broker.serve.hosting.repls import HeldRepl, HeldRepls
from rlm_broker.watch.board import BOARD
from tests.support.processes import living_below
from tests.support.waiting import until

pytestmark = pytest.mark.asyncio(loop_scope="module")
ANN, BOB = Owner("ann"), Owner("bob")


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def sandbox() -> AsyncIterator[Sandbox]:
    async with Sandbox(warm=0) as opened:
        yield opened


async def opened(repls: HeldRepls, sandbox: Sandbox, owner: Owner = ANN, **more: Any) -> HeldRepl:
    async with repls.room(owner):
        repl = sandbox.repl()
        await repl.__aenter__()
        return repls.hold(owner, repl, repl.aclose, name="mine", **more)


async def test_handle_finds_its_repl_for_its_owner_alone(sandbox: Sandbox) -> None:
    """A handle cannot be guessed, finds its REPL for its owner, and for no other owner."""
    async with HeldRepls() as repls:
        first, second = await opened(repls, sandbox), await opened(repls, sandbox)
        assert first.id.startswith("repl_")
        assert len(first.id) == len("repl_") + 32
        assert (first.owner, first.name, first.run, first.idle_s) == (ANN, "mine", None, 20 * 60)
        assert repls.get(ANN, first.id) is first
        assert (repls.of(ANN), repls.of(BOB), len(repls)) == ([first, second], [], 2)
        for owner, id in ((BOB, first.id), (ANN, "repl_x")):
            with pytest.raises(UnknownHandle, match=f"no REPL '{id}'"):
                repls.get(owner, id)
            with pytest.raises(UnknownHandle):
                await repls.close(owner, id)
        assert not first.repl.is_closed


async def test_closed_repl_has_no_handle_and_process(sandbox: Sandbox) -> None:
    async with HeldRepls() as repls:
        before = living_below()
        held = await opened(repls, sandbox)
        assert living_below() > before
        await repls.close(ANN, held.id)
        assert held.repl.is_closed
        assert living_below() <= before
        with pytest.raises(UnknownHandle):
            repls.get(ANN, held.id)


async def test_leaving_ends_all_with_their_blocks(sandbox: Sandbox) -> None:
    before = living_below()
    async with HeldRepls() as repls:
        held = [await opened(repls, sandbox, owner) for owner in (ANN, BOB)]
        block = asyncio.ensure_future(held[0].repl.aexecute("while True: pass"))
        await asyncio.sleep(0)
    await asyncio.wait({block})
    assert block.exception() is not None or block.result().status == "killed"
    assert all(each.repl.is_closed for each in held)
    assert living_below() <= before


async def test_idle_repl_goes_and_used_one_stays(sandbox: Sandbox) -> None:
    """The idle time begins with the last use, and a REPL in use is not idle."""
    async with HeldRepls() as repls:
        idle = await opened(repls, sandbox, idle_s=0.01)
        await until(lambda: idle.repl.is_closed)
        assert repls.of(ANN) == []
        used = await opened(repls, sandbox, idle_s=0.05)
        async with repls.used(ANN, used.id) as held:
            assert held is used
            assert held.timer is None
            other = await opened(repls, sandbox, idle_s=0.1)
            await until(lambda: other.repl.is_closed)  # it was opened later, and may be idle for longer
            assert (await held.repl.aexecute("1")).status == "ok"
        await until(lambda: used.repl.is_closed)


async def test_least_recently_used_idle_one_makes_room(sandbox: Sandbox) -> None:
    """At the bound of an owner, its least recently used REPL goes, unless all run blocks; other owners keep theirs."""
    async with HeldRepls(most=4, most_per_owner=2) as repls:
        theirs = await opened(repls, sandbox, BOB)
        first, second = await opened(repls, sandbox), await opened(repls, sandbox)
        async with repls.used(ANN, first.id):
            pass  # the second one is now the least recently used
        third = await opened(repls, sandbox)
        assert repls.of(ANN) == [first, third]
        assert repls.of(BOB) == [theirs]
        await until(lambda: second.repl.is_closed)
        async with repls.used(ANN, first.id), repls.used(ANN, third.id):
            with pytest.raises(Busy, match="all 2 REPLs are in use") as refusal:
                await opened(repls, sandbox)
            assert refusal.value.retry_after_s == 5


async def test_bound_of_all_takes_the_oldest_of_any(sandbox: Sandbox) -> None:
    async with HeldRepls(most=2) as repls:
        theirs, mine = await opened(repls, sandbox, BOB), await opened(repls, sandbox)
        other = await opened(repls, sandbox)
        assert repls.all() == [mine, other]
        await until(lambda: theirs.repl.is_closed)


async def test_room_counts_those_that_are_opened(sandbox: Sandbox) -> None:
    """Two that are opened at the same time do not share the last place, and a failed opening gives its place back."""
    async with HeldRepls(most_per_owner=1) as repls:
        async with repls.room(ANN):
            with pytest.raises(Busy):
                await opened(repls, sandbox)
        with pytest.raises(ValueError, match="not opened"):
            async with repls.room(ANN):
                raise ValueError("not opened")
        assert repls.of(ANN) == []
        await opened(repls, sandbox)


async def test_twenty_of_an_owner_and_a_thousand_of_all_by_default() -> None:
    async with HeldRepls() as repls, contextlib.AsyncExitStack() as rooms:
        for _ in range(20):
            await rooms.enter_async_context(repls.room(ANN))
        with pytest.raises(Busy, match=r"^all 20 REPLs are in use: end one, or try again later$"):
            await rooms.enter_async_context(repls.room(ANN))
        for number in range(980):
            await rooms.enter_async_context(repls.room(Owner(f"other {number}")))
        with pytest.raises(Busy, match=r"^all 1,000 REPLs are in use"):
            await rooms.enter_async_context(repls.room(BOB))
        await rooms.aclose()
        async with repls.room(BOB):
            assert len(repls) == 0


async def test_repl_that_died_in_use_loses_its_handle(sandbox: Sandbox) -> None:
    async with HeldRepls() as repls:
        held = await opened(repls, sandbox)
        async with repls.used(ANN, held.id):
            await held.repl.aclose()
        with pytest.raises(UnknownHandle):
            repls.get(ANN, held.id)


async def test_stop_command_interrupts_a_block_or_ends_its_repl(sandbox: Sandbox) -> None:
    """The REPL is on the board under its handle and its owner, and the command waits for its end."""
    async with HeldRepls() as repls:
        held = await opened(repls, sandbox)
        (entry,) = [entry for entry in BOARD.repls if entry.id == held.id]
        assert entry.owner == "ann"
        begun = asyncio.Event()
        code = "print('begun')\nwhile True: pass"
        block = asyncio.ensure_future(held.repl.aexecute(code, on_output=lambda *_: begun.set()))
        await begun.wait()
        await entry.stop(now=False)
        assert (await block).status == "interrupted"
        assert repls.get(ANN, held.id) is held
        await entry.stop(now=True)
        assert held.repl.is_closed
        assert len(repls) == 0
