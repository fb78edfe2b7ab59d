"""`Worker`, the orchestrator's handle on a worker, with an init that the test plays."""

import asyncio
import os
import signal
import socket
import subprocess
from collections.abc import Iterator

import pytest

from rlm_broker.errors import IsolationUnavailable, SandboxFailed, WorkerDied
from rlm_broker.sandbox.workers.held_process import InitProcess
from rlm_broker.sandbox.workers.worker import Worker
from sandbox_worker.wire.control import (
    MAX_PACKET_BYTES,
    Drain,
    Exceeded,
    Failed,
    LastSeen,
    ProgramEnded,
    pack,
    unpack_to_init,
)
from sandbox_worker.wire.level import STANDARD, STRICT
from tests.support.clock import Clock

WAIT_S = 60
FAILED = pack(Failed(step="lock down", reason="chown: Operation not permitted", layer="own uid", code=1))


@pytest.fixture
def sockets() -> Iterator[tuple[socket.socket, socket.socket]]:
    """The orchestrator's end of a control socket, and init's."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with ours, theirs:
        yield ours, theirs


async def test_waiting_caller_is_told_when_the_worker_is_killed(
    sockets: tuple[socket.socket, socket.socket], clock: Clock
) -> None:
    del clock  # it stands still, so that no answer is ever late
    ours, theirs = sockets
    with subprocess.Popen(["sleep", "1000"]) as init:
        worker = Worker(STRICT, InitProcess(os.pidfd_open(init.pid), ours))
        before = asyncio.all_tasks()
        waiting = asyncio.create_task(worker.drain())
        theirs.setblocking(False)
        said = await asyncio.get_running_loop().sock_recv(theirs, MAX_PACKET_BYTES)
        assert unpack_to_init(said) == Drain()
        await worker.kill()
        with pytest.raises(WorkerDied):
            await waiting
        assert asyncio.all_tasks() == before


async def test_unsignallable_worker_ends_with_its_control_socket(
    sockets: tuple[socket.socket, socket.socket], monkeypatch: pytest.MonkeyPatch
) -> None:
    """An orchestrator that is root without CAP_KILL, or confined by AppArmor, gets EPERM for every signal."""

    def refused(_pidfd: int, _number: int) -> None:
        raise PermissionError(1, "Operation not permitted")

    ours, theirs = sockets
    with subprocess.Popen(["cat"], stdin=theirs.fileno(), stdout=subprocess.DEVNULL) as init:
        theirs.close()
        monkeypatch.setattr(signal, "pidfd_send_signal", refused)
        worker = Worker(STRICT, InitProcess(os.pidfd_open(init.pid), ours))
        await asyncio.wait_for(worker.kill(), WAIT_S)
        assert worker.gone.is_set()
        assert ours.fileno() == -1


async def test_last_words_are_readable_while_a_worker_is_killed(
    sockets: tuple[socket.socket, socket.socket],
) -> None:
    ours, theirs = sockets
    with subprocess.Popen(["sleep", "1000"]) as init:
        worker = Worker(STRICT, InitProcess(os.pidfd_open(init.pid), ours))
        exceeded = Exceeded("cpu_s", 2, 1, LastSeen())
        theirs.send(pack(exceeded))
        await worker.kill()
        assert worker.died == exceeded


@pytest.mark.parametrize("when", ["before it reads what the host says", "before the host says anything"])
async def test_failed_workers_reason_is_told_at_any_moment(
    sockets: tuple[socket.socket, socket.socket], when: str
) -> None:
    """Unread messages make the read fail with ECONNRESET; a closed socket makes the send fail with EPIPE."""
    ours, theirs = sockets
    loop = asyncio.get_running_loop()
    theirs.setblocking(False)
    with subprocess.Popen(["sleep", "1000"]) as init, open(os.devnull) as connection:
        worker = Worker(STANDARD, InitProcess(os.pidfd_open(init.pid), ours))
        if when == "before the host says anything":
            theirs.send(FAILED)
            theirs.close()
        launching = asyncio.create_task(worker.launch(None, connection.fileno(), WAIT_S))
        if when == "before it reads what the host says":
            await loop.sock_recv(theirs, MAX_PACKET_BYTES)  # Load; Start is left unread
            theirs.send(FAILED)
            theirs.close()
        with pytest.raises(IsolationUnavailable, match="chown: Operation not permitted") as caught:
            await launching
        assert caught.value.layer == "own uid"
        with pytest.raises(WorkerDied):  # at once, for a request after its end
            await asyncio.wait_for(worker.drain(), WAIT_S)
        assert not worker.gone.is_set()
        await worker.kill()


@pytest.mark.parametrize("number", [1, 2, -1])
async def test_init_reporting_an_unknown_program_is_killed(
    sockets: tuple[socket.socket, socket.socket], number: int
) -> None:
    """An init that tells of a program that does not run is killed."""
    ours, theirs = sockets
    with subprocess.Popen(["sleep", "1000"]) as init, open(os.devnull) as null:
        worker = Worker(STRICT, InitProcess(os.pidfd_open(init.pid), ours))
        program = worker.run_program([], null.fileno())
        theirs.send(pack(ProgramEnded(1, exit_code=0)))  # init sends this once
        theirs.send(pack(ProgramEnded(number, exit_code=0)))
        await asyncio.wait_for(worker.gone.wait(), WAIT_S)
        assert program.ended.result() == ProgramEnded(1, exit_code=0)
        await worker.kill()


async def test_init_that_does_not_end_a_program_is_killed(
    sockets: tuple[socket.socket, socket.socket], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("rlm_broker.sandbox.workers.worker.PROGRAM_END_S", 0.05)
    ours, _ = sockets
    with subprocess.Popen(["sleep", "1000"]) as init, open(os.devnull) as null:
        worker = Worker(STRICT, InitProcess(os.pidfd_open(init.pid), ours))
        program = worker.run_program([], null.fileno())
        with pytest.raises(SandboxFailed, match=r"a program did not end within 0\.05 s"):
            await worker.end_program(program)
        assert worker.gone.is_set()
        assert program.ended.result() is None
        assert worker.run_program([], null.fileno()).ended.result() is None
