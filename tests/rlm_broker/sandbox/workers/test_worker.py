"""`Worker`, the orchestrator's handle on a worker, with an init that the test plays."""

import asyncio
import os
import signal
import socket
import subprocess
from collections.abc import AsyncIterator, Iterator

import pytest
import pytest_asyncio

from rlm_broker.errors import IsolationUnavailable, SandboxFailed, WorkerDied
from rlm_broker.sandbox.workers.held_process import InitProcess
from rlm_broker.sandbox.workers.worker import Worker
from sandbox_worker.wire.control import (
    MAX_PACKET_BYTES,
    Drain,
    Drained,
    Exceeded,
    Failed,
    Forked,
    Interrupt,
    Interrupted,
    LastSeen,
    ProgramEnded,
    pack,
    unpack_to_init,
)
from sandbox_worker.wire.level import STRICT

WAIT_S = 60
FAILED = pack(Failed(step="lock down", reason="chown: Operation not permitted", layer="own uid", code=1))


@pytest.fixture
def sockets() -> Iterator[tuple[socket.socket, socket.socket]]:
    """The orchestrator's end of a control socket, and init's."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with ours, theirs:
        yield ours, theirs


@pytest_asyncio.fixture
async def worker(sockets: tuple[socket.socket, socket.socket]) -> AsyncIterator[Worker]:
    """A worker at `strict`, whose init sleeps: the test speaks for it, on the other end of the socket."""
    with subprocess.Popen(["sleep", "1000"]) as init:
        made = Worker(STRICT, InitProcess(os.pidfd_open(init.pid), sockets[0]))
        yield made
        await made.kill()


@pytest.fixture
def theirs(sockets: tuple[socket.socket, socket.socket]) -> socket.socket:
    """Init's end of the control socket."""
    sockets[1].setblocking(False)
    return sockets[1]


@pytest.fixture
def null() -> Iterator[int]:
    with open(os.devnull) as file:
        yield file.fileno()


@pytest.mark.usefixtures("clock")  # it stands still, so that no answer is ever late
async def test_waiting_caller_is_told_when_the_worker_is_killed(worker: Worker, theirs: socket.socket) -> None:
    before = asyncio.all_tasks()
    waiting = asyncio.create_task(worker.drain())
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


async def test_last_words_are_readable_while_a_worker_is_killed(worker: Worker, theirs: socket.socket) -> None:
    exceeded = Exceeded("cpu_s", 2, 1, LastSeen())
    theirs.send(pack(exceeded))
    await worker.kill()
    assert worker.died == exceeded


async def test_repl_told_while_its_worker_is_killed_ends_with_it(worker: Worker, theirs: socket.socket) -> None:
    with subprocess.Popen(["sleep", "1000"]) as repl:
        pidfd = os.pidfd_open(repl.pid)
        socket.send_fds(theirs, [pack(Forked())], [pidfd])  # read after `kill` has looked for a REPL
        os.close(pidfd)
        await worker.kill()
        ended = repl.poll()
        repl.kill()
    assert ended == -signal.SIGKILL


async def test_answers_of_a_cancelled_caller_are_taken(worker: Worker, theirs: socket.socket) -> None:
    """The next caller waits for its turn, and gets its own answer."""
    loop = asyncio.get_running_loop()
    left = asyncio.create_task(worker.interrupt(1))
    assert unpack_to_init(await loop.sock_recv(theirs, MAX_PACKET_BYTES)) == Interrupt(block=1)
    next_one = asyncio.create_task(worker.drain())
    left.cancel()
    await asyncio.wait({left})
    assert left.cancelled()
    theirs.send(pack(Interrupted()))
    assert unpack_to_init(await loop.sock_recv(theirs, MAX_PACKET_BYTES)) == Drain()
    theirs.send(pack(Drained()))
    await next_one


@pytest.mark.parametrize("is_early", [False, True])
async def test_failed_workers_reason_is_told_at_any_moment(
    worker: Worker, theirs: socket.socket, null: int, is_early: bool
) -> None:
    """Unread messages make the read fail with ECONNRESET; a closed socket makes the send fail with EPIPE."""
    if is_early:
        theirs.send(FAILED)
        theirs.close()
    launching = asyncio.create_task(worker.launch(None, null, WAIT_S))
    if not is_early:
        await asyncio.get_running_loop().sock_recv(theirs, MAX_PACKET_BYTES)  # Load; Start is left unread
        theirs.send(FAILED)
        theirs.close()
    with pytest.raises(IsolationUnavailable, match="chown: Operation not permitted") as caught:
        await launching
    assert caught.value.layer == "own uid"
    with pytest.raises(WorkerDied):  # at once, for a request after its end
        await asyncio.wait_for(worker.drain(), WAIT_S)
    assert not worker.gone.is_set()


@pytest.mark.parametrize("number", [1, 2, -1])
async def test_init_reporting_an_unknown_program_is_killed(
    worker: Worker, theirs: socket.socket, null: int, number: int
) -> None:
    program = worker.run_program([], null)
    theirs.send(pack(ProgramEnded(1, exit_code=0)))  # init sends this once
    theirs.send(pack(ProgramEnded(number, exit_code=0)))
    await asyncio.wait_for(worker.gone.wait(), WAIT_S)
    assert program.ended.result() == ProgramEnded(1, exit_code=0)


async def test_init_that_does_not_end_a_program_is_killed(
    worker: Worker, null: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("rlm_broker.sandbox.workers.worker.PROGRAM_END_S", 0.05)
    program = worker.run_program([], null)
    with pytest.raises(SandboxFailed, match=r"a program did not end within 0\.05 s"):
        await worker.end_program(program)
    assert worker.gone.is_set()
    assert program.ended.result() is None
    assert worker.run_program([], null).ended.result() is None
