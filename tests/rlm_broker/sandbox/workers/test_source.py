"""Workers that are started ahead: given out once, with the right context, and ended with the sandbox."""

import asyncio
import contextlib
import errno
import gc
import os
from typing import Any, NoReturn

import psutil
import pytest

from rlm_broker.broker.transport.provisions import Provisions
from rlm_broker.context.store import store
from rlm_broker.context.stored_context import StoredContext
from rlm_broker.errors import ConfigurationError, SandboxFailed
from rlm_broker.limits import Limits, ReplLimits
from rlm_broker.sandbox.sandbox import Sandbox
from rlm_broker.sandbox.workers.source import REFILL_AFTER_S, SMALL_BYTES, StartedWorker, Workers
from sandbox_worker.wire.messages import Query, Slot
from tests.support.processes import living_below, living_parents_below
from tests.support.sources import pool_of
from tests.support.tables import table
from tests.support.waiting import turns, until

LIMITS = ReplLimits()


def ready(sandbox: Sandbox) -> int:
    return len(pool_of(sandbox).ready)


CONTEXTS: list[Any] = [
    None,
    "",
    "some text",
    "\N{GRINNING FACE}\xe9\0",
    "half a character \ud800",
    {"a": [1, 2.5, None, True], "b": "\xe9"},
    [],
    "x" * (SMALL_BYTES + 1),
    {"half": "\ud800"},
]


async def test_warm_worker_has_the_context_of_its_repl() -> None:
    code = "context == context_0, context is context_0, type(context).__name__, ascii(context)[:99], len(repr(context))"
    seen: dict[int, list[str]] = {0: [], 1: []}
    for warm, blocks in seen.items():
        async with Sandbox(warm=warm) as sandbox:
            for context in CONTEXTS:
                await until(lambda: ready(sandbox) == warm)  # noqa: B023
                async with sandbox.repl(context) as repl:
                    block = await repl.aexecute(code)
                    await repl.aexecute("context = 'overwritten'")
                    await repl.aexecute("import os; os.kill(os.getpid(), 9)")
                    after = await repl.aexecute(code)
                assert block.status == "ok", block
                assert block.stdout == after.stdout
                blocks.append(block.stdout)
    assert seen[0] == seen[1]


async def test_each_is_used_once_and_another_takes_its_place() -> None:
    async with Sandbox(warm=2) as sandbox:
        await until(lambda: ready(sandbox) == 2)
        pids = set()
        for _ in range(6):
            async with sandbox.repl("context") as repl:
                found = await repl.aexecute("print('left' in globals(), os.listdir('.'))\nleft = 1\nopen('left', 'w')")
                assert "left" not in found.stdout.replace("False", "")
                pids |= {process.pid for process in living_below()}
            await until(lambda: ready(sandbox) == 2)
        assert len(pids) >= 12
    assert living_below() == set()


async def test_tools_values_and_the_handler_are_the_takers() -> None:
    async def answer(query: Query) -> list[Slot]:
        return [Slot(text=f'"{query.want} {query.tool}"')] * len(query.prompts)

    async with Sandbox(warm=1) as sandbox:
        await until(lambda: ready(sandbox) == 1)
        repl = sandbox.repl("text", answer, tools=["look_up"], values={"PRICE": 3})
        assert ready(sandbox) == 1
        async with repl:
            assert (await repl.aexecute("print(look_up('x'), PRICE, context, llm_query('y'))")).stdout == (
                'tool look_up 3 text "llm None"\n'
            )
            await repl.aexecute("import os; os.kill(os.getpid(), 9)")
            assert (await repl.aexecute("print(look_up('x'), PRICE, context)")).stdout == "tool look_up 3 text\n"


async def test_by_itself_a_sandbox_begins_with_the_second_repl() -> None:
    async with Sandbox() as sandbox:
        for number in range(2):
            assert ready(sandbox) == 0
            async with sandbox.repl("context"):
                if number == 0:
                    await asyncio.sleep(2 * REFILL_AFTER_S)  # in this time the pool would have been refilled
        await until(lambda: ready(sandbox) == 1)
        async with sandbox.repl("context") as repl:
            assert (await repl.aexecute("print(context)")).stdout == "context\n"


@table("dies", ["REPL", "fork server"])
async def test_dead_warm_worker_is_not_given_out(dies: str) -> None:
    async with Sandbox(warm=2) as sandbox:
        await until(lambda: ready(sandbox) == 2)
        parents, waiting = living_parents_below(), list(pool_of(sandbox).ready)
        repls = [process for process in living_below() if process.pid not in parents]
        for process in repls if dies == "REPL" else psutil.Process().children():
            process.kill()
        await until(lambda: all(each.worker.died is not None or not each.connection.is_open for each in waiting))
        async with sandbox.repl("context") as repl:
            assert (await repl.aexecute("print(context)")).stdout == "context\n"
        await until(lambda: ready(sandbox) == 2)


@table("after_s", [0, 0.002, 0.005, 0.01])
async def test_sandbox_left_while_warming_is_cleaned_up(after_s: float) -> None:
    """A sandbox that is left while workers are made leaves no process, also if leaving it is cancelled."""
    async with Sandbox(warm=8):
        await asyncio.sleep(after_s)
    assert living_below() == set()
    sandbox = Sandbox(warm=6)
    await sandbox.__aenter__()
    leaving = asyncio.create_task(sandbox.aclose())
    await asyncio.sleep(after_s)
    leaving.cancel()
    await asyncio.wait({leaving})
    await until(lambda: living_below() == set())
    await sandbox.aclose()


async def test_layers_and_limits_are_those_of_any_other() -> None:
    layers = []
    for warm in (0, 1):
        async with Sandbox(Limits(memory_bytes=128 << 20), warm=warm) as sandbox:
            await until(lambda: ready(sandbox) == warm)  # noqa: B023
            with store("context") as context:
                async with sandbox.repl(context) as repl:
                    layers.append(repl.isolation)
                    grown = await repl.aexecute("x = bytearray(200 << 20)")
                    assert grown.status in ("error", "killed"), grown
    assert layers[0] == layers[1]
    assert "seccomp" in layers[1].layers


@table("warm", [-1, True, "2", 1.5])
def test_a_number_that_is_none_is_refused(warm: Any) -> None:
    with pytest.raises(ConfigurationError, match="warm must be a number of REPLs"):
        Sandbox(warm=warm)


async def test_a_context_that_no_message_may_hold_is_loaded() -> None:
    async with Sandbox(Limits(max_frame_bytes=4096), warm=1) as sandbox:
        await until(lambda: ready(sandbox) == 1)
        async with sandbox.repl("x" * 5000) as repl:
            assert (await repl.aexecute("print(len(context))")).stdout == "5000\n"


async def test_a_sandbox_that_was_left_stays_closed() -> None:
    """A REPL of a template that was left gets no other context."""
    async with Sandbox(warm=0) as sandbox:
        repl = sandbox.repl("context")
        await repl.__aenter__()
        template = sandbox.template(["mine"])
        async with template:
            of_template = template.repl()
            await of_template.__aenter__()
        others = [store(["another's"]) for _ in range(5)]
        said = []
        for _ in range(3):
            try:
                said.append(str(await of_template.aexecute("print(context)")))
            except SandboxFailed as error:
                said.append(str(error))
        assert "another" not in "".join(said)
        for other in others:
            other.close()
    with contextlib.suppress(SandboxFailed):
        assert (await repl.aexecute("1")).status == "killed"
    for _ in range(2):
        with pytest.raises(SandboxFailed):
            await repl.aexecute("1")
    with pytest.raises(SandboxFailed, match="was closed"):
        await template.__aenter__()
    await repl.aclose()
    assert living_below() == set()


async def test_value_provided_during_start_is_in_the_first_block() -> None:
    async with Sandbox(warm=0) as sandbox:
        repl = sandbox.repl("text", values={"early": 1})
        opening = asyncio.create_task(repl.__aenter__())
        await turns()
        assert not opening.done()
        repl.provide({"late": 2})
        async with await opening:
            assert (await repl.aexecute("early, late")).stdout == "(1, 2)\n"
            await repl.aexecute("import os; os.kill(os.getpid(), 9)")
            assert (await repl.aexecute("early, late, context")).stdout == "(1, 2, 'text')\n"


async def test_context_given_as_value_is_freed_with_its_repl() -> None:
    def values() -> int:
        return sum("context" in each._frames for each in gc.get_objects() if isinstance(each, Provisions))

    async with Sandbox(warm=1) as sandbox:
        await until(lambda: ready(sandbox) == 1)
        before = values()
        async with sandbox.repl("text") as repl:
            assert (await repl.aexecute("context")).stdout == "'text'\n"
            assert values() == before + 1
        del repl
        gc.collect()
        assert values() == before


async def test_sources_are_asked_in_order() -> None:
    """Sources are asked in order until one gives a worker."""
    async with Sandbox(warm=0) as sandbox:
        assert sandbox._workers is not None
        cold_start = sandbox._workers._cold_start
        asked: list[str] = []

        class Source:
            def __init__(self, name: str, has_one: bool) -> None:
                self._name, self._has_one = name, has_one

            async def take(self, context: StoredContext | None, limits: ReplLimits) -> StartedWorker | None:
                asked.append(self._name)
                return await cold_start.take(context, limits) if self._has_one else None

            async def close(self) -> None:
                asked.append(f"close {self._name}")

        workers = Workers(cold_start, LIMITS, (Source("empty", False), Source("full", True), Source("last", True)))
        await (await workers.start(None, LIMITS)).end()
        await workers.close()
        assert asked == ["empty", "full", "close empty", "close full", "close last"]
        await (await Workers(cold_start, LIMITS).start(None, LIMITS)).end()


async def test_worker_ended_twice_tells_its_source_once() -> None:
    async with Sandbox(warm=0) as sandbox:
        assert sandbox._workers is not None
        started = await sandbox._workers.start(None, LIMITS)
        told: list[bool] = []
        started.on_end = lambda: told.append(started.worker.gone.is_set())
        await started.end()
        await started.end()
        assert told == [True]


@pytest.mark.parametrize(
    ("error", "told"),
    [
        (SandboxFailed("no more processes"), "no more processes"),
        (OSError(errno.EMFILE, os.strerror(errno.EMFILE)), "Too many open files"),
    ],
)
async def test_pool_that_cannot_be_filled_is_logged_once(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, error: Exception, told: str
) -> None:
    tries: list[object] = []

    async def refused(*_given: object) -> NoReturn:
        tries.append(None)
        raise error

    async with Sandbox(warm=1) as sandbox:
        pool = pool_of(sandbox)
        await until(lambda: ready(sandbox) == 1)
        with monkeypatch.context() as patched:
            patched.setattr(pool._cold_start, "take", refused)
            async with sandbox.repl():
                await until(lambda: len(tries) == 1)
            pool._refill()
            await until(lambda: len(tries) == 2)
        pool._refill()
        await until(lambda: ready(sandbox) == 1)
    (message,) = caplog.messages
    assert message.startswith("no REPL can be started ahead; not logged again until one can: ")
    assert told in message
