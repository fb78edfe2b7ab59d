"""Calls of a process that has few free descriptors: each is an answer or one sentence, and none is left open."""

import asyncio
import contextlib
import os
import resource
import time
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from functools import partial
from pathlib import Path

from rlm_broker import RLM, Sandbox
from rlm_broker.broker.clients.script import ScriptedClient
from rlm_broker.errors import SandboxFailed
from sandbox_worker.wire.level import LevelName
from scripts.faults import leftovers
from scripts.faults.cell import Report, Scene

FREE = range(16)
"""Numbers of free descriptors that are tried."""
MOST = 256
"""Descriptors that the process may have, for good: more than a run takes, and quickly taken."""
Few = AbstractContextManager[None]
Call = Callable[[Few], Awaitable[object]]


def few_descriptors(level: LevelName) -> Scene:
    """Open a sandbox, a REPL and a run, and start a killed REPL again, with each number of free descriptors."""

    def scene(_folder: Path) -> Report:
        limit_descriptors()
        return asyncio.run(_swept(level))

    return scene


def limit_descriptors() -> None:
    """Let this process have `MOST` descriptors, for good."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (MOST, min(MOST, hard)))


async def _swept(level: LevelName) -> Report:
    report, wrong = Report(), list[str]()
    counts = {"answers": 0, "errors": 0}
    async with Sandbox(isolation=level, warm=0) as sandbox, RLM(_model(), sandbox=sandbox) as rlm:
        calls: dict[str, Call] = {
            "sandbox": partial(_open_sandbox, level),
            "REPL": partial(_open_repl, sandbox),
            "restart": partial(_restart, sandbox),
            "run": partial(_run, rlm),
        }
        for name, call in calls.items():
            await call(contextlib.nullcontext())  # what is made once is there now
            for free in FREE:
                said, left = await _tried(call, free)
                counts["errors" if said else "answers"] += 1
                wrong += [f"{name}, {free} free: {said}"] if said and not _is_sentence(said) else []
                report.left += [f"{name}, {free} free: {each}" for each in left]
    report.told = "; ".join([", ".join(f"{number} {kind}" for kind, number in counts.items()), *wrong[:5]])
    report.is_sensible = not wrong and all(counts.values())
    return report


async def _tried(call: Call, free: int) -> tuple[str, Sequence[str]]:
    """Make a call. Return its error, which is empty if it succeeded, and what it left open."""
    before, said = leftovers.descriptors(), ""
    try:
        await call(with_free(free))
    except SandboxFailed as error:
        said = str(error)
    except Exception as error:  # noqa: BLE001 - the report tells it
        said = f"{type(error).__name__}: {error}"
    until = time.monotonic() + leftovers.WAIT_S
    while (left := leftovers.more(leftovers.descriptors(), before, "descriptor")) and time.monotonic() < until:
        await asyncio.sleep(leftovers.PAUSE_S)
    return said, left


def _is_sentence(said: str) -> bool:
    return "(`ulimit -n 4096`)" in said and "\n" not in said and "Error" not in said and ". " not in said


@contextlib.contextmanager
def with_free(number: int) -> Iterator[None]:
    """Take all descriptors but this number, after `limit_descriptors`."""
    taken = []
    with contextlib.suppress(OSError):
        while True:
            taken.append(os.open(os.devnull, os.O_RDONLY))
    try:
        for _ in range(number):
            os.close(taken.pop())
        yield
    finally:
        for fd in taken:
            os.close(fd)


def _model() -> ScriptedClient:
    return ScriptedClient(["```repl\nprint(1)\n```", "```repl\nFINAL('done')\n```"] * (len(FREE) + 1))


async def _open_sandbox(level: LevelName, few: Few) -> None:
    with few:
        async with Sandbox(isolation=level, warm=0):
            pass


async def _open_repl(sandbox: Sandbox, few: Few) -> None:
    with few:
        async with sandbox.repl("x" * (1 << 17)):
            pass


async def _restart(sandbox: Sandbox, few: Few) -> None:
    async with sandbox.repl() as repl:
        with few:
            await repl.aexecute("import os; os._exit(1)")
            await repl.aexecute("pass")


async def _run(rlm: RLM, few: Few) -> None:
    with few:
        await rlm.acompletion("the context", "the question")
