"""Requests a second: the handler, an echo of the same frames, and the reference implementation's handler."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from typing import cast

import msgspec

from rlm_broker.broker.transport.connection import Connection
from rlm_broker.broker.transport.session import Session
from rlm_broker.events.event import TreeEvents
from rlm_broker.limits import Limits
from rlm_broker.run.calls import Caller, TreeCalls
from rlm_broker.run.ledger import Ledger
from rlm_broker.run.lm_handler import LMHandler
from sandbox_worker.wire.frames import FrameDecoder
from sandbox_worker.wire.messages import DisplayMessage, Output, Query, Reply, Slot
from scripts.bench.load import MAX_FRAME_BYTES, Outcome, frame, load
from scripts.bench.measure import Effort, Model
from scripts.bench.peer import Peer
from scripts.bench.row import OURS, Check, Curve, Row, Side, number, side

CALLERS = 32
CROWD = 1_024
CROWDS = (1, 4, 16, 64, 256, 1_024)
RLMS_HANDLER = "rlms LMHandler"
ECHO = "asyncio + msgspec echo"


def sessions(effort: Effort) -> list[Row]:
    """Load the handler with callers that keep their connection, as REPLs do."""

    async def measure() -> Row:
        with Peer(RLMS_HANDLER, "rlms_handler.py", "rlms") as rlms:
            ours, echo, theirs = await _by_turns(
                effort.times(20) // 2,
                lambda: of_sessions(CALLERS, 1),
                lambda: of_echo(CALLERS, 1),
                lambda: of_peer(rlms, CALLERS, 1),
            )
        rate, floor, peer = _rates(OURS, ours), _rates(ECHO, echo), _rates(RLMS_HANDLER, theirs, rlms.problem)
        return Row(
            f"handler, persistent sessions, no-op client, {CALLERS} callers",
            rate,
            (floor, peer),
            (rate.at_least_times(0.5, floor),),
            _told(ours),
        )

    return [asyncio.run(measure())]


def one_shot(effort: Effort) -> list[Row]:
    """Load the handler by the one-shot protocol of the field: a connection for each request."""

    async def measure() -> Row:
        with Peer(RLMS_HANDLER, "rlms_handler.py", "rlms") as rlms:
            ours, theirs = await _by_turns(
                effort.times(20) // 2, lambda: of_one_shots(CALLERS, 1), lambda: of_peer(rlms, CALLERS, 1)
            )
        rate, peer = _rates(OURS, ours), _rates(RLMS_HANDLER, theirs, rlms.problem)
        return Row(
            f"handler, one-shot protocol, a connection per request, {CALLERS} callers",
            rate,
            (peer,),
            (rate.at_least_times(3, peer),),
            _told(ours),
        )

    return [asyncio.run(measure())]


def crowd(effort: Effort) -> list[Row]:
    """Time the slowest of very many callers, with and without a connection that stays."""

    async def measure() -> list[Row]:
        rounds = effort.times(6) // 2
        with Peer(RLMS_HANDLER, "rlms_handler.py", "rlms") as rlms:
            kept, echo, dialled = await _by_turns(
                rounds, lambda: of_sessions(CROWD, 1), lambda: of_echo(CROWD, 1), lambda: of_one_shots(CROWD, 1)
            )
            (theirs,) = await _by_turns(1, lambda: of_peer(rlms, 256, 1))
        peer = _slowest(f"{RLMS_HANDLER}, 256 callers", theirs, rlms.problem)
        return [
            Row(
                f"{CROWD:,} callers at once, {how}: p99",
                (waits := _slowest(OURS, outcomes)),
                others,
                (waits.at_most(80), Check("no error", not any(outcome.lost for outcome in outcomes))),
                _told(outcomes) + note,
            )
            for how, outcomes, others, note in (
                ("persistent sessions", kept, [_slowest(ECHO, echo)], ""),
                ("a connection per request", dialled, [peer], f"; {peer.name}: {_told(theirs)}"),
            )
        ]

    return asyncio.run(measure())


def crowds(effort: Effort) -> list[Curve]:
    """Measure requests a second for growing numbers of callers."""

    async def measure() -> Curve:
        lines: dict[str, list[tuple[float, float]]] = {}
        with Peer(RLMS_HANDLER, "rlms_handler.py", "rlms") as rlms:
            ways: dict[str, Callable[[int], Awaitable[Outcome | None]]] = {
                f"{OURS}, sessions": lambda callers: of_sessions(callers, 1),
                f"{OURS}, one-shot": lambda callers: of_one_shots(callers, 1),
                ECHO: lambda callers: of_echo(callers, 1),
                RLMS_HANDLER: lambda callers: of_peer(rlms, callers, 1),
            }
            for callers in CROWDS[:3] if effort.quick else CROWDS:
                for name, way in ways.items():
                    outcome = await way(callers)
                    if outcome is not None:
                        lines.setdefault(name, []).append((callers, outcome.rate))
        return Curve("handler throughput", "callers", "/s", lines)

    return [asyncio.run(measure())]


# -- one load --------------------------------------------------------------------------------------------------------


async def of_sessions(callers: int, seconds: float) -> Outcome:
    """Load `LMHandler`; each request is counted and recorded as in a run."""
    limits = Limits(max_llm_calls=None, max_concurrent_calls=callers)
    async with LMHandler(Model()) as handler:
        calls = TreeCalls(handler, Ledger(limits), TreeEvents("t", []))
        caller = Caller("1", 1, "?")

        async def answer(query: Query) -> list[Slot]:
            return await calls.slots(caller, query)

        connections = [Connection(Session(MAX_FRAME_BYTES), 16) for _ in range(callers)]
        tokens = [handler.listener.expect(connection, 60) for connection in connections]

        async def serve(connection: Connection) -> None:
            await connection.ready()
            await connection.execute("", answer, _ignore)

        serving = asyncio.gather(*map(serve, connections))
        outcome = await load(handler.port, callers, seconds, "session", tokens)
        await serving
        return outcome


async def of_one_shots(callers: int, seconds: float) -> Outcome:
    """Load `LMHandler` by one-shot requests."""
    async with LMHandler(Model(), one_shot=True) as handler:
        return await load(handler.port, callers, seconds, "one_shot")


async def of_echo(callers: int, seconds: float) -> Outcome:
    """Load an echo: the same frames are decoded, and a reply is encoded, without a handler between."""
    async with _echo() as port:
        return await load(port, callers, seconds, "echo")


async def of_peer(rlms: Peer, callers: int, seconds: float) -> Outcome | None:
    """Load the reference implementation's handler, in a process of its own."""
    port = rlms.ask("port")
    return None if port is None else await load(port[0], callers, seconds, "one_shot")


@contextlib.asynccontextmanager
async def _echo() -> AsyncIterator[int]:
    decode, encode = msgspec.json.Decoder(Query).decode, msgspec.json.Encoder().encode

    class Echo(asyncio.Protocol):
        def connection_made(self, transport: asyncio.BaseTransport) -> None:
            self._transport = cast("asyncio.Transport", transport)
            self._frames = FrameDecoder(MAX_FRAME_BYTES)

        def data_received(self, data: bytes) -> None:
            for payload in self._frames.feed(data):
                self._transport.write(frame(encode(Reply(decode(payload).id, [Slot("ok")]))))

    server = await asyncio.get_running_loop().create_server(Echo, "127.0.0.1", 0, backlog=4096)
    async with server:
        yield server.sockets[0].getsockname()[1]


# -- many loads ------------------------------------------------------------------------------------------------------


async def _by_turns(rounds: int, *ways: Callable[[], Awaitable[Outcome | None]]) -> list[list[Outcome]]:
    outcomes: list[list[Outcome]] = [[] for _ in ways]
    for _ in range(rounds):
        for way, had in zip(ways, outcomes, strict=True):
            outcome = await way()
            if outcome is not None:
                had.append(outcome)
    return outcomes


def _rates(name: str, outcomes: Sequence[Outcome], problem: str = "") -> Side:
    return side(name, "/s", [outcome.rate for outcome in outcomes], problem)


def _slowest(name: str, outcomes: Sequence[Outcome], problem: str = "") -> Side:
    return side(name, "ms", [outcome.p99 for outcome in outcomes], problem)


def _told(outcomes: Sequence[Outcome]) -> str:
    lost = sum(outcome.lost for outcome in outcomes)
    asked = sum(outcome.answered for outcome in outcomes) + lost
    p99 = _slowest("", outcomes).median
    return "" if p99 is None else f"{lost:,} of {asked:,} lost, p99 {number(p99, 'ms')}"


def _ignore(_shown: Output | DisplayMessage) -> None:
    """Ignore output: there is none."""
