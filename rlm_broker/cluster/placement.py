"""Which node gets a run: the one with the fewest runs for its size. Runs wait in their order when no node has room.

A run that was lost with its node goes to the front: it has waited already. It avoids the nodes on which it failed, as
long as there are others.
"""

import asyncio
import contextlib
from collections import OrderedDict
from collections.abc import Collection, Iterator

from rlm_broker.cluster.node import Node
from rlm_broker.errors import ClusterFailed


class Placement:
    """Places runs on nodes. Lives on one event loop.

    Args:
        min_nodes: Nodes that must be there before the first run is placed. Later one is enough.
        join_timeout_s: Seconds that a run waits while there are too few nodes.
        how_to_join: End of the error of a run that waited in vain.

    Attributes:
        nodes: The nodes that have joined, without those that were lost.
        lost_runs: Attempts of runs that were lost, with their node or because of it.
    """

    def __init__(self, min_nodes: int, join_timeout_s: float, how_to_join: str) -> None:
        self.nodes: list[Node] = []
        self.lost_runs = 0
        self._why_closed: str | None = None
        self._min_nodes = min_nodes
        self._join_timeout_s = join_timeout_s
        self._how_to_join = how_to_join
        self._waiting: OrderedDict[Place, None] = OrderedDict()
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
        free = [node for node in self.nodes if node.has_room] if self._waiting else []
        for place in list(self._waiting) if free else ():
            if not free:
                return
            others = [node for node in free if node.name not in place.avoids]
            if not others and any(node.name not in place.avoids for node in self.nodes):
                continue  # a node that has not failed this run will have room
            node = min(others or free, key=lambda each: (each.fullness, -each.load.free_bytes))
            node.placed += 1
            if not node.has_room:
                free.remove(node)
            del self._waiting[place]
            place.node.set_result(node)

    @contextlib.contextmanager
    def asked(self, avoids: Collection[str] = (), *, is_again: bool = False) -> Iterator["Place"]:
        """Ask for a place on a node, and have it until the context manager exits. `Place.taken` waits for it.

        Args:
            avoids: Names of the nodes that have failed the run.
            is_again: Whether the run had a place before. It goes before all others then.
        """
        place = Place(self, avoids)
        if self._why_closed is not None:
            place.node.set_exception(ClusterFailed(self._why_closed))
            yield place
            return
        self._waiting[place] = None
        self._waiting.move_to_end(place, last=not is_again)
        try:
            self.look()
            yield place
        finally:
            self._waiting.pop(place, None)
            if place.node.done() and not place.node.cancelled() and place.node.exception() is None:
                place.node.result().placed -= 1
                self.look()

    def close(self, why: str) -> None:
        """Fail all runs that wait, and those that ask later."""
        self._why_closed = why
        for place in list(self._waiting):
            place.node.set_exception(ClusterFailed(why))
        self._waiting.clear()

    @property
    def join_timeout_s(self) -> float:
        """Seconds that a run waits while there are too few nodes."""
        return self._join_timeout_s

    def until(self, now: float) -> float:
        """Return until when a run may wait that has waited for `join_timeout_s`, as a time of the loop.

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


class Place:
    """A place that a run has asked for."""

    def __init__(self, placement: Placement, avoids: Collection[str]) -> None:
        self.node: asyncio.Future[Node] = asyncio.get_running_loop().create_future()
        self.avoids = avoids
        self._placement = placement

    async def taken(self) -> Node:
        """Wait for the place, and return its node.

        Raises:
            ClusterFailed: There were too few nodes for `join_timeout_s` seconds.
        """
        loop = asyncio.get_running_loop()
        ends_at = loop.time() + self._placement.join_timeout_s
        while not self.node.done():
            await asyncio.wait({self.node}, timeout=ends_at - loop.time())
            if loop.time() >= ends_at and not self.node.done():
                ends_at = self._placement.until(ends_at)
        return self.node.result()
