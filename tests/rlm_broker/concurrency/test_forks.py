"""Processes that are forked from this one while sandboxes are open."""

import asyncio
import contextlib
import ctypes
import json
import os
import signal
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

from rlm_broker import Sandbox
from rlm_broker.sandbox.workers import zygote_process
from tests.support.forked_child import in_child
from tests.support.forked_python import Python
from tests.support.launcher import needs_strict
from tests.support.waiting import WAIT_S, until_now

LEVELS = [pytest.param("strict", marks=needs_strict), "standard", "process"]
ORCHESTRATOR = """
import ctypes, json, multiprocessing, signal, sys, threading, time, warnings
import psutil
from rlm_broker import Sandbox

def below():
    return [process.pid for process in psutil.Process().children(recursive=True)]

warnings.simplefilter("ignore")
with Sandbox(isolation=sys.argv[1]) as sandbox:
    if sys.argv[2] == "working":
        repl = sandbox.repl().__enter__()
        repl.execute("pass")
        threading.Thread(target=repl.execute, args=("while True: pass",), daemon=True).start()
    else:
        template = sandbox.template(setup="while True: pass", timeout_s=1000)
        busy = below()
        threading.Thread(target=template.__enter__, daemon=True).start()
        while len(below()) <= len(busy):
            time.sleep(0.01)
    sandboxed = below()
    pool = multiprocessing.get_context("fork").Pool(1)
    if ctypes.PyDLL(None).fork() == 0:
        signal.pause()
    print(json.dumps([sandboxed, [pid for pid in below() if pid not in sandboxed]]), flush=True)
    signal.pause()
"""


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("phase", ["working", "preparing"])
def test_sigkill_ends_every_process_beside_forked_ones(level: str, phase: str) -> None:
    """Processes forked by Python and by C code live on, and hold what they inherited."""
    with Python(["-c", ORCHESTRATOR, level, phase]) as orchestrator:
        assert orchestrator.stdout is not None
        sandboxed, forked = (
            [psutil.Process(pid) for pid in pids] for pids in json.loads(orchestrator.stdout.readline())
        )
        try:
            orchestrator.kill()
            until_now(lambda: not any(map(_lives, sandboxed)))
            assert all(map(_lives, forked))
            assert len(sandboxed) >= 2
        finally:
            orchestrator.kill()
            for each in forked:
                each.kill()


@pytest.mark.parametrize("fork", [os.fork, ctypes.PyDLL(None).fork])
async def test_close_does_not_wait_for_a_forked_process(
    fork: Callable[[], int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The fork server ends by itself, and is not killed after a time, also if C code has forked."""
    monkeypatch.setattr(zygote_process, "END_TIMEOUT_S", 10 * WAIT_S)
    async with Sandbox(warm=0) as sandbox:
        if (pid := fork()) == 0:
            while True:
                signal.pause()
        try:
            async with asyncio.timeout(WAIT_S):
                await sandbox.aclose()
        finally:
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)


async def test_forked_process_keeps_no_socket_and_no_pidfd() -> None:
    before = _shared_with_others()
    async with Sandbox() as sandbox, sandbox.repl() as repl:
        await repl.aexecute("pass")
        assert len(_shared_with_others() - before) >= 6
        assert set(in_child(lambda: sorted(_shared_with_others()))) - before == set()
        assert (await repl.aexecute("print('here')")).stdout == "here\n"


def _shared_with_others() -> set[str]:
    """Sockets and pidfds of this process, each with its number."""
    found = set()
    for fd in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(FileNotFoundError):  # that of the folder
            found.add(f"{fd.name} {os.readlink(fd)}")  # noqa: PTH115 - it is no path
    return {each for each in found if "socket:" in each or "pidfd" in each}


def _lives(process: psutil.Process) -> bool:
    try:
        return bool(process.status() != psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return False
