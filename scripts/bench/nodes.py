"""REPLs on nodes against REPLs here: a run, a block's round trip, starts over several agents, a context."""

import asyncio
import contextlib
import socket
import time
from collections.abc import AsyncIterator

from rlm_broker.broker.clients.script import ScriptedClient
from rlm_broker.context.store import store
from rlm_broker.limits import ReplLimits
from rlm_broker.rlm import RLM
from rlm_broker.sandbox.sandbox import Sandbox
from scripts.bench.measure import Effort
from scripts.bench.row import OURS, Row, side
from tests.support.nodes import LocalNodes

RUNS, BLOCKS, SPAWNS, CONTEXT_BYTES = 200, 2_000, 400, 1 << 30
QUERIES = "```repl\nx = llm_query('a')\nprint(x)\n```"
TURNS = [QUERIES, "b", QUERIES, "b", "```repl\nFINAL(len(context))\n```"]
LOOPBACK = "127.0.0.1"


def node_runs(effort: Effort) -> list[Row]:
    """Compare the orchestrator's CPU time of a run of three turns and two queries."""
    return asyncio.run(_runs(effort.size(RUNS)))


def node_blocks(effort: Effort) -> list[Row]:
    """Compare a block's round trip here, on a node by loopback, and by TLS."""
    return asyncio.run(_blocks(effort.size(BLOCKS)))


def node_spawns(effort: Effort) -> list[Row]:
    """Start REPLs over one, two and four agents of this machine."""
    return asyncio.run(_spawns(effort.size(SPAWNS)))


def node_contexts(effort: Effort) -> list[Row]:
    """Bring a context of a gigabyte to four nodes."""
    return asyncio.run(_contexts(effort.size(CONTEXT_BYTES)))


async def _runs(count: int) -> list[Row]:
    sides = []
    for name, made in (("here", Sandbox(warm=0)), (OURS, LocalNodes({"one": 8}))):
        spent = []
        async with made as sandbox:
            for _ in range(count):
                async with RLM(ScriptedClient(TURNS), sandbox=sandbox) as rlm:
                    before = time.process_time()
                    await rlm.acompletion("x" * 100_000, "?")
                    spent.append(time.process_time() - before)
        sides.append(side(name, "ms", spent))
    here, node = sides
    what = "CPU of the orchestrator for a run of three turns and two queries, its REPL on a node"
    return [Row(what, node, [here], [node.at_most_times(1.3, here)])]


async def _blocks(count: int) -> list[Row]:
    places = {
        "here": Sandbox(warm=0),
        "loopback": LocalNodes({"one": 8}),
        "TLS": LocalNodes({"one": 8}, at=own_address()),
    }
    sides = []
    for name, made in places.items():
        taken = []
        async with made as sandbox, sandbox.repl("x") as repl:
            for _ in range(count):
                before = time.perf_counter()
                await repl.aexecute("1")
                taken.append(time.perf_counter() - before)
        sides.append(side(name, "ms", taken))
    here, loopback, tls = sides
    most = (here.median or 0) + 0.3
    return [
        Row("round trip of a block on a node", tls, [here, loopback], [tls.at_most(most), loopback.at_most(most)]),
    ]


async def _spawns(count: int) -> list[Row]:
    sides, cpu_ms = [], []
    for agents in (1, 2, 4):
        async with there({f"node-{number}": 16 for number in range(agents)}) as nodes:
            began, before = time.perf_counter(), time.process_time()

            async def start(nodes: LocalNodes, each: int) -> None:
                for _ in range(each):
                    async with nodes.repl("x"):
                        pass

            each = max(1, count // (8 * agents))
            await asyncio.gather(*(start(nodes, each) for _ in range(8 * agents)))
            done = 8 * agents * each
            cpu_ms.append((time.process_time() - before) / done * 1e3)
            sides.append(side(f"{agents} agents", "/s", [done / (time.perf_counter() - began)]))
    one, two, four = sides
    note = f"CPU of the orchestrator for each: {', '.join(f'{spent:.2f}' for spent in cpu_ms)} ms"
    return [Row("REPLs started a second over agents of one machine", four, [one, two], note=note)]


async def _contexts(size_bytes: int) -> list[Row]:
    sides = []
    with store("x" * size_bytes) as context:
        for name, at in ((OURS, own_address()), ("loopback", LOOPBACK)):
            async with (
                there({f"node-{number}": 1 for number in range(4)}, at) as nodes,
                contextlib.AsyncExitStack() as own,
            ):
                before = time.process_time()
                limits = ReplLimits(start_timeout_s=600)
                repls = [nodes.repl(context, limits=limits) for _ in range(4)]
                await asyncio.gather(*(own.enter_async_context(repl) for repl in repls))
                spent_s = time.process_time() - before
            sides.append(side(name, "s", [spent_s]))
    tls, plain = sides
    what = f"CPU of the orchestrator to bring a context of {size_bytes / (1 << 30):.2g} GB to four nodes, by TLS"
    return [Row(what, tls, [plain])]


@contextlib.asynccontextmanager
async def there(places: dict[str, int], at: str = LOOPBACK) -> AsyncIterator[LocalNodes]:
    """Open a cluster, and wait for all of its nodes."""
    async with LocalNodes(places, at=at) as nodes:
        while len(nodes.nodes()) < len(places):
            await asyncio.sleep(0.02)
        yield nodes


def own_address() -> str:
    """Return an address of this machine beyond loopback. No packet is sent."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect(("192.0.2.1", 9))
        return str(probe.getsockname()[0])
