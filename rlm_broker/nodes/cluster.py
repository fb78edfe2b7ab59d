"""A sandbox with its REPLs on nodes, as the base of all kinds of clusters."""

import asyncio
import contextlib
import logging
import os
from collections.abc import Sequence
from ipaddress import ip_address

import msgspec

from rlm_broker.broker.transport.listener import Listener
from rlm_broker.concurrency.deadline import unlisted
from rlm_broker.errors import ConfigurationError, RlmBrokerError, SandboxFailed
from rlm_broker.limits import ReplLimits
from rlm_broker.nodes.agent import AgentOrder
from rlm_broker.nodes.link import Link
from rlm_broker.nodes.messages import OpenNode
from rlm_broker.nodes.node import Node
from rlm_broker.nodes.placement import NodeForks, Placement
from rlm_broker.nodes.port import AgentPort
from rlm_broker.sandbox.sandbox import Sandbox
from rlm_broker.sandbox.workers.fork_server import Forker
from rlm_broker.sandbox.workers.levels import IsolationName
from rlm_broker.sandbox.workers.python_paths import WORTH_TELLING
from rlm_broker.values.stats import NodeStats
from sandbox_worker.wire.level import LevelName

CLOSED = "the cluster was closed"

_log = logging.getLogger("rlm_broker")


class NodeSandbox(Sandbox):
    """A sandbox with its REPLs on nodes. A subclass starts an agent on each node, with an order of `_order`.

    Args:
        limits, isolation, allow_exec, seed, python, packages: As for `Sandbox`, for each node.
    """

    def __init__(
        self,
        *,
        limits: ReplLimits | None = None,
        isolation: IsolationName = "auto",
        allow_exec: bool | None = None,
        seed: int | None = None,
        python: str | os.PathLike[str] | None = None,
        packages: Sequence[str] | None = None,
    ) -> None:
        super().__init__(limits, isolation, allow_exec=allow_exec, warm=0, seed=seed, python=python, packages=packages)
        folder, names = None if python is None else os.fspath(python), None if packages is None else tuple(packages)
        self._wanted = OpenNode(1, isolation, allow_exec, seed, folder, names, WORTH_TELLING)
        self._port: AgentPort | None = None
        self._address = ("", 0)
        self._placement = Placement()
        self._level_name: LevelName | None = None
        self._serving: dict[asyncio.Task[None], Node] = {}
        self._is_closing = False

    def nodes(self) -> tuple[NodeStats, ...]:
        """Return the present nodes, with their REPLs."""
        found = [(node, node.opened) for node in list(self._placement.nodes)]
        return tuple(NodeStats(node.name, told.level, node.taken, told.places) for node, told in found if told)

    # -- agents ------------------------------------------------------------------------------------------------------

    async def _begin(self) -> None:
        """Listen, and start an agent on each present and later node."""
        raise NotImplementedError

    async def _end(self) -> None:
        """End the agents, and start no more. Has no effect when repeated."""
        raise NotImplementedError

    async def _listen(self, host: str) -> None:
        """Listen for agents on a free port of an address, with TLS beyond loopback."""
        self._port = AgentPort(is_encrypted=not ip_address(host).is_loopback)
        self._address = await self._port.open(host)

    def _order(self, name: str, places: int | None = None) -> AgentOrder:
        """Return the order for the agent of a node. Its token is for one agent, until the node's next order.

        Args:
            name: Name of the node.
            places: REPLs it gives at the same time; None: by its CPUs.
        """
        assert self._port is not None
        token = self._port.expect(name, lambda: self._joined(name))
        return AgentOrder(*self._address, self._port.fingerprint, token, places)

    def _lose(self, name: str, why: str) -> None:
        """Give a node up after the end of its agent, before its link notices."""
        for node in list(self._serving.values()):
            if node.name == name:
                node.link.close(why)

    def _joined(self, name: str) -> Link:
        gone, placement = asyncio.Event(), self._placement

        def changed() -> None:
            if node.link.why_lost is not None:
                gone.set()
            placement.look()

        node = Node(name, placement.numbers, changed)
        task = unlisted(self._serve(node, gone))
        self._serving[task] = node
        task.add_done_callback(self._serving.pop)
        return node.link

    async def _serve(self, node: Node, gone: asyncio.Event) -> None:
        """Have a node until it is lost."""
        wanted = msgspec.structs.replace(self._wanted, seed=self.seed)
        try:
            opened = await node.open(wanted)
            if self._level_name not in (None, opened.level):  # another node was faster, and has decided
                opened = await node.open(msgspec.structs.replace(wanted, isolation=self._level_name))
        except RlmBrokerError as error:
            if isinstance(error, ConfigurationError) and self._level_name is None:
                self._placement.close(error)  # no other node could use the arguments either
            elif not self._is_closing:
                _log.warning("the node %s gives no REPLs: %s", node.name, error)
            node.link.close("it gives no REPLs")
            return
        self._level_name = opened.level
        _log.info("the node %s gives up to %d REPLs at %s", node.name, opened.places, opened.level)
        self._placement.add(node)
        await gone.wait()
        self._placement.remove(node)
        if not self._is_closing:
            _log.warning("the node %s of the cluster is gone: %s", node.name, node.link.why_lost)

    # -- its life ----------------------------------------------------------------------------------------------------

    async def _forker(self, listener: Listener) -> Forker:  # noqa: ARG002 - workers dial it from here, as ever
        self._placement, self._level_name, self._is_closing = Placement(), None, False
        await self._begin()
        first = await self._placement.taken()
        self._placement.give_back(first)
        return NodeForks(self._placement, first)

    async def _close(self) -> None:
        self._is_closing = True
        self._placement.close(SandboxFailed(CLOSED))
        try:
            await super()._close()
        finally:
            if self._port is not None:
                await self._port.close()
            for node in list(self._serving.values()):  # also one without an open sandbox
                node.link.close(CLOSED)
            with contextlib.suppress(RlmBrokerError):
                await self._end()
            if self._serving:
                await asyncio.wait(self._serving)
