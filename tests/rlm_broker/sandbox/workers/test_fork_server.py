"""The fork server and its workers as real processes: started, lost, replaced, ended."""

import asyncio
import random
import socket
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import psutil
import pytest

from rlm_broker.context.store import store
from rlm_broker.errors import SandboxFailed
from rlm_broker.limits import Limits
from rlm_broker.sandbox.sandbox import Sandbox
from rlm_broker.sandbox.workers import python_paths, zygote_process
from rlm_broker.sandbox.workers.fork_server import ForkServer
from rlm_broker.sandbox.workers.worker import Worker
from sandbox_worker.wire.level import LEVELS, PROCESS, STRICT, Level
from tests.support.forked_python import python
from tests.support.places import PROJECT
from tests.support.processes import kill_below, living_below
from tests.support.tables import table
from tests.support.waiting import WAIT_S, until, until_now

LIMITS = Limits()


@asynccontextmanager
async def opened(level: Level = STRICT) -> AsyncIterator[ForkServer]:
    before = living_below()
    fork_server = ForkServer(level, allow_exec=True)
    await fork_server.start()
    try:
        yield fork_server
    finally:
        await fork_server.close()
        assert not living_below() - before


async def launched(worker: Worker) -> Worker:
    ours, theirs = socket.socketpair()  # closed at once: the REPL ends, and init stays
    with ours, theirs, store("context") as context:
        await worker.launch(context.pieces(), theirs.fileno(), WAIT_S)
    return worker


async def prepared(fork_server: ForkServer) -> Worker:
    return await launched(await fork_server.spawn(LIMITS))


async def test_a_worker_is_prepared_and_killed_with_its_init() -> None:
    async with opened() as fork_server:
        worker = await prepared(fork_server)
        assert "seccomp" in worker.layers
        await worker.kill()
        assert worker.gone.is_set()
        await worker.kill()


@table("level", LEVELS)
async def test_many_workers_at_once_all_come_and_all_go(level: Level) -> None:
    async with opened(level) as fork_server:
        workers = await asyncio.gather(*(prepared(fork_server) for _ in range(15)))
        assert len({id(worker) for worker in workers}) == 15
        assert not any(worker.gone.is_set() for worker in workers)


async def test_cancelled_spawn_leaves_no_worker() -> None:
    chance = random.Random(7)
    async with opened() as fork_server:
        idle = len(living_below())
        for _ in range(15):
            spawning = [asyncio.create_task(fork_server.spawn(LIMITS)) for _ in range(3)]
            await asyncio.sleep(chance.random() / 200)
            spawning[1].cancel()
            results = await asyncio.wait_for(asyncio.gather(*spawning, return_exceptions=True), WAIT_S)
            for worker in results:
                if isinstance(worker, Worker):
                    await launched(worker)  # fails if it has the control socket of another request
                    await fork_server.end(worker)
        assert len(living_below()) == idle


async def test_lost_fork_server_takes_its_workers_and_is_replaced() -> None:
    async with opened() as fork_server:
        worker = await prepared(fork_server)
        kill_below()
        await asyncio.wait_for(worker.gone.wait(), WAIT_S)
        assert (await prepared(fork_server)).layers == worker.layers


async def test_closing_during_start_leaves_no_fork_server() -> None:
    fork_server = ForkServer(STRICT, allow_exec=True)
    starting = asyncio.create_task(fork_server.start())
    await until(living_below)
    await fork_server.close()
    with pytest.raises(SandboxFailed, match="was closed"):
        await starting
    assert not living_below()


async def test_failed_start_is_told_in_the_fork_servers_words(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(zygote_process, "python_paths", lambda: ["/nowhere"])
    with pytest.raises(SandboxFailed, match=r"fork server cannot start: .*(Error|error)"):
        await ForkServer(STRICT, allow_exec=True).start()
    assert living_below() == set()


async def test_fork_server_has_no_environment_or_folder_of_host(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CANARY_API_KEY", "sk-canary-0123456789")
    async with opened(PROCESS):
        (zygote,) = psutil.Process().children()
        assert zygote.environ() == python_paths.environment(None)
        assert str(Path.cwd()) not in zygote.cmdline()[-1].split("'")[1]


def test_nothing_but_python_is_readable_inside() -> None:
    readable = python_paths.readable(python_paths.python_paths())
    assert str(PROJECT) not in readable
    assert str(Path.home()) not in readable
    assert sys.base_prefix in readable


def test_no_descriptor_is_left_after_many_sandboxes() -> None:
    def counted() -> int:
        return len(list(Path("/proc/self/fd").iterdir()))

    with Sandbox() as sandbox, sandbox.repl() as repl:
        repl.execute("1")
    before = counted()
    for level in ("strict", "standard") * 2:
        with Sandbox(isolation=level) as sandbox:
            for _ in range(3):
                with sandbox.repl("context") as repl:
                    repl.execute("open('file', 'w').write('x')")
    until_now(lambda: counted() == before)  # a moment later, the loop closes the sockets of workers that were not taken


@pytest.mark.filterwarnings("ignore::rlm_broker.sandbox.workers.levels.IsolationWarning")
def test_host_folders_end_with_worker_and_fork_server() -> None:
    with Sandbox(isolation="process") as sandbox:
        with sandbox.repl() as repl:
            folder = Path(repl.execute("import os; print(os.getcwd())").stdout.strip())
            assert folder.is_dir()
        assert not folder.exists()
        assert folder.parent.is_dir()
    assert not folder.parent.exists()


WITHOUT_USER_NAMESPACES = """
import sys
import time
from pathlib import Path
from sandbox_worker.isolation import namespaces, syscalls
folder = namespaces.open_proc_self()
namespaces.enter_user_namespace(syscalls.CLONE_NEWUSER, folder)
Path("/proc/sys/user/max_user_namespaces").write_text("0")
from rlm_broker import Sandbox, IsolationUnavailable
with Sandbox() as sandbox:
    print(sandbox.level)
try:
    Sandbox(isolation="strict").__enter__()
except IsolationUnavailable as error:
    print(error)
"""


def test_auto_is_standard_without_user_namespaces() -> None:
    done = python("-c", WITHOUT_USER_NAMESPACES)
    level, sentence = done.stdout.splitlines()
    assert level == "standard", done.stderr
    assert "isolation level 'strict' is not available here: " in sentence
    assert "max_user_namespaces" in sentence
