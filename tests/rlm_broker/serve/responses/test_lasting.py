"""REPLs that live on between responses."""

import contextlib
from collections.abc import AsyncIterator

import pytest

from rlm_broker.broker.clients.scripted import ScriptedClient
from rlm_broker.rlm import RLM
from rlm_broker.serve.hosting.owner import Owner
from rlm_broker.serve.hosting.repls import HeldRepls
from rlm_broker.serve.responses import store as lasting
from rlm_broker.serve.responses.store import LastingRepl

ALICE = Owner("alice")


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
    monkeypatch.setattr(lasting, "MOST_IDLE", 2)
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
