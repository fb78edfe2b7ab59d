"""A fork server or worker that dies while a REPL starts is replaced silently; a block that ran on one reports it."""

import asyncio
import contextlib
import itertools
import os
import select
import signal
import tempfile
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import psutil
import pytest

from rlm_broker.errors import SandboxFailed
from rlm_broker.limits import Limits
from rlm_broker.sandbox.repl import SandboxedRepl
from rlm_broker.sandbox.sandbox import Sandbox
from rlm_broker.sandbox.workers.fork_server import TRIES
from rlm_broker.sandbox.workers.held_process import InitProcess
from rlm_broker.sandbox.workers.worker import Worker
from rlm_broker.sandbox.workers.zygote_process import Zygote
from sandbox_worker.wire.level import LevelName
from tests.support.processes import living_below
from tests.support.waiting import until, until_now

WAIT_S = 60


@asynccontextmanager
async def opened(level: LevelName = "strict") -> AsyncIterator[Sandbox]:
    others = living_below()
    async with Sandbox(isolation=level, warm=0) as sandbox:
        yield sandbox
    assert not living_below() - others


def kill_fork_servers() -> None:
    """Kill all, and wait for the end of the processes that they started: at "strict" these include their workers."""
    below = set(psutil.Process().children(recursive=True))
    for process in psutil.Process().children():
        with contextlib.suppress(psutil.NoSuchProcess):
            process.kill()
    until_now(lambda: not below & living_below())


def await_end(worker: Worker) -> None:
    """Wait for the end of a worker: an orphan is no longer below this process, and might still get ready first."""
    assert select.select([pidfd_of(worker)], [], [], WAIT_S)[0]


def pidfd_of(worker: Worker) -> int:
    """Return the descriptor of its init."""
    assert isinstance(worker.init, InitProcess)
    return worker.init._held._pidfd


def wrap(monkeypatch: pytest.MonkeyPatch, of: type, name: str, before: Callable[[int, Any], None]) -> list[int]:
    """Call `before` at each call of a coroutine method, with the call's number from 0; return the numbers."""
    called, method, numbers = list[int](), getattr(of, name), itertools.count()

    async def wrapped(self: Any, *args: Any) -> Any:
        number = next(numbers)
        called.append(number)
        before(number, self)
        return await method(self, *args)

    monkeypatch.setattr(of, name, wrapped)
    return called


@pytest.mark.parametrize("level", ["strict", "standard"])
@pytest.mark.parametrize("point", [(Zygote, "spawn"), (Worker, "launch")])
async def test_fork_server_killed_during_a_start_is_replaced_unseen(
    point: tuple[type, str], level: LevelName, monkeypatch: pytest.MonkeyPatch
) -> None:
    def kill(number: int, on: object) -> None:
        if number < TRIES - 1:
            kill_fork_servers()
            if isinstance(on, Worker):
                await_end(on)

    async with opened(level) as sandbox:
        called = wrap(monkeypatch, *point, kill)
        async with sandbox.repl("the context", values={"price": 3}) as repl:
            assert (await repl.aexecute("print(context, price)")).stdout == "the context 3\n"
        assert len(called) == TRIES


async def test_init_killed_during_a_start_is_replaced_unseen(monkeypatch: pytest.MonkeyPatch) -> None:
    def kill(number: int, worker: Any) -> None:
        if number == 0:
            signal.pidfd_send_signal(pidfd_of(worker), signal.SIGKILL)

    async with opened() as sandbox:
        wrap(monkeypatch, Worker, "launch", kill)
        async with sandbox.repl("the context") as repl:
            assert (await repl.aexecute("print(context)")).stdout == "the context\n"


async def test_repeatedly_killed_fork_server_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    """A fork server that is killed at every try is told and leaves no process."""
    async with opened() as sandbox:
        with monkeypatch.context() as patched:

            def kill(_number: int, worker: Worker) -> None:
                kill_fork_servers()
                await_end(worker)

            called = wrap(patched, Worker, "launch", kill)
            with pytest.raises(SandboxFailed, match=r"ended|gone|closed"):
                await sandbox.repl().__aenter__()
            assert len(called) == TRIES
        async with sandbox.repl() as repl:
            assert (await repl.aexecute("1")).status == "ok"


async def test_fork_server_killed_during_start_is_restarted(monkeypatch: pytest.MonkeyPatch) -> None:
    answer, killed = Zygote._answer, list[int]()

    async def killed_before(self: Zygote, timeout_s: float) -> Any:
        if not killed:
            assert self._process is not None
            self._process.kill()
            killed.append(self._process.pid)
        return await answer(self, timeout_s)

    monkeypatch.setattr(Zygote, "_answer", killed_before)
    async with opened() as sandbox, sandbox.repl() as repl:
        assert (await repl.aexecute("1")).status == "ok"
    assert killed


async def test_unused_repl_of_a_dead_fork_server_is_replaced() -> None:
    """A REPL that died before its first block, alone or with its fork server, is replaced unseen."""
    async with opened() as sandbox, sandbox.repl("the context", values={"price": 3}) as repl:
        (pid,) = [each.pid for each in living_below() if not each.children()]
        os.kill(pid, signal.SIGKILL)
        connection = repl._worker.connection
        assert connection is not None
        await until(lambda: not connection.is_open)
        assert (await repl.aexecute("print(context, price)")).stdout == "the context 3\n"
    async with opened() as sandbox, sandbox.repl("the context", values={"price": 3}) as repl:
        await lost(repl, kill_fork_servers)
        assert (await repl.aexecute("print(context, price)")).stdout == "the context 3\n"


async def test_variables_on_a_killed_fork_server_come_back_on_the_next() -> None:
    async with opened() as sandbox, sandbox.repl("the context") as repl:
        assert (await repl.aexecute("kept = 1")).status == "ok"
        await lost(repl, kill_fork_servers)
        block = await repl.aexecute("kept")
        why = "the sandbox's processes were ended from outside. Files that the killed block wrote are gone"
        assert (block.status, block.error, block.blocks_undone) == ("killed", why, 1)
        assert (await repl.aexecute("print(kept, context)")).stdout == "1 the context\n"


async def test_repls_start_despite_killed_fork_servers() -> None:
    async with opened() as sandbox:

        async def work(number: int) -> str:
            async with sandbox.repl(f"context {number}") as repl:
                return (await repl.aexecute("print(context)")).stdout

        working = [asyncio.create_task(work(number)) for number in range(20)]
        await asyncio.wait(working, return_when=asyncio.FIRST_COMPLETED)
        kill_fork_servers()
        said = await asyncio.wait_for(asyncio.gather(*working, return_exceptions=True), WAIT_S)
        assert not [each for each in said if isinstance(each, SandboxFailed)]
        # A block that ran was told of the kill; all other REPLs have their context.
        assert {each for number, each in enumerate(said) if each != f"context {number}\n"} <= {""}


async def lost(repl: SandboxedRepl, kill: Callable[[], None]) -> None:
    """Kill a process, and wait until its end has been noticed."""
    assert repl._worker.started is not None
    kill()
    await asyncio.wait_for(repl._worker.started.worker.gone.wait(), WAIT_S)


async def test_stopped_fork_server_is_replaced_in_time() -> None:
    async with Sandbox(Limits(start_timeout_s=1), warm=0) as sandbox:
        for process in psutil.Process().children(recursive=True):
            with contextlib.suppress(psutil.NoSuchProcess):  # the canary ends at about this time
                process.suspend()
        async with sandbox.repl("the context") as repl:
            assert (await repl.aexecute("print(context)")).stdout == "the context\n"
    assert not living_below()


async def test_cancelled_start_on_lost_fork_server_is_cleaned_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    end, ending, may_end = Zygote.end, asyncio.Event(), asyncio.Event()

    async def ended_late(self: Zygote) -> bool:
        ending.set()
        await may_end.wait()
        return await end(self)

    async with opened() as sandbox:
        monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
        tmp_path.chmod(0o711)
        monkeypatch.setattr(Zygote, "end", ended_late)
        template = sandbox.template(setup="raise KeyError")
        opening = asyncio.create_task(template.__aenter__())
        await asyncio.wait_for(ending.wait(), WAIT_S)
        opening.cancel()
        await asyncio.sleep(0)
        may_end.set()
        await asyncio.wait({opening})
        assert list(tmp_path.iterdir()) == []
        assert len(psutil.Process().children()) == 1
