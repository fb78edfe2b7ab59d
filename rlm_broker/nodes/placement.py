"""Placement of REPLs: each goes to the node with the most free places. While there is none, REPLs wait, and it is said.

`NodeForks` is to a cluster what a `ForkServer` is to one machine, so that a sandbox does not know where its workers
are. A lost node is a killed worker: the REPL takes another one, here on another node.
"""

import asyncio
import itertools
import logging
from collections import deque
from collections.abc import Sequence

from rlm_broker.errors import RlmBrokerError
from rlm_broker.limits import ReplLimits
from rlm_broker.nodes.node import Node
from rlm_broker.sandbox.workers.fork_server import Forker
from rlm_broker.sandbox.workers.worker import Worker
from rlm_broker.sandbox.workers.zygote_process import Preparation
from sandbox_worker.wire.level import level_named

FIRST_S, AGAIN_S = 3.0, 60.0
"""Seconds until waiting REPLs are logged, and until they are logged again."""

_log = logging.getLogger("rlm_broker")


class Placement:
    """The nodes of a cluster, and the REPLs waiting for a place.

    Attributes:
        nodes: Open nodes.
        numbers: Draws the numbers of all things on all links.
    """

    def __init__(self) -> None:
        self.nodes: list[Node] = []
        self.numbers = itertools.count(1).__next__
        self._waiting: deque[asyncio.Future[Node]] = deque()
        self._said: asyncio.TimerHandle | None = None
        self._full: dict[str, float] = {}
        self._closed: RlmBrokerError | None = None

    @property
    def waiting(self) -> int:
        """REPLs that wait for a place."""
        return sum(not each.done() for each in self._waiting)

    def add(self, node: Node) -> None:
        """Give places of a node from now on."""
        self.nodes.append(node)
        self.look()

    def remove(self, node: Node) -> None:
        """Give no more places of a node."""
        self.nodes.remove(node)
        self.look()

    async def taken(self) -> Node:
        """Take a place, and return its node. The caller gives it back with `give_back`.

        Raises:
            SandboxFailed: The cluster is closed.
        """
        waiting: asyncio.Future[Node] = asyncio.get_running_loop().create_future()
        self._waiting.append(waiting)
        self.look()
        try:
            return await waiting
        except asyncio.CancelledError:
            if waiting.done() and not waiting.cancelled() and waiting.exception() is None:
                self.give_back(waiting.result())
            raise

    def give_back(self, node: Node) -> None:
        """Free a place."""
        node.taken -= 1
        self.look()

    def close(self, error: RlmBrokerError) -> None:
        """Fail what waits with this error, now and from now on."""
        self._closed = error
        self.look()

    def look(self) -> None:
        """Give free places to the waiting REPLs, the first one first."""
        while self._waiting:
            if self._waiting[0].done():
                self._waiting.popleft()
            elif self._closed is not None:
                self._waiting.popleft().set_exception(self._closed)
            elif (node := max(self.nodes, key=lambda node: node.free, default=None)) is not None and node.free > 0:
                node.taken += 1
                self._waiting.popleft().set_result(node)
            else:
                break
        self._tell_full()
        if self._waiting and not any(node.taken for node in self.nodes):
            self._tell_waiting()
        elif self._said is not None:
            self._said.cancel()
            self._said = None

    def _tell_full(self) -> None:
        """Log each node that has no place although no REPL of ours is there: it counts as none."""
        now = asyncio.get_running_loop().time()
        for node in self.nodes:
            is_full = node.free <= 0 and not node.taken and node.link.why_lost is None
            if is_full and now - self._full.get(node.name, -AGAIN_S) >= AGAIN_S:
                self._full[node.name] = now
                why = "it has no CPU for REPLs" if node.has_room else "it is short of memory"
                _log.warning("the node %s gives no REPL: %s", node.name, why)

    def _tell_waiting(self, *, again: bool = False) -> None:
        """Log that REPLs wait in vain, unless that changes soon."""
        if self._said is None and self._closed is None:
            self._said = asyncio.get_running_loop().call_later(AGAIN_S if again else FIRST_S, self._tell)

    def _tell(self) -> None:
        self._said = None
        _log.warning("%d REPLs wait: no node of the cluster has a place", self.waiting)
        self._tell_waiting(again=True)


class NodeForks:
    """Forks workers on the nodes of a cluster; see `Forker`.

    Args:
        placement: The nodes.
        first: An open node. All others have its level.
        server: Number of the fork server on each node; 0 is the server of the node's sandbox.
        preparation: Imports, set-up code and context of the fork servers.
    """

    def __init__(
        self, placement: Placement, first: Node, server: int = 0, preparation: Preparation | None = None
    ) -> None:
        assert first.opened is not None
        self.level = level_named(first.opened.level)
        self.layers: tuple[str, ...] = tuple(first.opened.layers)
        self.allow_exec = first.opened.allow_exec
        self.memory_bytes = 0
        self._placement = placement
        self._first = first
        self._server = server
        self._preparation = preparation or Preparation()
        self._workers: dict[Worker, Node] = {}
        self._forked = 0
        self._others: list[NodeForks] = []
        self._is_closed = False

    def counts(self) -> tuple[int, int]:
        """Return how many workers live and how many were forked."""
        others = [other.counts() for other in self._others]
        alive = len(self._workers) + sum(count for count, _ in others)
        return alive, self._forked + sum(count for _, count in others)

    def importable(self, names: Sequence[str]) -> tuple[str, ...]:
        """Return which of these modules code on every node can import, as the nodes reported at their opening."""
        known = [set(node.opened.importable) for node in (self._first, *self._placement.nodes) if node.opened]
        return tuple(name for name in names if all(name in each for each in known))

    async def prepared(self, preparation: Preparation) -> Forker:
        """Start fork servers with a preparation: on one node now, on each other one when a worker is forked there.

        Raises:
            ConfigurationError, ContextRefused, SandboxFailed: The preparation failed.
        """
        other = NodeForks(self._placement, self._first, self._placement.numbers(), preparation)
        node = await self._placement.taken()
        try:
            other.memory_bytes = await node.prepared(other._server, preparation)
        except BaseException:
            node.end_server(other._server)
            raise
        finally:
            self._placement.give_back(node)
        self._others = [*(each for each in self._others if not each._is_closed), other]
        return other

    async def spawn(self, limits: ReplLimits) -> Worker:
        """Fork a worker on the node with the most free places; wait while there is none."""
        node = await self._placement.taken()
        try:
            if self._server:
                await node.prepared(self._server, self._preparation)
            worker = await node.fork(limits, self._server)
        except BaseException:
            self._placement.give_back(node)
            raise
        self._workers[worker] = node
        self._forked += 1
        return worker

    async def end(self, worker: Worker) -> None:
        """End a worker. Has no effect when repeated."""
        await worker.kill()
        node = self._workers.pop(worker, None)
        if node is not None:
            self._placement.give_back(node)

    async def close(self) -> None:
        """End all workers, and the fork servers with a preparation. Has no effect when repeated."""
        self._is_closed = True
        await asyncio.gather(*(other.close() for other in self._others))
        await asyncio.gather(*(self.end(worker) for worker in list(self._workers)))
        for node in self._placement.nodes:
            node.end_server(self._server)
