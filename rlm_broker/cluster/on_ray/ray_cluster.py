"""A cluster of the nodes of a Ray cluster: the public `RayCluster`."""

import asyncio
import logging
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from rlm_broker.cluster.nodes import Nodes
from rlm_broker.cluster.on_ray.child import ChildOrder
from rlm_broker.errors import ConfigurationError, require_kind
from rlm_broker.sandbox.sandbox import Sandbox
from rlm_broker.values.extras import require_extra

if TYPE_CHECKING:
    from rlm_broker.cluster.on_ray.agents import RayAgents

TOKEN_S = 300.0
"""Seconds in which an agent that Ray was asked to start has to join. Its token is for one agent."""

_log = logging.getLogger("rlm_broker")


class RayCluster(Nodes):
    """A cluster of the nodes of a Ray cluster, with an agent on each of them.

    Ray says which nodes there are and starts the agents. A node that joins the Ray cluster later gets an agent, too. No
    call, no context and no result crosses Ray: each agent has its own connection to this process.

    Example:
        ```python
        with RayCluster(resources={"rlm": 1}) as cluster, RLM("openai/gpt-5-mini", sandbox=cluster) as rlm:
            print(rlm.completion(Path("logs/"), "Which service failed first?").response)
        ```

    Args:
        address: Address of the Ray cluster, as `ray.init` takes it: "auto" finds the one of this machine, "local"
            starts one. If this process uses Ray already, it stays connected as it is.
        resources: Resources of Ray that each agent reserves, such as `{"rlm": 1}`. A node without them gets no agent.
            None: all nodes get one.
        runtime_env: Ray's `runtime_env` of the agents, for example `{"pip": ["rlm-broker[cluster]"]}`.
        max_runs: Runs that each node takes at the same time; None: 16 for each of its CPUs.
        bind: Address and port to listen on. None: the address that Ray's nodes know this machine by, and a free port.
        sandbox, advertise, plain, min_nodes, join_timeout_s: As for `Nodes`.

    Raises:
        ConfigurationError: An argument cannot be used, or no Ray cluster answers (when it is opened).
        ExtraMissing: The packages of the extra `ray` are not installed.
    """

    def __init__(
        self,
        address: str = "auto",
        *,
        sandbox: Sandbox | str | None = None,
        resources: Mapping[str, float] | None = None,
        runtime_env: Mapping[str, Any] | None = None,
        max_runs: int | None = None,
        bind: str | None = None,
        advertise: str | None = None,
        plain: bool = False,
        min_nodes: int = 1,
        join_timeout_s: float = 60.0,
    ) -> None:
        with require_extra("ray", "RayCluster"):
            import ray  # noqa: F401 - some seconds, and an error before anything else is asked
        require_kind("address", address, str)
        require_kind("resources", resources, Mapping, type(None))
        require_kind("runtime_env", runtime_env, Mapping, type(None))
        require_kind("max_runs", max_runs, int, type(None))
        if max_runs is not None and max_runs < 1:
            raise ConfigurationError(f"max_runs must be 1 or more, not {max_runs}")
        super().__init__(
            bind or "127.0.0.1:0",
            sandbox=sandbox,
            advertise=advertise,
            plain=plain,
            min_nodes=min_nodes,
            join_timeout_s=join_timeout_s,
        )
        self._ray_address = address
        self._resources = dict(resources or {})
        self._runtime_env = runtime_env
        self._max_runs = max_runs
        self._binds_to_ray = bind is None
        self._agents: RayAgents | None = None
        self._owns_ray = False

    async def _open(self) -> None:
        from rlm_broker.cluster.on_ray.agents import RayAgents, connect, own_address

        self._owns_ray = await asyncio.to_thread(connect, self._ray_address)
        try:
            if self._binds_to_ray:
                self._bind = (await asyncio.to_thread(own_address), 0)
            await super()._open()
            self._agents = RayAgents(self._resources, self._order, self._agent_ended, self._runtime_env)
            await self._agents.open()
        except BaseException:
            await self._close()
            raise

    async def _close(self) -> None:
        from rlm_broker.cluster.on_ray.agents import disconnect

        await super()._close()
        agents, self._agents = self._agents, None
        if agents is not None:
            await agents.close()
        if self._owns_ray:
            self._owns_ray = False
            await asyncio.to_thread(disconnect)

    def _order(self, name: str) -> ChildOrder:
        host, port = self.address
        return ChildOrder(host, port, self.fingerprint, self.new_token(uses=1, valid_s=TOKEN_S), name, self._max_runs)

    def _agent_ended(self, name: str, why: str) -> None:
        """Learn from Ray that an agent has ended. Its link may not have noticed yet."""
        placement, admission = self._placement, self._admission
        if placement is None or admission is None:
            return
        _log.warning("the agent of %s has ended: %s", name, why)
        for node in list(placement.nodes):
            if node.name == name:
                node.link.close(why)
        admission.forget(name)
