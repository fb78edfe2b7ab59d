"""The orchestrator under attack: `python -m scripts.siege.orchestrator ATTACK` prints what it felt, as JSON."""

import asyncio
import contextlib
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from rlm_broker.broker.clients.base import LMReply, LMRequest
from rlm_broker.broker.transport.connection import Connection
from rlm_broker.broker.transport.session import Session
from rlm_broker.events.event import BlockPrinted, RunEnded, TreeEvents
from rlm_broker.events.trace import TraceWriter
from rlm_broker.limits import Limits
from rlm_broker.run.calls import Caller, TreeCalls
from rlm_broker.run.ledger import Ledger
from rlm_broker.run.lm_handler import LMHandler
from rlm_broker.run.prompts.instructions import Instructions
from rlm_broker.run.queries import QueryAnswers
from rlm_broker.run.tree import Progress, Tree
from rlm_broker.sandbox.sandbox import Sandbox
from rlm_broker.sandbox.tools import Tools
from rlm_broker.usage import Usage, UsageSummary
from sandbox_worker import RELEASE
from sandbox_worker.wire.frames import FrameDecoder, encode_frame
from sandbox_worker.wire.messages import (
    DisplayMessage,
    FromOrchestrator,
    Hello,
    Output,
    Query,
    Ready,
    Result,
    decode_from_orchestrator,
    encode,
)
from scripts.siege.attacks import STRANGERS

WAIT_S = 300.0
STARTS_REPLS = ("children", "objects")
"""Attacks by queries that may start REPLs. The others need no open sandbox."""
UNPAUSED = 100
"""Round trips without a pause between them."""
PAUSE_S = 0.002


class Model:
    """Answers the honest REPL at once and `echo` with a megabyte. All others wait without end."""

    model_name = "siege"
    max_concurrent = None

    async def complete(self, request: LMRequest) -> LMReply:
        text = str(request.messages[-1].content)
        if text.startswith("echo"):
            return LMReply("x" * (1 << 20), Usage(1, 1, 1, None))
        if not text.startswith("honest"):
            await asyncio.get_running_loop().create_future()
        return LMReply("ok", Usage(1, 1, 1, None))

    async def aclose(self) -> None:
        """Close no resource: there is none."""


class Loop(asyncio.SelectorEventLoop):
    """An event loop that knows the CPU time of its longest step: all that runs between two looks at its sockets."""

    longest_s = 0.0

    def _run_once(self) -> None:
        started = time.thread_time()
        super()._run_once()  # type: ignore[misc]
        self.longest_s = max(self.longest_s, time.thread_time() - started)


class Honest:
    """A REPL that asks one thing after the other."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader, self._writer = reader, writer
        self._frames = FrameDecoder(64 << 20)
        self._number = 0
        self.took_s: list[float] = []

    async def hear(self) -> FromOrchestrator | None:
        while True:
            data = await self._reader.read(1 << 16)
            if not data:
                raise ConnectionError("the orchestrator hung up on the honest REPL")
            for payload in self._frames.feed(data):
                return None if b'"welcome"' in payload else decode_from_orchestrator(payload)

    def say(self, payload: bytes) -> None:
        self._writer.write(encode_frame(payload, 1 << 20))

    async def ask(self, pause_for: "asyncio.Future[Any] | None" = None) -> None:
        """One round trip. After the first ones there is a pause before it, unless `pause_for` is done: a REPL that asks
        without a pause takes half of the machine from the attacker."""
        if pause_for is not None and len(self.took_s) >= UNPAUSED:
            await asyncio.wait({pause_for}, timeout=PAUSE_S)
        self._number += 1
        started = time.monotonic()
        self.say(encode(Query(f"1:{self._number}", "llm", [f"honest {self._number}"])))
        await self.hear()
        self.took_s.append(time.monotonic() - started)

    def result(self) -> tuple[float, float, float]:
        """Median, 99th percentile and longest of the round trips since the last result, in milliseconds."""
        taken, self.took_s = sorted(self.took_s), []
        return tuple(round(1e3 * taken[at], 2) for at in (len(taken) // 2, len(taken) * 99 // 100, -1))  # type: ignore[return-value]


async def besiege(attack: str, round_trips: int) -> dict[str, Any]:
    """Run one attack beside an honest REPL: `round_trips` before it, at least as many during it and as it is ended."""
    loop = asyncio.get_running_loop()
    assert isinstance(loop, Loop)
    is_strangers = attack in [each.__name__ for each in STRANGERS]
    async with contextlib.AsyncExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        handler = await stack.enter_async_context(LMHandler(Model(), one_shot=is_strangers))
        sandbox = Sandbox(warm=0)
        writer = stack.enter_context(TraceWriter(folder / "trace.jsonl"))
        if attack in STARTS_REPLS:
            await stack.enter_async_context(sandbox)
            for _ in range(2):  # all that is made once is made now
                async with sandbox.repl() as repl:
                    await repl.aexecute("1")
        block, connection = _session(handler, sandbox, writer)
        token = handler.listener.expect(connection, WAIT_S)
        honest = Honest(*await asyncio.open_connection(*handler.address))
        honest.say(encode(Hello(token)))
        await honest.hear()
        honest.say(encode(Ready(RELEASE)))
        await connection.ready()
        result = block()
        await honest.hear()
        for _ in range(round_trips):
            await honest.ask()
        before = honest.result()
        took_unit_s = unit_s()
        hostile_block, hostile = _session(handler, sandbox, writer)
        arguments = [attack, str(handler.port), handler.listener.expect(hostile, WAIT_S)]
        attacker = await asyncio.create_subprocess_exec(
            sys.executable, "-m", "scripts.siege.attacks", *arguments, stdin=subprocess.PIPE, stdout=subprocess.PIPE
        )
        assert attacker.stdout
        hostile_result: asyncio.Future[Result] | None = None
        if not is_strangers:
            await hostile.ready()
            hostile_result = hostile_block()
            hostile_result.add_done_callback(lambda done: _ended(writer, done))
        begun_kb = restart_peak()
        loop.longest_s = 0.0
        saturated = asyncio.ensure_future(attacker.stdout.readline())
        while not saturated.done() or len(honest.took_s) < round_trips or _is_coming(attack, hostile_result):
            await honest.ask(pause_for=saturated)
        ending = asyncio.ensure_future(hostile.close())
        while not ending.done() or len(honest.took_s) < 2 * round_trips:
            await honest.ask(pause_for=ending)
        during = honest.result()
        stretch_s, growth_kb = loop.longest_s, peak_kb() - begun_kb
        with contextlib.suppress(ProcessLookupError):
            attacker.kill()
        await attacker.wait()
        honest.say(encode(Result(1, "ok")))
        await result
        await connection.close()
    return {
        "attack": attack,
        "before_ms": before,
        "during_ms": during,
        "stretch_ms": round(stretch_s * 1e3, 1),
        "unit_ms": round(took_unit_s * 1e3, 1),
        "growth_mb": round(growth_kb / 1024, 1),
        "round_trips": honest._number,
    }


def _session(handler: LMHandler, sandbox: Sandbox, writer: TraceWriter) -> Any:
    """A REPL's connection, and what starts its block: all of an RLM's own parts, without its loop."""
    limits = Limits(max_depth=2)
    ledger = Ledger(limits)
    events = TreeEvents("tree", [writer])
    calls = TreeCalls(handler, ledger, events)
    tree = Tree(calls, ledger, sandbox, events, Instructions())
    recursion = QueryAnswers(
        tree, Caller("1", 0, "?"), None, Tools({"tool": lambda *_: 1, "typed": _typed}), Progress()
    )
    connection = Connection(Session(limits.max_frame_bytes), limits.max_queries_in_flight)

    displays: list[DisplayMessage] = []

    def write(shown: Output | DisplayMessage) -> None:
        if isinstance(shown, Output):
            writer(BlockPrinted("1", 0, 1, shown.stream, shown.text))
        else:
            displays.append(shown)

    def block() -> "asyncio.Future[Result]":
        return connection.execute("1", recursion, write)

    return block, connection


def _is_coming(attack: str, result: "asyncio.Future[Result] | None") -> bool:
    return attack == "answer" and result is not None and not result.done()


def _typed(numbers: list[int]) -> int:
    """A tool whose arguments are validated."""
    return len(numbers)


def _ended(writer: TraceWriter, done: "asyncio.Future[Result]") -> None:
    if not done.cancelled() and done.exception() is None:
        writer(RunEnded("1", 0, done.result().final_answer, None, 1, 1.0, UsageSummary({})))


def unit_s() -> float:
    """CPU time of a fixed piece of work, the shortest of three."""
    taken = []
    for _ in range(3):
        started = time.thread_time()
        sum(number * number % 7 for number in range(500_000))
        taken.append(time.thread_time() - started)
    return min(taken)


def restart_peak() -> int:
    """Start to count the peak of our memory from now on; return what it is, in kilobytes."""
    Path("/proc/self/clear_refs").write_text("5")
    return peak_kb()


def peak_kb() -> int:
    status = Path("/proc/self/status").read_text()
    return int(status.partition("VmHWM:")[2].split()[0])


def main() -> None:
    loop = Loop()
    with contextlib.closing(loop):
        print(json.dumps(loop.run_until_complete(besiege(sys.argv[1], int(sys.argv[2])))))


if __name__ == "__main__":
    main()
