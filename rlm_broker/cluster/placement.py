"""Which node gets a run: the one with the fewest runs for its size. Runs wait in their order when no node has room.

A run that was lost with its node goes to the front: it has waited already. It avoids the nodes on which it failed, as
long as there are others, and takes a proven node first, then the one that joined first.

A node is proven when it has answered a run. Sizes are claims, and a name is new with each join. So one holder of the
token could take all runs, drop them, and join anew. The losses of nodes that are not proven count for their source
address. While an address has such losses, the nodes that joined from it later are on trial: they have one run at a time
together, and after some losses pauses that grow.
"""

import asyncio
import contextlib
from collections import OrderedDict
from collections.abc import Collection, Iterator
from dataclasses import dataclass

from rlm_broker.cluster.node import Node
from rlm_broker.errors import ClusterFailed

TRIAL_S = 60.0
"""Seconds after the last loss of an address until its losses are forgotten."""
FREE_LOSSES = 3
"""Losses of an address that cost no pause."""
FIRST_PAUSE_S = 0.5
LONGEST_PAUSE_S = 30.0
"""Seconds after a loss in which nodes on trial get no run, at most. Each pause is twice the one before."""
MOST_REMEMBERED = 4_096
"""Addresses with losses, and names of proven nodes, that are remembered."""


@dataclass
class _Losses:
    """Losses of the nodes of one address that were not proven: each node counts once."""

    first_at: float
    last_at: float
    number: int = 0

    @property
    def paused_until(self) -> float:
        beyond = self.number - FREE_LOSSES
        return self.last_at + (min(LONGEST_PAUSE_S, FIRST_PAUSE_S * 2.0 ** min(beyond - 1, 10)) if beyond > 0 else 0.0)


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
        self._proven: OrderedDict[str, None] = OrderedDict()
        """Names of proven nodes: a node that joins again with its secret stays proven."""
        self._losses: OrderedDict[str, _Losses] = OrderedDict()
        """Source address → losses there."""
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
        node.is_proven = node.name in self._proven
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
        free = self._free() if self._waiting else []
        for place in list(self._waiting) if free else ():
            if not free:
                return
            others = [node for node in free if node.name not in place.avoids]
            if not others and any(node.name not in place.avoids for node in self.nodes):
                continue  # a node that has not failed this run will have room
            if place.is_last and any(node.is_proven and node.name not in place.avoids for node in self.nodes):
                others = [node for node in others if node.is_proven]
                if not others:
                    continue
            # Of equal nodes, `min` takes the one that joined first. Free memory is a claim, and counts for nothing.
            node = min(others or free, key=_unproven if place.is_again else _fullness)
            node.placed += 1
            if self._is_on_trial(node):
                free = [each for each in free if each.source != node.source or not self._is_on_trial(each)]
            elif not node.has_room:
                free.remove(node)
            del self._waiting[place]
            place.node.set_result(node)

    def lose(self, node: Node) -> None:
        """Note that a node has lost or failed a run."""
        self.lost_runs += 1
        node.lost += 1
        if node.is_proven or node.lost > 1:
            return
        now = asyncio.get_running_loop().time()
        losses = self._losses_of(node) or _Losses(now, now)
        losses.number += 1
        losses.last_at = now
        self._losses[node.source] = losses
        self._losses.move_to_end(node.source)
        if len(self._losses) > MOST_REMEMBERED:
            self._losses.popitem(last=False)

    def prove(self, node: Node) -> None:
        """Note that a node has answered a run."""
        node.is_proven = True
        self._proven[node.name] = None
        if len(self._proven) > MOST_REMEMBERED:
            self._proven.popitem(last=False)

    def forget(self, name: str) -> None:
        """Forget a node that has left by itself: its name may go to another one."""
        self._proven.pop(name, None)

    def has_other(self, names: Collection[str]) -> bool:
        """Whether there is a node beside those of these names."""
        return any(node.name not in names and not node.link.is_lost for node in self.nodes)

    def _free(self) -> list[Node]:
        """Return the nodes that may get a further run."""
        now = asyncio.get_running_loop().time()
        busy = {node.source for node in self.nodes if node.placed and self._is_on_trial(node)}
        busy |= {source for source, losses in self._losses.items() if now < losses.paused_until}
        return [node for node in self.nodes if node.has_room and not (node.source in busy and self._is_on_trial(node))]

    def _is_on_trial(self, node: Node) -> bool:
        losses = None if node.is_proven else self._losses_of(node)
        return losses is not None and node.joined_at >= losses.first_at

    def _losses_of(self, node: Node) -> _Losses | None:
        losses = self._losses.get(node.source)
        if losses is not None and asyncio.get_running_loop().time() > losses.last_at + TRIAL_S:
            del self._losses[node.source]
            return None
        return losses

    @contextlib.contextmanager
    def asked(
        self, avoids: Collection[str] = (), *, is_again: bool = False, is_last: bool = False
    ) -> Iterator["Place"]:
        """Ask for a place on a node, and have it until the context manager exits. `Place.taken` waits for it.

        Args:
            avoids: Names of the nodes that have failed the run.
            is_again: Whether the run had a place before. It goes before all others then.
            is_last: Whether it may not be lost once more. It waits for a proven node then, if there is one.
        """
        place = Place(self, avoids, is_again=is_again, is_last=is_last)
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

    def __init__(self, placement: Placement, avoids: Collection[str], *, is_again: bool, is_last: bool) -> None:
        self.node: asyncio.Future[Node] = asyncio.get_running_loop().create_future()
        self.avoids = avoids
        self.is_again = is_again
        self.is_last = is_last
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


def _fullness(node: Node) -> float:
    return node.fullness


def _unproven(node: Node) -> float:
    return 0.0 if node.is_proven else 1.0
