"""Measurement: contenders by turns, with as many repetitions as needed, and the bare floors that rows share."""

import asyncio
import contextlib
import os
import socket
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

from rlm_broker.broker.clients.base import LMReply, LMRequest
from rlm_broker.usage import Usage


@dataclass(frozen=True)
class Effort:
    """Amount of work of a run of the bench: all of it, or a quick look whose figures say little."""

    quick: bool = False

    def times(self, usual: int) -> int:
        """Return the number of repetitions."""
        return max(2, usual // 20) if self.quick else usual

    def size(self, usual: int) -> int:
        """Return the number of bytes, or of things at the same time."""
        return max(1, usual // 50) if self.quick else usual


class Model:
    """A model that replies at once, by a function of the request.

    Args:
        reply: Returns the text of a reply.
        wait: Awaited before each reply to a query of code.
    """

    model_name = "bench"

    def __init__(
        self,
        reply: Callable[[LMRequest], str] = lambda _request: "ok",
        wait: Callable[[], Awaitable[object]] | None = None,
    ) -> None:
        self._reply = reply
        self._wait = wait

    async def complete(self, request: LMRequest) -> LMReply:
        """Answer one call."""
        if self._wait is not None and not request.is_loop:
            await self._wait()
        return LMReply(self._reply(request), Usage(total_calls=1))

    async def aclose(self) -> None:
        """Close no resource: there is none."""


async def many(count: int, at_once: int, work: Callable[[], Awaitable[Any]]) -> float:
    """Do the same thing many times, so many at a time; return how often a second it was done."""
    left = iter(range(count))

    async def worker() -> None:
        for _ in left:
            await work()

    started = time.perf_counter()
    await asyncio.gather(*(worker() for _ in range(at_once)))
    return count / (time.perf_counter() - started)


def seconds(work: Callable[[], object], times: int = 1) -> list[float]:
    """Return the seconds of each of `times` runs of `work`."""
    taken = []
    for _ in range(times):
        started = time.perf_counter()
        work()
        taken.append(time.perf_counter() - started)
    return taken


def opening_seconds(make: Callable[[], AbstractContextManager[object]], times: int = 1) -> list[float]:
    """Return the seconds from each call until it is open, such as a REPL with its context. Its end is not counted."""
    taken = []
    for _ in range(times):
        with contextlib.ExitStack() as stack:
            started = time.perf_counter()
            stack.enter_context(make())
            taken.append(time.perf_counter() - started)
    return taken


def by_turns(rounds: int, *works: Callable[[], Sequence[float]]) -> list[list[float]]:
    """Return all samples of each work. They take turns, so that other load of the machine meets them alike."""
    samples: list[list[float]] = [[] for _ in works]
    for _ in range(rounds):
        for work, taken in zip(works, samples, strict=True):
            taken += work()
    return samples


def bare_python(code: str = "pass", *options: str) -> None:
    """Run a python without isolation, from its start to the line that says that it has run `code`."""
    bare_pythons(1, code, *options)


def bare_pythons(count: int, code: str = "pass", *options: str) -> None:
    """Do as `bare_python`, many at once."""
    command = [sys.executable, "-I", *options, "-c", f"{code}\nprint(flush=True)\nimport os; os._exit(0)"]
    with contextlib.ExitStack() as stack:
        processes = [stack.enter_context(subprocess.Popen(command, stdout=subprocess.PIPE)) for _ in range(count)]
        for process in processes:
            assert process.stdout is not None
            process.stdout.readline()


class Echo:
    """A forked process that sends back what it gets over TCP on loopback; for the length of a `with`.

    Args:
        answer: What it sends for what it got; None is the same bytes.
    """

    def __init__(self, answer: Callable[[bytes], bytes] | None = None) -> None:
        self._answer = answer or bytes

    def __enter__(self) -> "Echo":
        with socket.create_server(("127.0.0.1", 0)) as server:
            self._ours = socket.create_connection(server.getsockname())
            theirs, _ = server.accept()
        for end in (self._ours, theirs):
            end.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._pid = os.fork()
        if self._pid == 0:
            self._ours.close()
            try:
                while data := theirs.recv(1 << 20):
                    theirs.sendall(self._answer(data))
            finally:
                os._exit(0)
        theirs.close()
        return self

    def __exit__(self, *_: object) -> None:
        self._ours.close()
        os.waitpid(self._pid, 0)

    def ask(self, data: bytes) -> bytes:
        """There and back. Both are small enough to arrive in one piece."""
        self._ours.sendall(data)
        return self._ours.recv(1 << 20)
