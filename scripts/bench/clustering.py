"""Clusters: runs through an agent against the same without, calls through the broker, and many light agents."""

import asyncio
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path

from rlm_broker.broker.clients.base import LMRequest
from rlm_broker.cluster.nodes import Nodes
from rlm_broker.results import ChatMessage
from rlm_broker.rlm import RLM
from scripts.bench.measure import Effort, Model, many
from scripts.bench.row import OURS, Check, Row, Side, side
from scripts.bench.runs import AT_ONCE, next_turn, run_of_three_turns
from scripts.cluster.simulation import NoOp, simulated

RUNS = 200
LIGHT_AGENTS, MANY_AGENTS = 8, 1_000
CALLS = 4_000


def node_runs(effort: Effort) -> list[Row]:
    """Compare runs on one node, and on two nodes of one machine, with the same runs without a cluster."""
    return asyncio.run(_node_runs(effort))


def broker_calls(effort: Effort) -> list[Row]:
    """Time one call after the other through the broker of a cluster, and many from several agents."""
    return asyncio.run(_broker_calls(effort))


def many_agents(effort: Effort) -> list[Row]:
    """Have a thousand light agents join one broker, and give them runs."""
    found = asyncio.run(simulated(effort.size(MANY_AGENTS), effort.size(2_048), is_tls=True))
    rate = side(OURS, "/s", [found.calls_s])
    note = found.told().replace("\n", "; ")
    return [
        Row(
            f"{found.agents:,} agents, calls a second of one broker", rate, (), [Check("no loss", not found.lost)], note
        )
    ]


async def _node_runs(effort: Effort) -> list[Row]:
    runs, rates = effort.size(RUNS), dict[str, list[float]]()
    for _ in range(effort.times(3)):
        for count in (0, 1, 2):
            async with AsyncExitStack() as own:
                nodes = await own.enter_async_context(agents(count)) if count else None
                model = Model(next_turn)
                rlm = await own.enter_async_context(RLM(model) if nodes is None else RLM(model, sandbox=nodes))
                await many(AT_ONCE, AT_ONCE, lambda: run_of_three_turns(rlm))  # noqa: B023 - awaited here
                rate = await many(runs, AT_ONCE, lambda: run_of_three_turns(rlm))  # noqa: B023
                rates.setdefault(str(count), []).append(rate)
    without, one, two = (
        side(name, "/s", rates[count]) for name, count in (("without a cluster", "0"), (OURS, "1"), (OURS, "2"))
    )
    other = side("one node", "/s", rates["1"])
    what = f"runs of three turns, {AT_ONCE} at a time"
    return [
        Row(f"{what}, on one node", one, [without], [one.at_least_times(0.9, without)]),
        Row(f"{what}, on two nodes of one machine", two, [other, without], [two.at_least_times(0.9, other)]),
    ]


async def _broker_calls(effort: Effort) -> list[Row]:
    calls = effort.size(CALLS)
    bare = side("the broker without a cluster", "ms", await _bare_calls(calls))
    rows = []
    for how, is_tls in (("plain", False), ("TLS", True)):
        alone = await simulated(1, 1, is_tls=is_tls, calls=calls, idle_s=0.0)
        each = side(OURS, "ms", [alone.median_s])
        over = Side("overhead", "ms", [(each.median or 0) - (bare.median or 0)])
        rows.append(Row(f"a model call through the broker of a cluster, {how}", each, [bare], [over.at_most(0.3)]))
        crowd = await simulated(LIGHT_AGENTS, 256, is_tls=is_tls, calls=max(2, calls // 64), idle_s=0.0)
        rate = side(OURS, "/s", [crowd.calls_s])
        note = f"{crowd.cpu_s_per_call * 1e6:.0f} µs of CPU time each, p99 {crowd.p99_s * 1e3:.0f} ms"
        rows.append(Row(f"calls of {LIGHT_AGENTS} agents through one broker, {how}", rate, (), (), note))
    return rows


async def _bare_calls(calls: int) -> list[float]:
    """Return the seconds of each call of a client by the broker of this process."""
    taken, request = [], LMRequest((ChatMessage("user", "x" * 7_000),))
    async with RLM(NoOp()) as rlm:
        broker = rlm.handler
        for _ in range(calls):
            started = time.perf_counter()
            await broker.complete(broker.routing.pick(None, 0), request)
            taken.append(time.perf_counter() - started)
    return taken


@asynccontextmanager
async def agents(count: int) -> AsyncIterator[Nodes]:
    """Have so many agents of this machine join."""
    async with Nodes(min_nodes=count) as nodes:
        with tempfile.TemporaryDirectory() as folder:
            token = Path(folder) / "token"
            token.touch(mode=0o600)
            token.write_text(nodes.token)
            command = ["-m", "rlm_broker", *nodes.join_command().split()[1:], "--token-file", str(token)]
            joined = [
                await asyncio.create_subprocess_exec(sys.executable, *command, stderr=subprocess.DEVNULL)
                for _ in range(count)
            ]
            yield nodes
            await nodes.aclose()
            for process in joined:
                await process.wait()
