"""The public `RayCluster`: a sandbox with its REPLs on the nodes of a Ray cluster."""

import asyncio
import importlib
import logging
import os
from collections.abc import Mapping, Sequence
from typing import Any

from rlm_broker.concurrency.deadline import to_its_end
from rlm_broker.errors import ConfigurationError, require_kind
from rlm_broker.limits import ReplLimits
from rlm_broker.nodes.cluster import NodeSandbox
from rlm_broker.sandbox.workers.levels import IsolationName
from rlm_broker.values.extras import require_extra

_log = logging.getLogger("rlm_broker")


class RayCluster(NodeSandbox):
    """A `Sandbox` with its REPLs on the nodes of a Ray cluster.

    Example:
        ```python
        with RayCluster("auto") as cluster, RLM("openai/gpt-5-mini", sandbox=cluster) as rlm:
            print(rlm.completion(Path("logs/"), "Which service failed first?").response)
        ```

    It stands wherever a `Sandbox` does. The loop, the models, their keys, your functions and all limits stay in this
    process. An agent on each node forks REPLs, and a REPL goes to the node with the most free places. The REPLs of a
    lost node were killed, and go on elsewhere with their contexts in place.

    Entering it waits for the first node. While there is none, that is logged.

    Args:
        address: Address of the Ray cluster, as `ray.init` takes it: "auto" finds the one of this machine, "local"
            starts one. If this process uses Ray already, it stays connected as it is.
        limits, isolation, allow_exec, seed, python, packages: As for `Sandbox`, for each node. With "auto" the first
            node decides the level of all.
        resources: Resources of Ray for each agent, such as `{"rlm": 1}`. A node without them gets no agent,
            and neither does one without CPUs.
        max_nodes: Nodes at most. While REPLs wait, Ray's autoscaler is asked for further nodes. None has no bound.
        places: REPLs of each node at the same time; None: 16 for each of its CPUs.
        runtime_env: Ray's `runtime_env` of the agents, for example `{"pip": ["rlm-broker[ray]"]}`.

    Raises:
        ConfigurationError: An argument cannot be used, or no Ray cluster answers (when it is opened).
        ExtraMissing: The packages of the extra `ray` are not installed.
    """

    def __init__(
        self,
        address: str = "auto",
        *,
        limits: ReplLimits | None = None,
        isolation: IsolationName = "auto",
        allow_exec: bool | None = None,
        seed: int | None = None,
        python: str | os.PathLike[str] | None = None,
        packages: Sequence[str] | None = None,
        resources: Mapping[str, float] | None = None,
        max_nodes: int | None = None,
        places: int | None = None,
        runtime_env: Mapping[str, Any] | None = None,
    ) -> None:
        with require_extra("ray", "RayCluster"):
            self._ray: Any = importlib.import_module("rlm_broker.nodes.ray_agents")
        for name, number in (("max_nodes", max_nodes), ("places", places)):
            require_kind(name, number, int, type(None))
            if number is not None and number < 1:
                raise ConfigurationError(f"{name} must be 1 or more, not {number}")
        require_kind("address", address, str)
        require_kind("resources", resources, Mapping, type(None))
        require_kind("runtime_env", runtime_env, Mapping, type(None))
        super().__init__(
            limits=limits, isolation=isolation, allow_exec=allow_exec, seed=seed, python=python, packages=packages
        )
        self._ray_address = address
        self._of_agents = (resources or {}, max_nodes, runtime_env)
        self._places = places
        self._agents: Any = None
        self._owns_ray = False

    async def _begin(self) -> None:
        await to_its_end(self._connect)  # a cancelled opening must not connect later, in its thread
        await self._listen(await asyncio.to_thread(self._ray.own_address))
        self._agents = self._ray.RayAgents(
            lambda name: self._order(name, self._places), self._ended, lambda: self._placement.waiting, *self._of_agents
        )
        await self._agents.open()

    async def _connect(self) -> None:
        self._owns_ray = await asyncio.to_thread(self._ray.connect, self._ray_address)

    async def _end(self) -> None:
        agents, self._agents = self._agents, None
        try:
            if agents is not None:
                await agents.close()
        finally:
            if self._owns_ray:
                self._owns_ray = False
                await asyncio.to_thread(self._ray.ray.shutdown)

    def _ended(self, name: str, why: str) -> None:
        """Learn from Ray that an agent has ended. Its link may not have noticed yet."""
        if not self._is_closing:
            _log.warning("the agent of %s has ended: %s", name, why)
        self._lose(name, why)
