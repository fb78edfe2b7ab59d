"""A REPL's start that is given up at any moment, while its fork and its connection are under way."""

import asyncio
import gc
import random
from pathlib import Path

import pytest

from rlm_broker.context.stored import StoredContext
from rlm_broker.errors import ReplClosed, RlmBrokerError, SandboxFailed
from rlm_broker.limits import ReplLimits
from rlm_broker.sandbox.sandbox import Sandbox
from rlm_broker.sandbox.workers.fork_server import ForkServer
from rlm_broker.sandbox.workers.source import ColdStart, StartedWorker
from tests.support.processes import living_below
from tests.support.waiting import turns, until


def left() -> tuple[int, int]:
    gc.collect()
    return len(living_below()), len(list(Path("/proc/self/fd").iterdir()))


async def until_left(expected: tuple[int, int]) -> None:
    await until(lambda: left() == expected)  # the listener notices a moment later that a connection was closed


async def test_cancelled_start_leaves_no_process_or_descriptor() -> None:
    """A start that is cancelled at any moment leaves no process and no descriptor."""
    chance = random.Random(7)
    async with Sandbox(warm=0) as sandbox:
        async with sandbox.repl("context") as repl:
            await repl.aexecute("1")
        before = left()
        for _ in range(40):
            repl = sandbox.repl("context")
            opening = asyncio.create_task(repl.__aenter__())
            await asyncio.sleep(chance.random() * 0.015)
            opening.cancel()
            await asyncio.wait({opening})
            await repl.aclose()
        await until_left(before)
        async with sandbox.repl("context") as repl:
            assert (await repl.aexecute("print(context)")).stdout == "context\n"


async def test_failed_fork_leaves_no_connection(monkeypatch: pytest.MonkeyPatch) -> None:
    async def no_spawn(_host: ForkServer, _limits: ReplLimits) -> None:
        await turns(50)  # the connection is made by then
        raise SandboxFailed("no process can be had")

    async with Sandbox(warm=0) as sandbox:
        before = left()
        with monkeypatch.context() as patched:
            patched.setattr(ForkServer, "spawn", no_spawn)
            for _ in range(5):
                with pytest.raises(RlmBrokerError, match="no process"):
                    await sandbox.repl("context").__aenter__()
        await until_left(before)


async def test_repl_not_entered_runs_no_code() -> None:
    """A REPL that is not entered runs no code and leaves no process."""
    async with Sandbox(warm=0) as sandbox, sandbox.template() as template:
        before = left()
        for repl in (sandbox.repl(), template.repl()):
            with pytest.raises(SandboxFailed, match="the REPL is not open: use it as `with sandbox"):
                await repl.aexecute("1")
        assert left() == before


async def test_repl_closed_during_its_start_is_cleaned_up() -> None:
    """A REPL that is closed at any moment of its start leaves no process."""
    chance = random.Random(7)
    async with Sandbox(warm=0) as sandbox:
        async with sandbox.repl("context") as repl:
            await repl.aexecute("1")
        before = left()
        for _ in range(20):
            repl = sandbox.repl("context")
            opening = asyncio.create_task(repl.__aenter__())
            await asyncio.sleep(chance.random() * 0.015)
            await repl.aclose()
            await asyncio.gather(opening, return_exceptions=True)
        await until_left(before)


async def test_repl_closed_on_arrival_of_its_worker_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """A REPL that is closed as soon as its worker is there is refused."""
    async with Sandbox(warm=0) as sandbox:
        before = left()
        repl, take = sandbox.repl("context"), ColdStart.take

        async def closed_after(self: ColdStart, context: StoredContext | None, limits: ReplLimits) -> StartedWorker:
            started = await take(self, context, limits)
            await repl.aclose()
            return started

        monkeypatch.setattr(ColdStart, "take", closed_after)
        with pytest.raises(ReplClosed, match="this REPL was closed"):
            await repl.__aenter__()
        await until_left(before)


async def test_repl_entered_twice_has_one_worker() -> None:
    """A REPL that is entered twice has one worker and is not entered again."""
    async with Sandbox(warm=0) as sandbox:
        before = left()
        repl = sandbox.repl()
        async with repl:
            await repl.aexecute("v = 1")
            processes = living_below()
            await repl.__aenter__()
            assert living_below() == processes
            assert (await repl.aexecute("v")).stdout == "1\n"
        with pytest.raises(ReplClosed, match="this REPL was closed: make another"):
            await repl.__aenter__()
        await until_left(before)
