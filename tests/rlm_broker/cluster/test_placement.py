"""Which node gets a run, and in which order runs that wait get theirs."""

import asyncio
from collections.abc import Sequence
from contextlib import ExitStack

import pytest

from rlm_broker.cluster import placement as module
from rlm_broker.cluster.contexts import Contexts
from rlm_broker.cluster.link import Link, from_agent
from rlm_broker.cluster.messages import PROTOCOL, Join, Load
from rlm_broker.cluster.node import Node
from rlm_broker.cluster.placement import Place, Placement
from rlm_broker.errors import ClusterFailed
from sandbox_worker import RELEASE
from tests.support.waiting import turns


def node(name: str, max_runs: int = 2, free_bytes: int = 1 << 30, source: str = "") -> Node:
    """A node whose link has no connection."""
    join = Join("token", PROTOCOL, RELEASE, name, cpus=1, memory_bytes=free_bytes, max_runs=max_runs)
    return Node(Link(name, from_agent), join, Contexts(), lambda: None, source)


def placement(*nodes: Node, min_nodes: int = 1, join_timeout_s: float = 60.0) -> Placement:
    made = Placement(min_nodes, join_timeout_s, "run this")
    for each in nodes:
        made.add(each)
    return made


class Runs:
    """Runs that ask for places, one after the other."""

    def __init__(self, placing: Placement) -> None:
        self._placing = placing
        self._stacks: list[ExitStack] = []
        self.places: list[Place] = []

    def ask(self, avoids: Sequence[str] = (), *, is_again: bool = False, is_last: bool = False) -> Place:
        stack = ExitStack()
        place = stack.enter_context(self._placing.asked(avoids, is_again=is_again, is_last=is_last))
        self._stacks.append(stack)
        self.places.append(place)
        return place

    def end(self, number: int) -> None:
        self._stacks[number].close()

    @property
    def names(self) -> list[str | None]:
        """Name of the node of each run, or None."""
        return [place.node.result().name if place.node.done() else None for place in self.places]


async def test_the_emptiest_node_for_its_size_is_taken() -> None:
    """A node with four places gets twice the runs of one with two."""
    runs = Runs(placement(node("small", 2), node("large", 4)))
    for _ in range(6):
        runs.ask()
    assert sorted(filter(None, runs.names)) == ["large"] * 4 + ["small"] * 2
    assert set(runs.names[:2]) == {"small", "large"}


async def test_of_equal_nodes_the_oldest_is_taken() -> None:
    """Memory is a claim of the node, and draws no run."""
    runs = Runs(placement(node("old", free_bytes=1 << 20), node("new", free_bytes=1 << 40)))
    runs.ask()
    assert runs.names == ["old"]


async def test_a_lost_run_takes_a_proven_node() -> None:
    """A further attempt goes to a proven node, however full, and a last one waits for it."""
    new, proven = node("new", 60_000), node("proven", 2)
    placing = placement(new, proven)
    placing.prove(proven)
    runs = Runs(placing)
    for _ in range(3):
        runs.ask(is_again=True)
    runs.ask(is_again=True, is_last=True)
    assert runs.names == ["proven", "proven", "new", None]
    runs.end(0)
    assert runs.names[3] == "proven"


async def test_an_address_with_losses_is_on_trial(leaping_clock: object) -> None:  # noqa: ARG001
    """Its new nodes have one run at a time together, and after some losses none for a while."""
    placing = placement()
    runs = Runs(placing)
    for number in range(3):
        stranger = node(f"lost-{number}", source="there")
        placing.add(stranger)
        placing.lose(stranger)
        placing.remove(stranger)
    first, second = node("first", source="there"), node("second", source="there")
    for each in (first, second, node("elsewhere", 1, source="here")):
        placing.add(each)
    for _ in range(3):
        runs.ask()
    assert runs.names == ["first", "elsewhere", None]
    placing.lose(first)
    runs.end(0)
    assert runs.names[2] is None
    await asyncio.sleep(0.6)
    placing.look()
    assert runs.names[2] == "first"
    placing.prove(first)
    runs.ask()
    runs.ask()
    assert runs.names[3:] == ["second", "first"]


async def test_losses_of_an_address_are_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    """An address is on trial for a while only."""
    placing = placement()
    stranger = node("lost", source="there")
    placing.lose(stranger)
    placing.add(node("next", 2, source="there"))
    runs = Runs(placing)
    runs.ask()
    runs.ask()
    assert runs.names == ["next", None]
    monkeypatch.setattr(module, "TRIAL_S", -1.0)
    placing.look()
    assert runs.names == ["next", "next"]


async def test_runs_wait_in_their_order() -> None:
    """A run that had a place before goes to the front; the others keep their order."""
    placing = placement(node("one", 1))
    runs = Runs(placing)
    for _ in range(3):
        runs.ask()
    runs.ask(is_again=True)
    assert (runs.names, placing.waiting) == (["one", None, None, None], 3)
    runs.end(0)
    assert runs.names == ["one", None, None, "one"]
    runs.end(3)
    assert runs.names == ["one", "one", None, "one"]
    runs.end(1)
    assert runs.names == ["one", "one", "one", "one"]


async def test_a_run_that_leaves_the_queue_costs_no_place() -> None:
    """A cancelled run gives its place back, also if it got it in the same moment."""
    runs = Runs(placement(node("one", 1)))
    runs.ask()
    runs.ask()
    runs.ask()
    runs.end(1)
    runs.end(0)
    assert runs.names[2] == "one"


async def test_a_full_slow_or_lost_node_gets_no_run(leaping_clock: object) -> None:  # noqa: ARG001
    """A node that says it is full, that is late, or whose link has ended, gets none until that has changed."""
    one = node("one")
    placing = placement(one)
    runs = Runs(placing)
    one.load = Load(0, 0, is_full=True)
    runs.ask()
    assert runs.names == [None]
    one.load = Load(0, 0)
    await asyncio.sleep(2)
    placing.look()
    assert runs.names == [None]
    one.link.close()
    placing.look()
    assert runs.names == [None]


async def test_a_failing_node_gets_one_run_at_a_time() -> None:
    """A node on which runs fail must not draw all runs, since it always has room."""
    bad = node("bad", 4)
    bad.faults = 1
    runs = Runs(placement(bad))
    runs.ask()
    runs.ask()
    assert runs.names == ["bad", None]


async def test_a_run_avoids_the_nodes_that_failed_it() -> None:
    """A run waits for another node, and lets those behind it pass. If there is none, it takes what there is."""
    good, bad = node("good", 1), node("bad", 2)
    placing = placement(good, bad)
    runs = Runs(placing)
    runs.ask(["bad"])
    runs.ask(["bad"])
    runs.ask()
    assert runs.names == ["good", None, "bad"]
    runs.end(0)
    assert runs.names == ["good", "good", "bad"]
    placing.remove(good)
    runs.ask(["bad"])
    assert runs.names[3] == "bad"


async def test_the_first_runs_wait_for_enough_nodes() -> None:
    """Before the first run, `min_nodes` must have joined. Afterwards one is enough."""
    one, two = node("one"), node("two")
    placing = placement(one, min_nodes=2)
    runs = Runs(placing)
    runs.ask()
    assert runs.names == [None]
    placing.add(two)
    assert runs.names != [None]
    placing.remove(two)
    runs.ask()
    assert runs.names[1] == "one"


async def test_too_few_nodes_end_a_run_in_time(leaping_clock: object) -> None:  # noqa: ARG001
    """The error says how many nodes there are, and what to do."""
    runs = Runs(placement(node("one"), min_nodes=3, join_timeout_s=5))
    with pytest.raises(ClusterFailed, match="1 of 3 nodes have joined the cluster within join_timeout_s = 5: run this"):
        await runs.ask().taken()


async def test_full_nodes_are_waited_for(leaping_clock: object) -> None:  # noqa: ARG001
    """The time for joining is not that of a queue: runs wait as long as nodes are there, and again so long after."""
    one = node("one", 1)
    placing = placement(one, join_timeout_s=5)
    runs = Runs(placing)
    runs.ask()
    loop = asyncio.get_running_loop()
    waiting = loop.create_task(runs.ask().taken())
    await asyncio.sleep(23)
    assert not waiting.done()
    placing.remove(one)
    gone_at = loop.time()
    with pytest.raises(ClusterFailed, match="no node has joined"):
        await waiting
    assert loop.time() - gone_at == pytest.approx(5, abs=0.1)


async def test_a_closed_cluster_fails_those_that_wait() -> None:
    placing = placement()
    runs = Runs(placing)
    waiting = asyncio.get_running_loop().create_task(runs.ask().taken())
    await turns()
    placing.close("the cluster was closed")
    with pytest.raises(ClusterFailed, match="the cluster was closed"):
        await waiting
