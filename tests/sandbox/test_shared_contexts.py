import asyncio
import contextlib
from collections.abc import Iterator

import psutil
import pytest

from rlm_broker.clients.scripted import ScriptedClient
from rlm_broker.context import store
from rlm_broker.limits import Limits
from rlm_broker.rlm import RLM
from rlm_broker.sandbox import sandbox as sandbox_module
from rlm_broker.sandbox import shared_contexts
from rlm_broker.sandbox.sandbox import Sandbox
from tests.processes import living_below

OBJECTS = {"a": [1, 2, {"b": None}], "c": 0.5}
OF_THE_SAME_SIZE = {"a": [3, 4, {"b": None}], "c": 0.5}
WHERE = "print(id(context), context['a'][0])"


@pytest.fixture(autouse=True)
def _small_ones_are_shared(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shared_contexts, "SHARED_FROM_BYTES", 1)


@contextlib.contextmanager
def room_for_one(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Fork servers may take less than one does, which shows when it is there: there is no room for a second one."""
    with Sandbox(warm=0) as sandbox:
        assert sandbox._pool is not None
        one_bytes = sandbox._pool.host.memory_bytes
    with monkeypatch.context() as patched:
        patched.setattr(sandbox_module, "_machines_memory_bytes", lambda: one_bytes)
        yield


def fork_servers() -> set[psutil.Process]:
    return set(psutil.Process().children()) & living_below()


def places(sandbox: Sandbox, context: object, times: int = 3) -> list[str]:
    """Where objects lie: the same address in two REPLs, one after the other, is that of one fork server."""
    found = []
    for _ in range(times):
        with sandbox.repl(context) as repl:
            found.append(repl.execute(WHERE).stdout)
    return found


@pytest.mark.parametrize("stored", [True, False])
def test_from_the_second_repl_on_a_context_is_decoded_no_more(stored: bool) -> None:
    with Sandbox(warm=0) as sandbox, store(OBJECTS) as handle:
        before = fork_servers()
        first, *others = places(sandbox, handle if stored else OBJECTS, times=4)
        assert len(fork_servers() - before) == 1
        assert len(set(others)) == 1
        assert first not in others
    assert not living_below()


def test_what_a_repl_does_with_a_shared_context_stays_with_it() -> None:
    with Sandbox(warm=0) as sandbox:
        places(sandbox, OBJECTS)
        with sandbox.repl(OBJECTS) as one, sandbox.repl(OBJECTS) as other:
            one.execute("context['a'].clear()")
            assert other.execute("print(context)").stdout == f"{OBJECTS}\n"
            assert one.execute("import os; os._exit(1)").status == "killed"
            assert one.execute("print(context)").stdout == f"{OBJECTS}\n"


def test_a_worker_that_is_killed_from_outside_is_replaced_with_the_context() -> None:
    with Sandbox(Limits(interrupt_grace_s=0.1), warm=0) as sandbox:
        places(sandbox, OBJECTS)
        others = living_below()
        with sandbox.repl(OBJECTS) as repl:
            running = next(process for process in living_below() - others if not process.children())
            init = psutil.Process(running.ppid())
            assert repl.execute("import os; os._exit(1)").status == "killed"
            init.kill()
            assert repl.execute("print(context)").stdout == f"{OBJECTS}\n"


def test_contexts_of_one_size_are_told_apart_by_what_is_in_them() -> None:
    with Sandbox(warm=0) as sandbox:
        before = fork_servers()
        for context in (OBJECTS, OF_THE_SAME_SIZE, OBJECTS, OF_THE_SAME_SIZE, OF_THE_SAME_SIZE):
            (found,) = places(sandbox, context, times=1)
            assert found.split()[1] == str(context["a"][0])  # type: ignore[index]
        assert len(fork_servers() - before) == 2


async def test_many_that_begin_at_once_share_one_fork_server() -> None:
    async with Sandbox(warm=0) as sandbox, contextlib.AsyncExitStack() as stack:
        before = fork_servers()
        with store(OBJECTS) as stored:
            repls = [sandbox.repl(stored) for _ in range(8)]
            await asyncio.gather(*map(stack.enter_async_context, repls))
        found = [(await repl.aexecute(WHERE)).stdout for repl in repls]
        assert len(fork_servers() - before) == 1
        assert sorted(map(found.count, set(found))) == [1, 7]
    assert not living_below()


async def test_starts_that_are_cancelled_leave_nothing_and_do_not_spoil_it_for_others() -> None:
    async with Sandbox(warm=0) as sandbox:
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
            assert sandbox._shared is not None
            assert [shared.users for shared in sandbox._shared._listed.values()] == [0]
    assert not living_below()


def test_who_was_used_least_recently_goes_when_memory_is_short(monkeypatch: pytest.MonkeyPatch) -> None:
    with room_for_one(monkeypatch), Sandbox(warm=0) as sandbox:
        before = fork_servers()
        places(sandbox, OBJECTS)
        (first,) = fork_servers() - before
        places(sandbox, OF_THE_SAME_SIZE)
        first.wait(30)
        assert len(fork_servers() - before) == 1


def test_one_whose_repls_live_is_not_ended_for_another(monkeypatch: pytest.MonkeyPatch) -> None:
    with room_for_one(monkeypatch), Sandbox(warm=0) as sandbox:
        before = fork_servers()
        places(sandbox, OBJECTS)
        with sandbox.repl(OBJECTS) as repl:
            (server,) = fork_servers() - before
            assert [place.split()[1] for place in places(sandbox, OF_THE_SAME_SIZE)] == ["3"] * 3
            assert fork_servers() - before == {server}
            assert repl.execute("print(context['c'])").stdout == "0.5\n"


def test_a_fork_server_that_died_is_done_without() -> None:
    with Sandbox(warm=0) as sandbox:
        before = fork_servers()
        places(sandbox, OBJECTS)
        (server,) = fork_servers() - before
        for process in server.children():
            process.kill()
        server.wait(30)
        assert [place.split()[1] for place in places(sandbox, OBJECTS)] == ["1"] * 3


@pytest.mark.parametrize("level", ["standard", "process"])
@pytest.mark.filterwarnings("ignore:.*no security boundary")
def test_outside_of_walls_nothing_is_decoded(level: str) -> None:
    with Sandbox(isolation=level, warm=0) as sandbox:
        before = fork_servers()
        places(sandbox, OBJECTS)
        assert fork_servers() == before


def test_runs_that_are_asked_about_one_context_share_it() -> None:
    with RLM(ScriptedClient(["```repl\nFINAL(id(context))\n```"] * 3)) as rlm:
        first, second, third = [rlm.completion(OBJECTS, "where is it?").response for _ in range(3)]
    assert first != second
    assert second == third
