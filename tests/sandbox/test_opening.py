"""A REPL's start, given up at any moment: its fork and its door are on their way at the same time."""

import asyncio
import gc
import random
import time
from pathlib import Path

import pytest

from rlm_broker.errors import RlmBrokerError, SandboxFailed
from rlm_broker.limits import Limits
from rlm_broker.sandbox.host import Host
from rlm_broker.sandbox.sandbox import Sandbox
from tests.processes import living_below


def left() -> tuple[int, int]:
    gc.collect()
    return len(living_below()), len(list(Path("/proc/self/fd").iterdir()))


async def until_left(expected: tuple[int, int]) -> None:
    deadline = time.monotonic() + 30
    while left() != expected:  # the listener hears a moment later that a door was closed
        assert time.monotonic() < deadline, (left(), expected)
        await asyncio.sleep(0.01)


async def test_a_start_cancelled_at_any_moment_leaves_no_process_and_no_descriptor() -> None:
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


async def test_a_fork_that_fails_leaves_no_door(monkeypatch: pytest.MonkeyPatch) -> None:
    async def no_spawn(_host: Host, _limits: Limits) -> None:
        await asyncio.sleep(0.02)
        raise SandboxFailed("no process can be had")

    async with Sandbox(warm=0) as sandbox:
        before = left()
        with monkeypatch.context() as patched:
            patched.setattr(Host, "spawn", no_spawn)
            for _ in range(5):
                with pytest.raises(RlmBrokerError, match="no process"):
                    await sandbox.repl("context").__aenter__()
        await until_left(before)
