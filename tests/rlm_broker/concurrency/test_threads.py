"""Sources of the user's that stall: they cost their own run its time, and no other run anything."""

import asyncio
import os
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from rlm_broker import RLM, LimitReached, Sandbox
from rlm_broker.broker.clients.script import ScriptedClient
from rlm_broker.concurrency.threads import _TURNS, aside, in_thread
from tests.support.forked_python import Python
from tests.support.waiting import WAIT_S, until

LEFT_STALLED = """
import asyncio, os, threading
from rlm_broker import RLM, LimitReached
from rlm_broker.broker.clients.script import ScriptedClient

read_end, write_end = os.pipe()
with RLM(ScriptedClient([])) as rlm:
    try:
        rlm.completion(open(read_end, "rb"), "what?", timeout_s=0.1)
    except LimitReached as error:
        print(error, flush=True)
"""


class Stalled:
    """A stream that gives a piece, and then waits until it is released."""

    def __init__(self) -> None:
        self.begun = threading.Event()
        self.released = threading.Event()
        self.pieces = 0

    def read(self, _size: int) -> bytes:
        """Return the next piece."""
        self.pieces += 1
        if self.pieces > 1:
            self.begun.set()
            self.released.wait()
        return b"a piece "


@pytest.fixture
def stalled() -> Iterator[list[Stalled]]:
    """Twelve streams, which are released at the end."""
    streams = [Stalled() for _ in range(12)]
    yield streams
    for each in streams:
        each.released.set()


@pytest.fixture(scope="module")
def model() -> ScriptedClient:
    return ScriptedClient(["```repl\nFINAL(len(context))\n```"] * 50)


async def test_stalled_stream_ends_its_run_at_the_limit_and_no_other(
    stalled: list[Stalled], model: ScriptedClient
) -> None:
    async with Sandbox() as sandbox, RLM(model, sandbox=sandbox) as rlm:
        others = [asyncio.create_task(rlm.acompletion(each, "how long?")) for each in stalled[1:]]
        await until(lambda: all(each.begun.is_set() for each in stalled[1:]))
        with pytest.raises(LimitReached, match=r"^the limit run_timeout_s = 0.1 was reached, 0.1 used$"):
            await rlm.acompletion(stalled[0], "how long?", timeout_s=0.1)
        assert (await rlm.acompletion("abc", "how long?", timeout_s=WAIT_S)).response == "3"
        async with sandbox.repl(["a"]) as repl:
            await repl.files.awrite("file", b"1")
            await repl.aexecute("x = [1]")
            assert await repl.aget("x") == [1]
        for other in others:
            other.cancel()
        await asyncio.wait(others)
        assert all(other.cancelled() for other in others)
        before = [each.pieces for each in stalled]
        for each in stalled:
            each.released.set()
        await until(lambda: _memfds() == 0)  # what was read is closed, and no further piece is
        assert [each.pieces for each in stalled] == before


async def test_stop_ends_a_reading_that_stalls(
    stalled: list[Stalled], model: ScriptedClient, open_sandbox: Sandbox
) -> None:
    async with RLM(model, sandbox=open_sandbox) as rlm:
        run = rlm.start(stalled[0], "how long?")
        await until(stalled[0].begun.is_set)
        run.stop()
        completion = await asyncio.wait_for(run, WAIT_S)
        assert (completion.response, completion.is_stopped, completion.trajectory) == (None, True, ())


async def test_reading_counts_as_time_of_the_run(model: ScriptedClient, open_sandbox: Sandbox) -> None:
    taken_s = list[float]()

    class Slow:
        def read(self, _size: int) -> bytes:
            started = time.monotonic()
            threading.Event().wait(0.1)
            taken_s.append(time.monotonic() - started)
            return b"" if len(taken_s) > 1 else b"a piece "

    async with RLM(model, sandbox=open_sandbox) as rlm:
        done = await rlm.acompletion(Slow(), "how long?")
    assert done.execution_time >= sum(taken_s)


async def test_many_stalled_calls_do_not_stop_the_next() -> None:
    release = threading.Event()
    stuck = [asyncio.create_task(in_thread(lambda _: release.wait())) for _ in range(70)]
    try:
        assert await asyncio.wait_for(in_thread(lambda _: 7), WAIT_S) == 7
    finally:
        release.set()
        await asyncio.gather(*stuck)


@pytest.mark.parametrize("is_stuck", [False, True])
async def test_late_result_is_discarded_and_the_end_is_told_once(is_stuck: bool) -> None:
    begun, release, told = threading.Event(), threading.Event(), list[str]()

    def work(stop: threading.Event) -> str:
        begun.set()
        (release if is_stuck else stop).wait()
        return "late"

    call = asyncio.create_task(in_thread(work, discard=told.append, at_end=lambda: told.append("end")))
    await until(begun.is_set)
    call.cancel()
    await asyncio.wait({call})
    assert call.cancelled()
    if is_stuck:
        assert told == []
        release.set()
    await until(lambda: len(told) == 2)
    assert told == ["end", "late"]


def test_stalled_stream_does_not_delay_the_exit() -> None:
    with Python(["-c", LEFT_STALLED], takes_down=True) as program:
        out, err = program.communicate()
    assert (out, err, program.returncode) == ("the limit run_timeout_s = 0.1 was reached, 0.1 used\n", "", 0)


def _memfds() -> int:
    return sum("memfd:context" in os.readlink(fd) for fd in _descriptors())  # noqa: PTH115 - it is no path


def _descriptors() -> list[Path]:
    return [fd for fd in Path("/proc/self/fd").iterdir() if fd.is_symlink()]


async def test_works_go_round_the_owners() -> None:
    """The works of one owner leave each second turn to another, also if their callers have left."""
    goes_on, order = threading.Event(), list[str]()

    def check(owner: str) -> None:
        goes_on.wait(WAIT_S)
        order.append(owner)

    greedy = [asyncio.create_task(aside(lambda: check("eve"), "eve")) for _ in range(20)]
    await asyncio.sleep(0)
    turns = _TURNS[asyncio.get_running_loop()]
    assert turns.waiting_of("eve") == 18
    with pytest.raises(asyncio.QueueFull):
        await aside(lambda: check("eve"), "eve", 18)
    for begun in greedy[:2]:
        begun.cancel()
    honest = [asyncio.create_task(aside(lambda: check("ann"), "ann")) for _ in range(3)]
    await asyncio.sleep(0)
    assert (turns.waiting_of("eve"), turns.waiting_of("ann")) == (
        18,
        3,
    )  # the threads of those that were cancelled go on
    goes_on.set()
    await asyncio.gather(*honest)
    await asyncio.gather(*greedy, return_exceptions=True)
    last = len(order) - order[::-1].index("ann")
    assert order[:last].count("eve") <= 2 + 3 + 2
    assert turns.waiting_of("eve") == 0
