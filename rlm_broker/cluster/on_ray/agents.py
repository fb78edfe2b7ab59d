"""Agents on the nodes of a Ray cluster: one actor each, which does no more than to start an agent and to end it.

Theory of operation. Ray says which nodes there are, and puts an actor on each of them. The actor holds a pipe to the
standard input of a child: the agent, the same as `rlm-broker node`. The child ends when that pipe ends, so it ends with
its actor, whatever ends that one. All that belongs to runs crosses the agent's own connection, and nothing crosses Ray
but what an agent needs to join.

An actor whose call returns or fails has lost its agent. Ray says so as soon as the actor's process or its node is gone,
which may be before the silence of the agent is noticed, or long after.
"""

import asyncio
import contextlib
import logging
import subprocess
import sys
from collections.abc import Callable, Mapping
from typing import Any

import msgspec
import ray
from ray.exceptions import RayError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from rlm_broker.cluster.on_ray.child import END_S, MODULE, ChildOrder
from rlm_broker.errors import ConfigurationError

LOOK_S = 1.0
"""Seconds between two looks at the nodes of the Ray cluster."""
MOST_PAUSE_S = 30.0
"""Seconds after which an agent that keeps failing is started again. The first time it is `LOOK_S`, then twice as long,
and so on."""
MOST_WORDS = 400
"""Characters of an agent's last words that are kept."""
ID_DIGITS = 8
"""Digits of the id of a Ray node that its name has."""


class RayNode(msgspec.Struct, frozen=True):
    """A node of a Ray cluster.

    Attributes:
        id: Ray's id of it.
        name: Name in the cluster of agents: its host name, with the beginning of the id.
    """

    id: str
    name: str


class AgentActor:
    """Actor that has an agent as its child."""

    def __init__(self) -> None:
        self._child: subprocess.Popen[bytes] | None = None

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
        if child is None or child.stdin is None:
            return
        with contextlib.suppress(OSError, ValueError):  # `run` has closed it
            child.stdin.close()
        try:
            child.wait(END_S + 1)
        except subprocess.TimeoutExpired:
            child.kill()


class RayAgents:
    """One agent on each node of a Ray cluster, as long as it is open. Lives on one event loop.

    Args:
        resources: Resources that each agent reserves. A node without them gets none.
        order: Returns what an agent of that name needs to join.
        lost: Called with the name of an agent that has ended, and why.
        runtime_env: Ray's `runtime_env` of the actors.
    """

    def __init__(
        self,
        resources: Mapping[str, float],
        order: Callable[[str], ChildOrder],
        lost: Callable[[str, str], None],
        runtime_env: Mapping[str, Any] | None = None,
    ) -> None:
        self._resources = resources
        self._order = order
        self._lost = lost
        self._runtime_env = runtime_env
        self._agents: dict[str, asyncio.Task[None]] = {}
        self._leaving: set[asyncio.Task[None]] = set()
        """Agents of nodes that have left the Ray cluster, until they have ended."""
        self._looking: asyncio.Task[None] | None = None

    async def open(self) -> None:
        """Start an agent on each node that is there now, and look for further nodes from now on.

        Raises:
            ConfigurationError: No node of the Ray cluster has the resources.
        """
        if not await self._look():
            raise ConfigurationError(
                f"no node of the Ray cluster has the resources {dict(self._resources)}: start one with "
                "`ray start --resources=...`, or leave resources out"
            )
        self._looking = asyncio.create_task(self._keep_looking())

    async def close(self) -> None:
        """End all agents."""
        tasks = [*self._agents.values(), *self._leaving, *([self._looking] if self._looking else [])]
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks)
        self._agents.clear()
        self._looking = None

    # -- one look ----------------------------------------------------------------------------------------------------

    async def _keep_looking(self) -> None:
        while True:
            await asyncio.sleep(LOOK_S)
            with contextlib.suppress(RayError, ConnectionError):  # Ray's head is away; agents do not need it
                await self._look()

    async def _look(self) -> list[RayNode]:
        nodes = await asyncio.to_thread(nodes_of, self._resources)
        for gone in self._agents.keys() - {node.id for node in nodes}:
            leaving = self._agents.pop(gone)
            self._leaving.add(leaving)
            leaving.add_done_callback(self._leaving.discard)
            leaving.cancel()
        for node in nodes:
            if node.id not in self._agents:
                self._agents[node.id] = asyncio.create_task(self._keep_agent(node))
        return nodes

    # -- one node ----------------------------------------------------------------------------------------------------

    async def _keep_agent(self, node: RayNode) -> None:
        """Keep an agent on a node until the task is cancelled."""
        pause_s = LOOK_S
        while True:
            began = asyncio.get_running_loop().time()
            why = await self._agent(node)
            self._lost(node.name, why)
            has_lasted = asyncio.get_running_loop().time() - began > MOST_PAUSE_S
            pause_s = LOOK_S if has_lasted else min(MOST_PAUSE_S, 2 * pause_s)
            await asyncio.sleep(pause_s)

    async def _agent(self, node: RayNode) -> str:
        """Start an agent on a node, wait until it has ended, and return why."""
        options: dict[str, Any] = {
            "num_cpus": 0,
            "resources": dict(self._resources),
            "max_concurrency": 2,
            "scheduling_strategy": NodeAffinitySchedulingStrategy(node.id, soft=False),
        }
        if self._runtime_env is not None:
            options["runtime_env"] = dict(self._runtime_env)
        actor = ray.remote(AgentActor).options(**options).remote()
        try:
            return str(await actor.run.remote(msgspec.json.encode(self._order(node.name))))
        except asyncio.CancelledError:
            with contextlib.suppress(RayError, TimeoutError):
                await asyncio.wait_for(_awaited(actor.end.remote()), END_S + 2)
            self._lost(node.name, "its node has left the Ray cluster, or the cluster is closed")
            raise
        except RayError as error:
            return f"its Ray actor has ended: {_shortened(error)}"
        finally:
            with contextlib.suppress(RayError):
                ray.kill(actor)


def nodes_of(resources: Mapping[str, float]) -> list[RayNode]:
    """Return the living nodes of the Ray cluster that have these resources."""
    found = []
    for node in ray.nodes():
        if node["Alive"] and all(node["Resources"].get(name, 0) >= amount for name, amount in resources.items()):
            found.append(RayNode(node["NodeID"], f"{node['NodeManagerHostname']}-{node['NodeID'][:ID_DIGITS]}"))
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


def disconnect() -> None:
    """Disconnect this process from Ray."""
    ray.shutdown()


def own_address() -> str:
    """Return the address by which Ray's nodes know this machine."""
    return str(ray.util.get_node_ip_address())


def _shortened(error: RayError) -> str:
    """Return what went wrong in one line: Ray's messages have many, and the last one that names an error says most."""
    lines = [line.strip() for line in str(error).splitlines() if "Error" in line]
    return f"{type(error).__name__}: {(lines or [str(error)])[-1][:MOST_WORDS]}"


async def _awaited(reference: Any) -> None:
    await reference
