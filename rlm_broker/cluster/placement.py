"""Which node gets a run: the one with the fewest runs for its size. Runs wait in their order when no node has room.

A run that was lost with its node goes to the front: it has waited already. It avoids the nodes on which it failed, as
long as there are others.
"""

import asyncio
import contextlib
from collections import OrderedDict
from collections.abc import AsyncIterator, Collection
from dataclasses import dataclass

from rlm_broker.cluster.node import Node
from rlm_broker.errors import ClusterFailed


@dataclass(eq=False, slots=True)
class _Waiting:
    """A run that waits for a place. `avoids` are the names of nodes that have failed it."""

    node: "asyncio.Future[Node]"
    avoids: Collection[str]


class Placement:
    """Places runs on nodes. Lives on one event loop.

    Args:
        min_nodes: Nodes that must be there before the first run is placed. Later one is enough.
        join_timeout_s: Seconds that a run waits while there are too few nodes.
        how_to_join: End of the error of a run that waited in vain.

    Attributes:
        nodes: The nodes that have joined, without those that were lost.
    """

    def __init__(self, min_nodes: int, join_timeout_s: float, how_to_join: str) -> None:
        self.nodes: list[Node] = []
        self._min_nodes = min_nodes
        self._join_timeout_s = join_timeout_s
        self._how_to_join = how_to_join
        self._waiting: OrderedDict[_Waiting, None] = OrderedDict()
        self._too_few_since: float | None = asyncio.get_running_loop().time()

    @property
    def waiting(self) -> int:
        """Number of runs that wait for a place."""
        return len(self._waiting)

    def add(self, node: Node) -> None:
        """Place runs on a node that has joined."""
        self.nodes.append(node)
        if len(self.nodes) >= self._min_nodes:
            self._min_nodes, self._too_few_since = 1, None
        self.look()

    def remove(self, node: Node) -> None:
        """Place no further run on a node. Harmless when repeated."""
        if node in self.nodes:
            self.nodes.remove(node)
            if not self.nodes:
                self._too_few_since = asyncio.get_running_loop().time()

    def look(self) -> None:
        """Place the runs that wait, as far as there is room. Call it whenever a node may have more room."""
        if self._too_few_since is not None:
            return
        for waiting in list(self._waiting):
            free = [node for node in self.nodes if node.has_room]
            if not free:
                return
            others = [node for node in free if node.name not in waiting.avoids]
            if not others and any(node.name not in waiting.avoids for node in self.nodes):
                continue  # a node that has not failed this run will have room
            node = min(others or free, key=lambda each: (each.fullness, -each.load.free_bytes))
            node.placed += 1
            del self._waiting[waiting]
            waiting.node.set_result(node)

    @contextlib.asynccontextmanager
    async def place(self, avoids: Collection[str] = (), *, is_again: bool = False) -> AsyncIterator[Node]:
        """Wait for a place on a node, and have it until the context manager exits.

        Args:
            avoids: Names of the nodes that have failed the run.
            is_again: Whether the run had a place before. It goes before all others then.

        Raises:
            ClusterFailed: There were too few nodes for `join_timeout_s` seconds.
        """
        node = await self._node(avoids, is_again=is_again)
        try:
            yield node
        finally:
            node.placed -= 1
            self.look()

    def close(self, why: str) -> None:
        """Fail all runs that wait."""
        for waiting in list(self._waiting):
            waiting.node.set_exception(ClusterFailed(why))
        self._waiting.clear()

    async def _node(self, avoids: Collection[str], *, is_again: bool) -> Node:
        loop = asyncio.get_running_loop()
        waiting = _Waiting(loop.create_future(), avoids)
        self._waiting[waiting] = None
        self._waiting.move_to_end(waiting, last=not is_again)
        self.look()
        ends_at = loop.time() + self._join_timeout_s
        try:
            while not waiting.node.done():
                await asyncio.wait({waiting.node}, timeout=ends_at - loop.time())
                if loop.time() >= ends_at and not waiting.node.done():
                    ends_at = self._looked_again(ends_at)
            return waiting.node.result()
        except BaseException:
            self._waiting.pop(waiting, None)
            if waiting.node.done() and not waiting.node.cancelled() and waiting.node.exception() is None:
                waiting.node.result().placed -= 1  # the place came with the cancellation
                self.look()
            raise

    def _looked_again(self, now: float) -> float:
        """Return until when a run may wait whose time is up, counted from when the nodes became too few.

        Raises:
            ClusterFailed: They were too few for all of that time.
        """
        if self._too_few_since is None:  # the nodes are there, and full
            return now + self._join_timeout_s
        if self._too_few_since + self._join_timeout_s > now:
            return self._too_few_since + self._join_timeout_s
        there_are = f"{len(self.nodes)} of {self._min_nodes} nodes have" if self.nodes else "no node has"
        raise ClusterFailed(
            f"{there_are} joined the cluster within join_timeout_s = {self._join_timeout_s:g}: {self._how_to_join}"
        )
