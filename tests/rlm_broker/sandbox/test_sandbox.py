"""A REPL's start that is given up at any moment, while its fork and its connection are under way."""

import asyncio
import contextlib
import gc
import os
import random
import threading
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest

from rlm_broker import ConfigurationError, Limits, ReplLimits, Sandbox
from rlm_broker.context.stored_context import StoredContext
from rlm_broker.errors import ReplClosed, RlmBrokerError, SandboxFailed
from rlm_broker.sandbox.sandbox import close_all
from rlm_broker.sandbox.workers.fork_server import ForkServer
from rlm_broker.sandbox.workers.source import ColdStart, StartedWorker
from tests.support.fds import memfds
from tests.support.forked_python import python
from tests.support.places import PROJECT
from tests.support.processes import living_below
from tests.support.tables import table
from tests.support.waiting import turns, until, until_now


def left() -> tuple[int, int]:
    gc.collect()
    return len(living_below()), len(list(Path("/proc/self/fd").iterdir()))


async def until_left(expected: tuple[int, int]) -> None:
    await until(lambda: left() == expected)  # the listener notices a moment later that a connection was closed


@table("how", ["cancelled", "closed"])
async def test_start_that_is_given_up_leaves_no_process_or_descriptor(how: str) -> None:
    chance = random.Random(7)
    async with Sandbox(warm=0) as sandbox:
        async with sandbox.repl("context") as repl:
            await repl.aexecute("1")
        before = left()
        for _ in range(20):
            repl = sandbox.repl("context")
            opening = asyncio.create_task(repl.__aenter__())
            await asyncio.sleep(chance.random() * 0.015)
            if how == "cancelled":
                opening.cancel()
                await asyncio.wait({opening})
            await repl.aclose()
            await asyncio.gather(opening, return_exceptions=True)
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
    async with Sandbox(warm=0) as sandbox, sandbox.template() as template:
        before = left()
        for repl in (sandbox.repl(), template.repl()):
            with pytest.raises(SandboxFailed, match="the REPL is not open: use it as `with sandbox"):
                await repl.aexecute("1")
        assert left() == before


async def test_repl_closed_on_arrival_of_its_worker_may_be_opened_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """A REPL that is closed as soon as its worker is there has none, and takes another when it is opened again."""
    async with Sandbox(warm=0) as sandbox:
        before = left()
        repl, take = sandbox.repl("context"), ColdStart.take
        closing: list[asyncio.Task[None]] = []

        async def closed_after(self: ColdStart, context: StoredContext | None, limits: ReplLimits) -> StartedWorker:
            started = await take(self, context, limits)
            closing.append(asyncio.create_task(repl.aclose()))
            return started

        with monkeypatch.context() as patched:
            patched.setattr(ColdStart, "take", closed_after)
            with contextlib.suppress(SandboxFailed):  # or it was open in the moment before it was closed
                await repl.__aenter__()
            await asyncio.gather(*closing)
        await until_left(before)
        if not repl.is_closed:
            async with repl:
                assert (await repl.aexecute("context")).stdout == "context\n"


@table("use", ["block", "file", "program"])
async def test_repl_that_is_used_while_it_opens_has_one_worker(use: str) -> None:
    async with Sandbox(warm=0) as sandbox:
        repl = sandbox.repl("context")
        uses: dict[str, Callable[[], Awaitable[object]]] = {
            "block": lambda: repl.aexecute("1"),
            "file": lambda: repl.files.alist(),
            "program": lambda: repl.arun(["true"]),
        }
        opening, refusals = asyncio.create_task(repl.__aenter__()), list[str]()
        while not opening.done():
            try:
                await uses[use]()
            except SandboxFailed as refusal:
                refusals.append(str(refusal))
            await asyncio.sleep(0)
        assert set(refusals) == {"the REPL is not open: use it as `with sandbox.repl() as repl:`"}
        assert sandbox.stats().workers == 1
        await repl.aclose()
        assert sandbox.stats().workers == 0


async def test_repl_entered_twice_has_one_worker() -> None:
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


def test_closed_sandbox_frees_the_context_of_an_open_repl() -> None:
    before = memfds("context")
    with Sandbox() as sandbox:
        repl = sandbox.repl("x" * (1 << 20)).__enter__()
        assert repl.execute("print(len(context))").stdout == "1048576\n"
        assert memfds("context") > before
    assert memfds("context") == before
    repl.close()


def test_equal_settings_share_a_sandbox_from_any_thread() -> None:
    found: list[Sandbox] = []
    threads = [threading.Thread(target=lambda: found.append(Sandbox.shared(ReplLimits(cpu_s=5)))) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len({id(sandbox) for sandbox in found}) == 1
    assert Sandbox.shared(ReplLimits(cpu_s=6)) is not found[0]
    with found[0].repl("text") as repl:
        assert repl.execute("len(context)").stdout == "4\n"
    close_all()
    assert Sandbox.shared(ReplLimits(cpu_s=5)) is not found[0]  # a closed sandbox is not returned again
    close_all()


def test_equal_bounds_share_a_sandbox() -> None:
    """Equal bounds share a sandbox, even if other settings differ. Bad settings are refused."""
    try:
        assert Sandbox.shared() is Sandbox.shared(ReplLimits()) is Sandbox.shared(Limits(max_depth=3))
        with pytest.raises(ConfigurationError, match="no isolation level 'x'"):
            Sandbox.shared(isolation="x")  # type: ignore[arg-type]
    finally:
        close_all()


@table("isolation", ["auto", "standard", "process"])
def test_shared_sandbox_is_cleaned_up_at_exit_and_fork(isolation: str, tmp_path: Path) -> None:
    program = (
        "import os, warnings\n"
        "warnings.simplefilter('ignore')\n"
        "from rlm_broker import Sandbox\n"
        "def use():\n"
        f"    with Sandbox.shared(isolation={isolation!r}).repl('text') as repl:\n"
        "        assert repl.execute('len(context)').stdout == '4\\n'\n"
        "use()\n"
        "pid = os.fork()\n"
        "use()\n"
        "if pid:\n"
        "    assert os.waitpid(pid, 0)[1] == 0\n"
        "    print('both')\n"
    )
    environment = {"PATH": os.environ["PATH"], "TMPDIR": str(tmp_path), "PYTHONPATH": str(PROJECT)}
    done = python("-c", program, env=environment)
    assert (done.returncode, done.stdout, done.stderr) == (0, "both\n", "")
    assert list(tmp_path.iterdir()) == []


def test_sandbox_that_opens_keeps_no_caller_of_another_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    slow, may_open, openings, open_it = ReplLimits(cpu_s=7), threading.Event(), list[Sandbox](), Sandbox._open

    async def slowly(self: Sandbox) -> None:
        if self.limits == slow:
            openings.append(self)
            await until(may_open.is_set)
        await open_it(self)

    monkeypatch.setattr(Sandbox, "_open", slowly)
    try:
        fast = Sandbox.shared()
        callers = [threading.Thread(target=Sandbox.shared, args=(slow,)) for _ in range(2)]
        for caller in callers:
            caller.start()
        until_now(lambda: openings)
        assert Sandbox.shared() is fast
        assert asyncio.run(Sandbox.ashared()) is fast
        may_open.set()
        for caller in callers:
            caller.join()
        assert openings == [Sandbox.shared(slow)]
    finally:
        close_all()


def test_stats_say_what_lives_and_what_was_started() -> None:
    with Sandbox(warm=0) as sandbox:
        before = sandbox.stats()
        with sandbox.repl() as repl, sandbox.repl():
            during = sandbox.stats()
            repl.execute("1")
        after = sandbox.stats()
    assert (before.workers, during.workers, after.workers) == (0, 2, 0)
    assert during.started - before.started == 2
    assert after.started == during.started
    assert sandbox.stats().workers == 0
