import asyncio
import contextlib
import errno
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import NoReturn

import psutil
import pytest

from rlm_broker.broker.clients.script import ScriptedClient
from rlm_broker.context.store import store
from rlm_broker.context.stored_context import StoredContext
from rlm_broker.errors import SandboxFailed
from rlm_broker.limits import Limits
from rlm_broker.rlm import RLM
from rlm_broker.sandbox.sandbox import Sandbox
from rlm_broker.sandbox.workers import cgroups, context_cache
from rlm_broker.sandbox.workers.fork_server import ForkServer
from rlm_broker.sandbox.workers.zygote_process import Preparation
from sandbox_worker.wire.level import LevelName
from tests.support.processes import living_below
from tests.support.sources import cache_of
from tests.support.tables import table
from tests.support.waiting import WAIT_S, for_ever

OBJECTS = {"a": [1, 2, {"b": None}], "c": 0.5}
OF_THE_SAME_SIZE = {"a": [3, 4, {"b": None}], "c": 0.5}
WHERE = "print(id(context), context['a'][0])"


@pytest.fixture(autouse=True)
def _small_ones_are_shared(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(context_cache, "SHARED_FROM_BYTES", 1)


@contextlib.contextmanager
def room_for_one(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Room for one fork server. A second one turns out not to fit when it is ready."""
    with Sandbox(warm=0) as sandbox:
        assert sandbox._fork_server is not None
        one_bytes = sandbox._fork_server.memory_bytes
    with monkeypatch.context() as patched:
        patched.setattr(cgroups, "memory_bytes", lambda: 1.5 * one_bytes / context_cache.OF_ALL_MEMORY)
        yield


def fork_servers() -> set[psutil.Process]:
    return set(psutil.Process().children()) & living_below()


def prepared(monkeypatch: pytest.MonkeyPatch) -> list[ForkServer]:
    """Return a list that gets each fork server that is prepared from now on."""
    made: list[ForkServer] = []
    real = ForkServer.prepared

    async def prepare(self: ForkServer, preparation: Preparation) -> ForkServer:
        made.append(await real(self, preparation))
        return made[-1]

    monkeypatch.setattr(ForkServer, "prepared", prepare)
    return made


def places(sandbox: Sandbox, context: object, times: int = 3) -> list[str]:
    """Addresses of objects: two REPLs with the same address, one after the other, have the same fork server."""
    found = []
    for _ in range(times):
        with sandbox.repl(context) as repl:
            found.append(repl.execute(WHERE).stdout)
    return found


@table("stored", [True, False])
def test_shared_context_is_decoded_once(stored: bool) -> None:
    """A context is not decoded again from the second REPL on."""
    with Sandbox(warm=0) as sandbox, store(OBJECTS) as handle:
        before = fork_servers()
        first, *others = places(sandbox, handle if stored else OBJECTS, times=4)
        assert len(fork_servers() - before) == 1
        assert len(set(others)) == 1
        assert first not in others
    assert not living_below()


def test_changes_to_a_shared_context_stay_in_the_repl() -> None:
    """A killed REPL, and one whose init was killed, has the context again."""
    with Sandbox(Limits(interrupt_grace_s=0.1, max_replay_s=0), warm=0) as sandbox:
        places(sandbox, OBJECTS)
        others = living_below()
        with sandbox.repl(OBJECTS) as one:
            running = next(process for process in living_below() - others if not process.children())
            init = psutil.Process(running.ppid())
            with sandbox.repl(OBJECTS) as other:
                one.execute("context['a'].clear()")
                assert other.execute("print(context)").stdout == f"{OBJECTS}\n"
            assert one.execute("import os; os._exit(1)").status == "killed"
            assert one.execute("print(context)").stdout == f"{OBJECTS}\n"
            assert one.execute("import os; os._exit(1)").status == "killed"
            init.kill()
            assert one.execute("print(context)").stdout == f"{OBJECTS}\n"


def test_contexts_of_equal_size_differ_by_content() -> None:
    with Sandbox(warm=0) as sandbox:
        before = fork_servers()
        for context in (OBJECTS, OF_THE_SAME_SIZE, OBJECTS, OF_THE_SAME_SIZE, OF_THE_SAME_SIZE):
            (found,) = places(sandbox, context, times=1)
            assert found.split()[1] == str(context["a"][0])  # type: ignore[index]
        assert len(fork_servers() - before) == 2


async def test_concurrent_starts_share_one_fork_server() -> None:
    async with Sandbox(warm=0) as sandbox, contextlib.AsyncExitStack() as stack:
        before = fork_servers()
        with store(OBJECTS) as stored:
            repls = [sandbox.repl(stored) for _ in range(8)]
            await asyncio.gather(*map(stack.enter_async_context, repls))
        found = [(await repl.aexecute(WHERE)).stdout for repl in repls]
        assert len(fork_servers() - before) == 1
        assert sorted(map(found.count, set(found))) == [1, 7]
    assert not living_below()


async def test_cancelled_starts_leave_the_cache_intact() -> None:
    """Starts that are cancelled leave no process and do not spoil the cache for others."""
    async with Sandbox(warm=0) as sandbox:
        before = fork_servers()
        with store(OBJECTS) as stored:
            async with sandbox.repl(stored):
                pass
            for after_s in (0, 0.001, 0.01, 0.05, 0.1, 0.2):
                opening = [asyncio.create_task(sandbox.repl(stored).__aenter__()) for _ in range(3)]
                await asyncio.sleep(after_s)
                for each in opening[1:]:
                    each.cancel()
                (one, *_) = await asyncio.gather(*opening, return_exceptions=True)
                assert not isinstance(one, BaseException), one
                assert (await one.aexecute("print(context['c'])")).stdout == "0.5\n"
                for each in opening:
                    if not each.cancelled():
                        await (await each).aclose()
            assert len(fork_servers() - before) == 1
            await cache_of(sandbox).close()  # ends fork servers without users
            assert fork_servers() == before
    assert not living_below()


def test_least_recently_used_fork_server_is_ended_first(monkeypatch: pytest.MonkeyPatch) -> None:
    with room_for_one(monkeypatch), Sandbox(warm=0) as sandbox:
        before = fork_servers()
        places(sandbox, OBJECTS)
        (first,) = fork_servers() - before
        places(sandbox, OF_THE_SAME_SIZE)
        first.wait(WAIT_S)
        assert len(fork_servers() - before) == 1


def test_fork_server_with_live_repls_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    with room_for_one(monkeypatch), Sandbox(warm=0) as sandbox:
        before = fork_servers()
        made = prepared(monkeypatch)
        places(sandbox, OBJECTS)
        with sandbox.repl(OBJECTS) as repl:
            (server,) = fork_servers() - before
            assert [place.split()[1] for place in places(sandbox, OF_THE_SAME_SIZE)] == ["3"] * 3
            _, alive = psutil.wait_procs(fork_servers() - before - {server}, timeout=WAIT_S)
            assert not alive  # the second fork server ended with the first REPL that had it, and no other was made
            assert len(made) == 2
            assert repl.execute("print(context['c'])").stdout == "0.5\n"


def test_context_that_can_never_fit_ends_no_other(monkeypatch: pytest.MonkeyPatch) -> None:
    with Sandbox(warm=0) as sandbox:
        before = fork_servers()
        places(sandbox, OBJECTS)
        servers = fork_servers() - before
        monkeypatch.setattr(context_cache, "HEAP_PER_BYTE", 1 << 50)
        assert [place.split()[1] for place in places(sandbox, OF_THE_SAME_SIZE)] == ["3"] * 3
        assert fork_servers() - before == servers


def test_a_fork_server_that_died_is_done_without() -> None:
    """The kernel kills it before the orchestrator when the machine has no memory left."""
    with Sandbox(warm=0) as sandbox:
        before = fork_servers()
        places(sandbox, OBJECTS)
        (monitor,) = fork_servers() - before
        (server,) = monitor.children()
        assert Path(f"/proc/{server.pid}/oom_score_adj").read_text() == "1000\n"
        server.kill()
        monitor.wait(WAIT_S)
        assert [place.split()[1] for place in places(sandbox, OBJECTS)] == ["1"] * 3


def _no_more_processes(*_args: object, **_options: object) -> NoReturn:
    raise BlockingIOError(errno.EAGAIN, "Resource temporarily unavailable")


def _no_memory(context: StoredContext) -> NoReturn:
    with context:
        raise OSError(errno.ENOMEM, "Cannot allocate memory")


def test_refused_fork_server_is_requested_again_later(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    with Sandbox(warm=0) as sandbox:
        before = fork_servers()
        with monkeypatch.context() as patched:
            places(sandbox, OBJECTS, times=1)
            patched.setattr(subprocess, "Popen", _no_more_processes)
            assert [place.split()[1] for place in places(sandbox, OBJECTS)] == ["1"] * 3
        assert len(set(places(sandbox, OBJECTS))) == 1
        assert len(fork_servers() - before) == 1
    (logged,) = caplog.messages
    assert logged.startswith("a context is decoded by each REPL, since its fork server cannot start: ")


def test_context_without_digest_does_not_harm_others(monkeypatch: pytest.MonkeyPatch) -> None:
    with Sandbox(warm=0) as sandbox, store(OBJECTS) as stored:
        with monkeypatch.context() as patched:
            patched.setattr(context_cache, "_digest", _no_memory)
            places(sandbox, stored, times=1)
        for context, first in ((stored, "1"), (OF_THE_SAME_SIZE, "3")):
            assert [place.split()[1] for place in places(sandbox, context)] == [first] * 3


@table("after_s", [0, 0.01, 0.05])
async def test_waiter_at_closing_is_told_and_not_cancelled(after_s: float) -> None:
    """A caller that waits while the sandbox closes is told so and not cancelled."""
    with store(OBJECTS) as stored:
        async with Sandbox(warm=0) as sandbox:
            async with sandbox.repl(stored):
                pass
            opening = [asyncio.create_task(sandbox.repl(stored).__aenter__()) for _ in range(3)]
            await asyncio.sleep(after_s)
        for outcome in await asyncio.gather(*opening, return_exceptions=True):
            assert isinstance(outcome, SandboxFailed), outcome
    assert not living_below()


async def test_request_while_closing_leaves_no_fork_server() -> None:
    async with Sandbox(warm=0) as sandbox:
        with store(OBJECTS) as stored:
            async with sandbox.repl(stored):
                pass
            late = sandbox.repl(stored)
            await cache_of(sandbox).close()
            before = fork_servers()
            async with late:
                assert fork_servers() == before


async def test_fork_server_whose_caller_was_cancelled_is_not_awaited(monkeypatch: pytest.MonkeyPatch) -> None:
    source = asyncio.Event()

    async def that_takes_its_time(_fork_server: ForkServer) -> None:
        source.set()
        await for_ever()

    async with asyncio.timeout(WAIT_S), Sandbox(warm=0) as sandbox:
        with store(OBJECTS) as stored, monkeypatch.context() as patched:
            async with sandbox.repl(stored):
                pass
            cache = cache_of(sandbox)
            patched.setattr(ForkServer, "start", that_takes_its_time)
            opening = asyncio.create_task(sandbox.repl(stored).__aenter__())
            await source.wait()
            opening.cancel()
            await asyncio.wait({opening})
            (shared,) = cache._listed.values()
            cache._unlist(shared)  # as if another context needed the room
            await asyncio.gather(*cache._ending)


@table("level", ["standard", "process"])
@pytest.mark.filterwarnings("ignore:.*not a security boundary")
def test_outside_of_isolation_nothing_is_decoded(level: LevelName) -> None:
    with Sandbox(isolation=level, warm=0) as sandbox:
        before = fork_servers()
        places(sandbox, OBJECTS)
        assert fork_servers() == before


def test_runs_share_a_contexts_fork_server() -> None:
    with RLM(ScriptedClient(["```repl\nFINAL(id(context))\n```"] * 3)) as rlm:
        first, second, third = [rlm.completion(OBJECTS, "where is it?").response for _ in range(3)]
    assert first != second
    assert second == third
