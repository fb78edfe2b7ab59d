"""Cost of operations, by counts that a busy machine does not change. No clock is read.

A change that makes an operation dearer raises `MOST` on purpose, in a commit of its own. `python -m scripts.bench costs`
says which process costs what, and `--against COMMIT` what another commit costs.
"""

import asyncio
import gc
import shutil
import socket
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from rlm_broker import RLM, Sandbox
from rlm_broker.broker.transport.connection import Connection
from rlm_broker.broker.transport.session import Session
from rlm_broker.events.event import TreeEvents
from rlm_broker.limits import Limits
from rlm_broker.run.calls import Caller, TreeCalls
from rlm_broker.run.ledger import Ledger
from rlm_broker.run.lm_handler import LMHandler
from sandbox_worker import RELEASE
from sandbox_worker.wire.messages import Hello, Query, Ready, Slot, encode
from scripts.bench import costs
from scripts.bench.costs import OPERATIONS, ROLES, counted, function_calls, functions_called
from scripts.bench.load import ONE_SHOT, QUERY, frame
from scripts.bench.measure import Model
from tests.support.launcher import needs_strict

MOST: dict[str, dict[str, float]] = {
    "spawn": {"frames": 3.2, "bytes": 141},
    "block": {"frames": 2.4, "bytes": 175},
    "query": {"frames": 4.2, "bytes": 235},
    "program": {"frames": 0.0, "bytes": 0.0},
    "run": {"frames": 9.5, "bytes": 650},
}
"""Operation → what is counted → most of it at "strict": 5 % above what it takes. The frames of a run's last block may be
missed. A block that is interrupted by another process within its first millisecond sends its output apart."""
MOST_FAULTS = {
    "3.11": {"spawn": 1210, "block": 8, "query": 8, "program": 20, "run": 1600},
    "3.12": {"spawn": 500, "block": 8, "query": 8, "program": 20, "run": 690},
    "3.13": {"spawn": 500, "block": 8, "query": 8, "program": 20, "run": 690},
}
"""Version of CPython → operation → most page faults of all processes. From 3.12 on, inherited objects are immortal. A
block faults only when memory grows."""
MOST_CALLS = {"block": 160, "query": 206, "batch of 100 queries": 206, "chat": 3_450, "streamed chat": 3_690}
"""Operation → most calls of Python functions in the orchestrator, its event loop included, of the cheapest of some: a
block that lasts 5 ms has init told of it."""
MOST_REQUEST_CALLS = {"session": 95, "one_shot": 180}
"""Way of asking → most calls of Python functions on the handler's loop for one request: 5 % above what it takes with
CPython 3.11, of which asyncio has a third."""
REQUESTS = 50
MOST_SYSTEM_CALLS = {"block": 24, "query": 32}
"""Operation → most system calls of the REPL. Beneath strace a block is slow, which costs three more."""


@needs_strict
@pytest.mark.parametrize("name", MOST)
async def test_operation_costs_no_more_than_table_says(name: str) -> None:
    most = MOST[name] | {"page faults": MOST_FAULTS[f"3.{sys.version_info.minor}"][name]}
    found = await counted(name, 20)
    took = {"page faults": sum(found[role]["page faults"] for role in ROLES), **found["connection"]}
    assert {what: took[what] for what in most if took[what] > most[what]} == {}


@needs_strict
@pytest.mark.skipif(sys.version_info[:2] != (3, 11), reason="calls are counted for asyncio of CPython 3.11")
@pytest.mark.parametrize("name", MOST_CALLS)
async def test_orchestrator_calls_no_more_functions_than_table_says(name: str) -> None:
    async with OPERATIONS[name](lambda: None) as once:
        took = []
        for _ in range(20):
            with functions_called() as found:
                await once()
            took.append(found["calls"])
    assert min(took) <= MOST_CALLS[name]


@needs_strict
@pytest.mark.skipif(shutil.which("strace") is None, reason="strace counts system calls")
@pytest.mark.parametrize("name", MOST_SYSTEM_CALLS)
async def test_repl_makes_no_more_system_calls_than_table_says(name: str) -> None:
    command, tree = [sys.executable, "-P", costs.__file__, name], str(Path(costs.__file__).parents[2])
    assert (await asyncio.to_thread(costs._system_calls, command, tree))["REPL"] <= MOST_SYSTEM_CALLS[name]


@needs_strict
@pytest.mark.parametrize("name", ["chat", "batch of one item"])
async def test_operation_costs_the_same_after_many(name: str) -> None:
    """A server or an engine that looked at what has ended would call more with each request."""
    first, later = await function_calls(name, 10, between=100)
    assert later <= first * 1.03


@pytest.mark.parametrize("way", MOST_REQUEST_CALLS)
async def test_request_takes_no_more_calls_of_functions_than_table_says(way: str) -> None:
    async with LMHandler(Model(), one_shot=True) as handler:
        ask = await session(handler) if way == "session" else lambda: one_shot(handler.port)
        await asyncio.to_thread(ask)
        with functions_called() as found:
            await asyncio.to_thread(lambda: [ask() for _ in range(REQUESTS)])
    assert found["calls"] / REQUESTS <= MOST_REQUEST_CALLS[way]


def one_shot(port: int) -> None:
    with socket.create_connection(("127.0.0.1", port)) as caller:
        caller.sendall(ONE_SHOT)
        assert b"chat_completion" in caller.recv(1 << 16)


async def session(handler: LMHandler) -> Callable[[], None]:
    """Return a function that asks one query on a connection that stays."""
    calls = TreeCalls(handler, Ledger(Limits(max_llm_calls=None)), TreeEvents("t", []))

    async def answer(query: Query) -> list[Slot]:
        return await calls.slots(Caller("1", 1, "?"), query)

    connection = Connection(Session(1 << 20), 16)
    caller = await asyncio.to_thread(socket.create_connection, ("127.0.0.1", handler.port))
    for message in (Hello(token=handler.listener.expect(connection, 60)), Ready(RELEASE)):
        caller.sendall(frame(encode(message)))
    await connection.ready()
    connection.execute("", answer, lambda _: None)
    await asyncio.to_thread(caller.recv, 1 << 16)

    def ask() -> None:
        caller.sendall(QUERY)
        assert b'"ok"' in caller.recv(1 << 16)

    return ask


@pytest.mark.parametrize("what", ["repl", "run"])
async def test_closed_repl_and_ended_run_leave_the_collector_nothing(what: str) -> None:
    async with Sandbox(warm=0) as sandbox, RLM("offline", sandbox=sandbox) as rlm:

        async def once() -> None:
            if what == "run":
                await rlm.acompletion("a\nb", "How many lines are there?")
                return
            async with sandbox.repl("text", answer=_answer) as repl:
                await repl.files.awrite("name", b"data")
                assert (await repl.aexecute("print(llm_query(context))")).stdout == "ok\n"

        await once()
        gc.collect()
        gc.disable()
        try:
            gc.set_debug(gc.DEBUG_SAVEALL)
            await once()
            await asyncio.sleep(0)
            gc.collect()
            ours = {type(left).__name__ for left in gc.garbage if type(left).__module__.startswith("rlm_broker")}
        finally:
            gc.set_debug(0)
            gc.garbage.clear()
            gc.enable()
    assert ours == set()


async def _answer(query: Query) -> list[Slot]:
    return [Slot("ok")] * len(query.prompts)
