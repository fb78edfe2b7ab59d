"""A thousand light agents against one broker: what it carries, what it costs, and what breaks first.

The agents are light ones: they speak the protocol, in some processes of their own, and run no code. So the machine can
have a thousand of them, and what is measured is the orchestrator: its listener, the placement of runs, and the calls.
CPU time of the orchestrator says what one core carries. It depends less on other load of the machine than rates do.
"""

import asyncio
import os
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass

import msgspec
import psutil

from rlm_broker.batch.items import BatchItem
from rlm_broker.broker.clients.base import LMReply, LMRequest
from rlm_broker.cluster.nodes import Nodes
from rlm_broker.rlm import RLM
from rlm_broker.usage import Usage
from scripts.cluster.light_agents import Order

PROCESSES = 2
BEYOND_LOOPBACK = "0.0.0.0"
"""Address at which nodes connect by TLS, also from this machine."""
IDLE_S = 5.0
LOOK_S = 0.01
JOIN_S = 300.0
MAX_RUNS = 32
"""Runs that each agent takes at the same time."""
AT_ONCE, RUNS = 256, 2_048
SHORT, LONG = 1, 16
"""Calls of each run, in two loads: their difference is what a call costs, and the rest is what a run costs."""


class NoOp:
    """Answers each call at once."""

    model_name = "no-op"
    max_concurrent = None

    async def complete(self, _request: LMRequest) -> LMReply:
        """Answer one call."""
        return LMReply("ok", Usage(1, 1, 1, None))

    async def aclose(self) -> None:
        """Close no resource: there is none."""


@dataclass(frozen=True)
class Load:
    """Findings about a load: runs on all agents, with so many calls each."""

    calls: int
    seconds: float
    cpu_s: float


@dataclass(frozen=True)
class Simulated:
    """Findings about one broker with so many agents.

    Attributes:
        is_tls: Whether the links have TLS.
        joining_s: Seconds until all agents had joined.
        agent_bytes: Memory of the orchestrator for each agent.
        idle_cpu: Share of a core that the orchestrator takes while no run is there.
        calls_s: Calls a second while all agents have runs.
        cpu_s_per_call, cpu_s_per_run: CPU time of the orchestrator for a call, and for a run beside its calls.
        median_s: Seconds of a call under full load, in the median.
        p99_s: Seconds that 99 of 100 calls took at most, under full load.
        most_late_s: Longest time by which the orchestrator's event loop kept a timer waiting.
        lost: Nodes that were lost before the end.
    """

    agents: int
    is_tls: bool
    joining_s: float
    agent_bytes: float
    idle_cpu: float
    calls_s: float
    cpu_s_per_call: float
    cpu_s_per_run: float
    median_s: float
    p99_s: float
    most_late_s: float
    lost: int

    def told(self) -> str:
        """Return the findings as lines for people."""
        return "\n".join(
            [
                f"{self.agents:,} agents, {'TLS' if self.is_tls else 'plain'}, {os.cpu_count()} cores, "
                f"load {os.getloadavg()[0]:.1f}",
                f"joined in {self.joining_s:.1f} s; memory for each: {self.agent_bytes / 1e3:.0f} KB",
                f"idle: {self.idle_cpu:.1%} of a core, for heartbeats",
                f"CPU time: {self.cpu_s_per_call * 1e6:.0f} µs a call, {self.cpu_s_per_run * 1e6:.0f} µs a run",
                f"full load: {self.calls_s:,.0f} calls/s, p99 {self.p99_s * 1e3:,.0f} ms",
                f"longest delay of a timer: {self.most_late_s * 1e3:,.0f} ms; nodes lost: {self.lost}",
            ]
        )


def simulate(agents: int, *, runs: int | None = None, is_tls: bool = True) -> Simulated:
    """Have so many light agents join one broker, wait a while, and give them runs."""
    return asyncio.run(simulated(agents, RUNS if runs is None else runs, is_tls=is_tls))


async def simulated(agents: int, runs: int, *, is_tls: bool, calls: int = LONG, idle_s: float = IDLE_S) -> Simulated:
    """Do as `simulate`, with `calls` calls for each run, and `idle_s` seconds without runs before."""
    process, nodes = psutil.Process(), Nodes(f"{BEYOND_LOOPBACK if is_tls else '127.0.0.1'}:0")
    async with nodes, RLM(NoOp(), sandbox=nodes) as rlm:
        held, started = process.memory_info().rss, time.perf_counter()
        async with light_agents(nodes, agents, MAX_RUNS) as found:
            joining_s = time.perf_counter() - started
            agent_bytes = (process.memory_info().rss - held) / agents
            used = time.process_time()
            await asyncio.sleep(idle_s)
            idle_cpu = (time.process_time() - used) / idle_s if idle_s else 0.0
            steps = asyncio.create_task(_longest_step())
            short, long = await _load(rlm, runs, SHORT), await _load(rlm, runs, calls)
            steps.cancel()
            lost, most_late_s = nodes.stats().lost_nodes, await steps
    trips = sorted(found)
    per_call = (long.cpu_s - short.cpu_s) / (long.calls - short.calls)
    return Simulated(
        agents,
        is_tls,
        joining_s,
        agent_bytes,
        idle_cpu,
        calls_s=long.calls / long.seconds,
        cpu_s_per_call=per_call,
        cpu_s_per_run=max(0.0, short.cpu_s - short.calls * per_call) / runs,
        median_s=trips[len(trips) // 2],
        p99_s=trips[int(0.99 * len(trips))],
        most_late_s=most_late_s,
        lost=lost,
    )


async def _load(rlm: RLM, runs: int, calls: int) -> Load:
    """Give so many runs of so many calls each to the agents."""
    used, started = time.process_time(), time.perf_counter()
    items = (BatchItem(str(number), "context", str(calls)) for number in range(runs))
    async for result in rlm.batch(items, max_concurrent=min(runs, AT_ONCE)):
        if result.failure is not None:
            raise result.failure
    return Load(runs * calls, time.perf_counter() - started, time.process_time() - used)


async def _longest_step() -> float:
    """Return the longest time by which a timer was late, once the task is cancelled."""
    longest_s = 0.0
    try:
        while True:
            due = time.perf_counter() + LOOK_S
            await asyncio.sleep(LOOK_S)
            longest_s = max(longest_s, time.perf_counter() - due)
    except asyncio.CancelledError:
        return longest_s


async def _until(is_so: Callable[[], bool]) -> None:
    async with asyncio.timeout(JOIN_S):
        while not is_so():
            await asyncio.sleep(LOOK_S)


@asynccontextmanager
async def light_agents(nodes: Nodes, agents: int, max_runs: int) -> AsyncIterator[list[float]]:
    """Have so many light agents join, in some processes. The seconds of all calls are in the list after the block."""
    (host, port), found = nodes.address, list[float]()
    each = -(-agents // PROCESSES)
    async with asyncio.TaskGroup() as processes:
        for first in range(0, agents, each):
            order = Order(host, port, nodes.fingerprint, nodes.token, first, min(each, agents - first), max_runs)
            processes.create_task(_one_process(order, found))
        await _until(lambda: len(nodes.stats().nodes) == agents)
        yield found
        await nodes.aclose()


async def _one_process(order: Order, found: list[float]) -> None:
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "scripts.cluster.light_agents", stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    try:
        out, _ = await process.communicate(msgspec.json.encode(order))
        found += msgspec.json.decode(out, type=list[float])
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
