"""Processes that have a control socket, in a folder of the test's own."""

import asyncio
import contextlib
import os
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from rlm_broker.watch.client import MachineRuns
from rlm_broker.watch.messages import ProcessStatus
from tests.support.command import ENVIRONMENT
from tests.support.forked_python import Python, python
from tests.support.waiting import WAIT_S

LIBRARY = """
import sys
from rlm_broker import RLM
from rlm_broker.broker.clients.script import ScriptedClient

question, *replies = sys.argv[1:]
with RLM(ScriptedClient(replies, cost_per_call=0.25)) as rlm:
    print(rlm.completion("a context", question).response)
"""
SPINS = "```repl\nimport time\nwhile True: time.sleep(0.01)\n```"
"""Reply whose block ends by an interruption alone."""


def environment(**more: str) -> dict[str, str]:
    """Variables of a command that shares the folder of sockets with the test."""
    return {**ENVIRONMENT, "XDG_RUNTIME_DIR": os.environ["XDG_RUNTIME_DIR"], **more}


@contextlib.contextmanager
def process(arguments: list[str | Path], **more: str) -> Iterator[Python]:
    """A process, which is killed if it has not ended at the end of the test."""
    with Python(arguments, env=environment(**more)) as started:
        try:
            yield started
        finally:
            started.kill()


def command(*arguments: str | Path) -> contextlib.AbstractContextManager[Python]:
    """`rlm-broker` with these arguments."""
    return process(["-m", "rlm_broker", *arguments])


def library(question: str, *replies: str) -> contextlib.AbstractContextManager[Python]:
    """A program of a user's that asks for a control socket, and answers one question."""
    return process(["-c", LIBRARY, question, *replies], RLM_BROKER_CONTROL="1")


def run(*arguments: str) -> "subprocess.CompletedProcess[str]":
    """One command of rlm-broker's, to its end."""
    return python("-m", "rlm_broker", *arguments, env=environment())


async def seen(pid: int, is_so: Callable[[ProcessStatus], Any]) -> ProcessStatus:
    """The status of a process, once it is so.

    Raises:
        StopAsyncIteration: It was never so.
    """
    async with asyncio.timeout(WAIT_S):
        while True:
            for found in await MachineRuns().processes():
                if found.pid == pid and is_so(found):
                    return found
            await asyncio.sleep(0.02)
