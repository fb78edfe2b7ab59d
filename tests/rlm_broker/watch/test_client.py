import asyncio
import os
import signal
import socket
from pathlib import Path

import psutil
import pytest

from rlm_broker.errors import ConfigurationError, RlmBrokerError
from rlm_broker.watch import client, folder
from rlm_broker.watch.client import MachineRuns
from rlm_broker.watch.messages import PROCESS
from tests.support.controlled import SPINS, command, library, seen
from tests.support.skips import NEEDS_ROOT
from tests.support.waiting import WAIT_S, until_now


@pytest.fixture
def program(tmp_path: Path) -> Path:
    path = tmp_path / "spins.py"
    path.write_text("print('begun', flush=True)\nimport time; time.sleep(1000)\n")
    return path


async def test_all_processes_tell_what_they_do(program: Path) -> None:
    with command("exec", program) as runs, library("How long?", SPINS) as answers:
        of_exec = await seen(runs.pid, lambda found: any(repl.state == "busy" for repl in found.repls))
        await seen(answers.pid, lambda found: any(run.doing == "runs block 1" for run in found.runs))
        of_library = await seen(answers.pid, lambda found: any(repl.memory_bytes for repl in found.repls))
        found = await MachineRuns().processes(WAIT_S)
    assert {status.pid for status in found} == {runs.pid, answers.pid}
    assert (of_exec.command, of_library.command) == ("exec", "python")
    assert of_exec.runs == ()
    (run,), (repl,) = of_library.runs, of_library.repls
    assert (run.question, run.model, run.turn, run.state) == ("How long?", "scripted", 1, "running")
    assert (run.cost_usd, repl.run) == (0.25, run.id)
    assert run.tokens > 0
    assert repl.memory_bytes > 1 << 20


async def test_suspended_process_is_named_and_skipped(program: Path) -> None:
    with command("exec", program) as hangs, library("How long?", SPINS) as answers:
        await seen(hangs.pid, lambda found: found.repls)
        await seen(answers.pid, lambda found: found.runs)
        os.kill(hangs.pid, signal.SIGSTOP)
        until_now(lambda: psutil.Process(hangs.pid).status() == psutil.STATUS_STOPPED)
        hung = await seen(hangs.pid, lambda found: found.is_hung)
        assert (hung.command, hung.runs, hung.repls) == ("exec", (), ())
        await seen(answers.pid, lambda found: not found.is_hung)
        os.kill(hangs.pid, signal.SIGCONT)
        await seen(hangs.pid, lambda found: found.repls)


async def test_full_queue_of_connections_is_a_hung_process() -> None:
    """A suspended process accepts none: at some time the kernel lets no more wait."""
    with folder.opened(makes=True) as place, socket.socket(socket.AF_UNIX) as listening:
        assert place is not None
        name = folder.SocketName.own("serve")
        listening.bind(folder.address(place, name))
        listening.listen(0)
        waiting = [client._connected(place, name)]
        (found,) = await MachineRuns().processes()
        assert found.is_hung
        assert (found.pid, found.command) == (os.getpid(), "serve")
        with pytest.raises(RlmBrokerError, match="does not answer"):
            await MachineRuns().end(os.getpid(), PROCESS)
        for each in waiting:
            assert each is not None
            each.close()


async def test_socket_of_a_killed_process_is_removed(program: Path, tmp_path: Path) -> None:
    with command("exec", program) as killed:
        await seen(killed.pid, lambda found: found.repls)
        killed.kill()
        killed.wait()
    assert len(list((tmp_path / "rlm-broker").iterdir())) == 1
    assert await MachineRuns().processes(WAIT_S) == []
    assert list((tmp_path / "rlm-broker").iterdir()) == []


async def test_followed_process_that_is_killed_is_named() -> None:
    with library("How long?", SPINS) as answers:
        status = await seen(answers.pid, lambda found: found.runs)
        lines = client.follow(answers.pid, status.runs[0].id)
        assert b'"event":"run_started"' in await anext(lines)
        answers.kill()
        with pytest.raises(RlmBrokerError, match=f"the process {answers.pid} has ended"):
            async for _ in lines:
                pass


async def test_folder_without_a_socket_has_no_process_and_keeps_other_files(tmp_path: Path) -> None:
    assert await MachineRuns().processes() == []
    with pytest.raises(ConfigurationError, match="there is no process 1 with a control socket"):
        await MachineRuns().end(1, PROCESS)
    with folder.opened(makes=True):
        (tmp_path / "rlm-broker" / "notes").write_text("mine")
    assert await MachineRuns().processes() == []
    assert (tmp_path / "rlm-broker" / "notes").read_text() == "mine"


async def test_reply_that_is_no_status_is_a_hung_process() -> None:
    """A process of a later release may answer otherwise."""

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read(1)
        writer.write(b"\0\0\0\x02[]")
        writer.close()  # since 3.12.1 a server waits for its connections

    with folder.opened(makes=True) as place:
        assert place is not None
        listening = socket.socket(socket.AF_UNIX)
        listening.bind(folder.address(place, folder.SocketName.own("serve")))
        async with await asyncio.start_unix_server(answer, sock=listening):
            (found,) = await MachineRuns().processes(WAIT_S)
            with pytest.raises(RlmBrokerError, match="is of another release"):
                await MachineRuns().end(os.getpid(), PROCESS)
    assert found.is_hung


@pytest.mark.skipif(os.geteuid() != 0, reason=NEEDS_ROOT)
async def test_socket_of_another_user_is_not_asked() -> None:
    with folder.opened(makes=True) as place, socket.socket(socket.AF_UNIX) as listening:
        assert place is not None
        listening.bind(folder.address(place, folder.SocketName.own("serve")))
        os.seteuid(65534)
        try:
            listening.listen()
        finally:
            os.seteuid(0)
        assert await MachineRuns().processes(WAIT_S) == []
