"""Agents on the nodes of a Ray cluster: one actor each, which does no more than to start an agent and to end it.

Theory of operation. Ray says which nodes there are, and puts an actor on each of them. The actor holds a pipe to the
standard input of its child, the agent, which ends when that pipe ends: so it ends with its actor, also with a killed
one. Nothing of a REPL crosses Ray but the order that its agent needs to join.

An actor whose call returns or fails has lost its agent. Ray says so as soon as the actor's process or its node is gone,
which may be before the silence of the link is noticed, or long after.
"""

import asyncio
import contextlib
import logging
import math
import subprocess
import sys
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import msgspec
import ray
from ray.autoscaler.sdk import request_resources
from ray.exceptions import RayError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from rlm_broker.errors import ConfigurationError
from rlm_broker.nodes.agent import END_S, MODULE, REPLS_PER_CPU, AgentOrder

AGENT_CPUS = 0.01
"""Share of a CPU reserved by an agent, so that Ray keeps its node. A node without CPUs gets no agent."""
LOOK_S = 1.0
"""Seconds between two looks at the nodes of the Ray cluster."""
MOST_PAUSE_S = 30.0
"""Maximum seconds before a failing agent is started again. The first pause is `LOOK_S`, and each is twice the last
one."""
START_S = 10.0
"""Seconds to start an actor; beyond them its node is logged."""
MOST_WORDS = 400
"""Characters kept of an agent's last words."""

_log = logging.getLogger("rlm_broker")


class RayNode(NamedTuple):
    """A node of a Ray cluster: Ray's id of it, its host name with the beginning of the id, and its CPUs."""

    id: str
    name: str
    cpus: float


class AgentActor:
    """Actor with an agent as its child."""

    def __init__(self) -> None:
        self._child: subprocess.Popen[bytes] | None = None

    def started(self) -> None:
        """Return, which shows that Ray has started the actor."""

    def run(self, order: bytes) -> str:
        """Start the agent, wait until it ends, and return its last words."""
        command = [sys.executable, "-m", MODULE]
        with subprocess.Popen(command, stdin=subprocess.PIPE, stderr=subprocess.PIPE) as child:
            self._child = child
            assert child.stdin is not None
            assert child.stderr is not None
            with contextlib.suppress(BrokenPipeError):  # it ended at once, and its last words say why
                child.stdin.write(order + b"\n")
                child.stdin.flush()
            words = ""
            for line in child.stderr:
                words = (words + line.decode(errors="replace"))[-MOST_WORDS:]
            return words.strip() or f"the agent ended with {child.wait()}"

    def end(self) -> None:
        """End the agent with all below it."""
        child = self._child
        if child is not None and child.stdin is not None:
            with contextlib.suppress(OSError, ValueError):  # `run` has closed it
                child.stdin.close()
            try:
                child.wait(END_S + 1)
            except subprocess.TimeoutExpired:
                child.kill()


class RayAgents:
    """One agent on each node of a Ray cluster, as long as it is open. Lives on one event loop.

    Args:
        order: Returns the order for an agent of that name.
        ended: Called at the end of an agent, with its name and the reason.
        waiting: Returns the number of waiting REPLs.
        resources: Resources for each agent. A node without them gets none.
        max_nodes: Maximum number of nodes; None has no bound.
        runtime_env: Ray's `runtime_env` of the actors.
    """

    def __init__(
        self,
        order: Callable[[str], AgentOrder],
        ended: Callable[[str, str], None],
        waiting: Callable[[], int],
        resources: Mapping[str, float],
        max_nodes: int | None,
        runtime_env: Mapping[str, Any] | None,
    ) -> None:
        self._order = order
        self._ended = ended
        self._waiting = waiting
        self._resources = dict(resources)
        self._max_nodes = math.inf if max_nodes is None else max_nodes
        self._runtime_env = runtime_env
        self._agents: dict[str, asyncio.Task[None]] = {}
        self._leaving: set[asyncio.Task[None]] = set()
        """Ending agents, of nodes that have left the Ray cluster."""
        self._looking: asyncio.Task[None] | None = None
        self._demand = 0

    async def open(self) -> None:
        """Start an agent on each node, and look for further nodes from now on."""
        await self._look()
        self._looking = asyncio.create_task(self._keep_looking())

    async def close(self) -> None:
        """End all agents, and ask for no more nodes."""
        tasks = [*self._agents.values(), *self._leaving, *([self._looking] if self._looking else [])]
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks)
        with contextlib.suppress(RayError, ConnectionError, RuntimeError):
            await self._demand_nodes(0, 0)

    # -- one look ----------------------------------------------------------------------------------------------------

    async def _keep_looking(self) -> None:
        while True:
            await asyncio.sleep(LOOK_S)
            with contextlib.suppress(RayError, ConnectionError, RuntimeError):  # Ray's head is away; agents go on
                await self._look()

    async def _look(self) -> None:
        nodes = await asyncio.to_thread(nodes_of, self._resources)
        for gone in self._agents.keys() - {node.id for node in nodes}:
            leaving = self._agents.pop(gone)
            self._leaving.add(leaving)
            leaving.add_done_callback(self._leaving.discard)
            leaving.cancel()
        for node in nodes:
            if node.id not in self._agents and len(self._agents) < self._max_nodes:
                self._agents[node.id] = asyncio.create_task(self._keep_agent(node))
        cpus = max((node.cpus for node in nodes), default=1.0)
        more = math.ceil(self._waiting() / (REPLS_PER_CPU * cpus))
        await self._demand_nodes(int(min(len(self._agents) + more, self._max_nodes)) if more else 0, cpus)

    async def _demand_nodes(self, nodes: int, cpus: float) -> None:
        """Have Ray's autoscaler bring nodes until there are so many; 0 takes the demand back."""
        if nodes != self._demand:
            self._demand = nodes
            await asyncio.to_thread(request_resources, bundles=[self._resources or {"CPU": cpus}] * nodes)

    # -- one node ----------------------------------------------------------------------------------------------------

    async def _keep_agent(self, node: RayNode) -> None:
        """Keep an agent on a node until the task is cancelled."""
        pause_s, loop = LOOK_S, asyncio.get_running_loop()
        while True:
            began = loop.time()
            self._ended(node.name, await self._agent(node))
            pause_s = LOOK_S if loop.time() - began > MOST_PAUSE_S else min(MOST_PAUSE_S, 2 * pause_s)
            await asyncio.sleep(pause_s)

    async def _agent(self, node: RayNode) -> str:
        """Start an agent on a node, wait until it has ended, and return why."""
        options: dict[str, Any] = {"num_cpus": AGENT_CPUS, "resources": self._resources, "max_concurrency": 3}
        options["scheduling_strategy"] = NodeAffinitySchedulingStrategy(node.id, soft=False)
        if self._runtime_env is not None:
            options["runtime_env"] = dict(self._runtime_env)
        actor = ray.remote(AgentActor).options(**options).remote()
        try:
            starting = asyncio.ensure_future(actor.started.remote())
            if not (await asyncio.wait({starting}, timeout=START_S))[0]:
                _log.warning("the node %s gives no REPL yet: Ray has no free CPU for an agent there", node.name)
            await starting
            return str(await actor.run.remote(msgspec.json.encode(self._order(node.name))))
        except asyncio.CancelledError:
            with contextlib.suppress(RayError, TimeoutError):
                await asyncio.wait_for(actor.end.remote(), END_S + 2)
            self._ended(node.name, "its node has left the Ray cluster, or the cluster is closed")
            raise
        except RayError as error:
            return f"its Ray actor has ended: {_shortened(error)}"
        finally:
            with contextlib.suppress(RayError):
                ray.kill(actor)


def nodes_of(resources: Mapping[str, float]) -> list[RayNode]:
    """Return the living nodes of the Ray cluster with CPUs and these resources."""
    found = []
    for node in ray.nodes():
        has, id = node["Resources"], node["NodeID"]
        if node["Alive"] and has.get("CPU") and all(has.get(name, 0) >= amount for name, amount in resources.items()):
            found.append(RayNode(id, f"{node['NodeManagerHostname']}-{id[:8]}", has["CPU"]))
    return found


# -- this process and Ray --------------------------------------------------------------------------------------------


def connect(address: str) -> bool:
    """Connect this process to a Ray cluster, unless it is connected, and return whether this was done here.

    Raises:
        ConfigurationError: No Ray cluster answers.
    """
    if ray.is_initialized():
        return False
    try:
        ray.init(address, log_to_driver=False, logging_level=logging.WARNING)
    except (ConnectionError, RuntimeError, ValueError, TimeoutError) as error:
        first = str(error).partition("\n")[0].partition(". ")[0]
        raise ConfigurationError(
            f"no Ray cluster answers at {address!r}: {first}; `ray start --head` starts one"
        ) from None
    return True


def own_address() -> str:
    """Return the address of this machine for Ray's nodes."""
    return str(ray.util.get_node_ip_address())


def _shortened(error: RayError) -> str:
    """Return an error in one line: Ray's messages have many, and the last one that names an error says most."""
    lines = [line.strip() for line in str(error).splitlines() if "Error" in line]
    return f"{type(error).__name__}: {(lines or [str(error)])[-1][:MOST_WORDS]}"
