"""The host's handle on a worker, with an init that the test plays."""

import asyncio
import os
import socket
import subprocess

import pytest

from rlm_broker.errors import WorkerDied
from rlm_broker.sandbox.worker import Worker
from sandbox_worker.wire.control import MAX_PACKET_BYTES, Drain, unpack_to_init


async def test_whoever_waits_for_an_answer_is_told_when_the_worker_is_killed() -> None:
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with theirs, subprocess.Popen(["sleep", "1000"]) as init:
        worker = Worker("strict", os.pidfd_open(init.pid), ours)
        before = asyncio.all_tasks()
        waiting = asyncio.create_task(worker.drain())
        theirs.setblocking(False)
        said = await asyncio.get_running_loop().sock_recv(theirs, MAX_PACKET_BYTES)
        assert unpack_to_init(said) == Drain()
        await worker.kill()
        with pytest.raises(WorkerDied):
            await asyncio.wait_for(waiting, 5)  # a tenth of a second is enough; an answer would be awaited for ten
        assert asyncio.all_tasks() == before
