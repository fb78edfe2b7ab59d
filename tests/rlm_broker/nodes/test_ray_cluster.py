"""`RayCluster` on a real Ray of this machine: a head without CPUs, and nodes that come and go."""

import contextlib
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from rlm_broker import RLM, ConfigurationError, RayCluster, RunLimits, ScriptedClient
from rlm_broker.nodes.agent import MODULE
from sandbox_worker.wire.level import LevelName
from tests.support.forked_python import python
from tests.support.waiting import until_now

pytest.importorskip("ray.cluster_utils", reason="needs the extra ray")  # a folder `ray` is importable as well

pytestmark = pytest.mark.ray
ANSWERS = "```repl\nFINAL(len(context))\n```"


@pytest.fixture(scope="module")
def machines() -> Iterator[Any]:
    """A Ray of a head without CPUs, and two nodes, of which the second has the resource `rlm`."""
    from ray.cluster_utils import Cluster

    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 0})
    cluster.add_node(num_cpus=1)
    cluster.add_node(num_cpus=1, resources={"rlm": 1})
    try:
        yield cluster
    finally:
        with contextlib.suppress(ValueError):
            cluster.shutdown()


@pytest.fixture(scope="module")
def cluster(machines: Any) -> Iterator[RayCluster]:
    with RayCluster(machines.address, places=2) as cluster:
        until_now(lambda: len(cluster.nodes()) == 2)
        yield cluster


def agents() -> list[psutil.Process]:
    """Agents of this machine that an actor of Ray has started."""
    found = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            parent = process.parent()
            if MODULE in process.cmdline() and parent is not None and "ray" in " ".join(parent.cmdline()):
                found.append(process)
    return found


def test_repls_are_on_the_nodes_with_cpus(cluster: RayCluster) -> None:
    """The head, which has none, gives no REPL. All places of all nodes are used, and a REPL more waits."""
    with RLM(ScriptedClient([ANSWERS] * 5), sandbox=cluster) as rlm:
        runs = [rlm.start("four", "?") for _ in range(5)]
        assert {run.result().response for run in runs} == {"4"}
    assert len(agents()) == len(cluster.nodes()) == 2


def test_token_is_in_no_command_line_and_no_environment(cluster: RayCluster) -> None:
    assert cluster.nodes()
    for process in agents():
        assert process.cmdline()[1:] == ["-m", MODULE]
        assert not any("token" in name.lower() for name in process.environ() if not name.startswith("RAY_"))


def test_killed_agent_is_replaced_and_its_block_was_killed(cluster: RayCluster) -> None:
    with cluster.repl("four") as repl:
        assert repl.execute("x = 1").status == "ok"
        before = agents()
        for agent in before:
            agent.kill()
        until_now(lambda: len(cluster.nodes()) == 2 and not {*before} & {*agents()})
        assert repl.execute("print(x)").status == "killed"
        assert repl.execute("print(len(context))").stdout == "4\n"


def test_node_that_comes_gives_repls_and_one_that_leaves_none(machines: Any, cluster: RayCluster) -> None:
    added = machines.add_node(num_cpus=1)
    until_now(lambda: len(cluster.nodes()) == 3)
    machines.remove_node(added, allow_graceful=False)
    until_now(lambda: len(cluster.nodes()) == 2 and len(agents()) == 2)


def test_resources_and_most_nodes_choose_nodes(machines: Any, cluster: RayCluster) -> None:
    assert len(cluster.nodes()) == 2
    for given in ({"resources": {"rlm": 1}}, {"max_nodes": 1}):
        with RayCluster(machines.address, **given) as other, other.repl("four") as repl:
            assert repl.execute("print(len(context))").stdout == "4\n"
            assert len(other.nodes()) == 1
    until_now(lambda: len(agents()) == 2)


def test_waiting_repls_are_a_demand_of_ray(machines: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """While REPLs wait, the autoscaler is asked for nodes, up to the most; the demand is taken back afterwards."""
    from rlm_broker.nodes import ray_agents

    asked: list[int] = []
    monkeypatch.setattr(ray_agents, "request_resources", lambda bundles: asked.append(len(bundles)))
    with RayCluster(machines.address, places=1, resources={"rlm": 1}, max_nodes=2) as cluster, cluster.repl():
        with RLM(ScriptedClient([ANSWERS]), sandbox=cluster) as rlm:
            waiting = rlm.start("four", "?")
            until_now(lambda: asked[-1:] == [2])
            waiting.cancel()
        until_now(lambda: asked[-1:] == [0])


@pytest.mark.parametrize("level", ["strict", "standard"])
def test_repl_on_node_reaches_nothing_of_ray(level: LevelName, machines: Any) -> None:
    """Code on a node reaches no port of Ray, no port of the orchestrator, no socket of Ray's, and no file of its."""
    from ray.util import get_node_ip_address

    with RayCluster(machines.address, isolation=level) as cluster, RLM(ScriptedClient([TRIES]), sandbox=cluster) as rlm:
        ports, paths = sorted({*ray_ports(), cluster._address[1]}), ray_paths()
        assert len(ports) > 4
        where = {"ports": ports, "hosts": ["127.0.0.1", get_node_ip_address()], "paths": paths}
        answer = rlm.completion(where, "?", limits=RunLimits(max_iterations=1))
    assert answer.response == f"reached [], tried {2 * len(ports) + 4 * len(paths)}"


TRIES = """```repl
import os, socket
reached, tried = [], 0
for host in context["hosts"]:
    for port in context["ports"]:
        tried += 1
        try:
            socket.create_connection((host, port), timeout=1).close()
            reached.append((host, port))
        except OSError:
            pass
for path in context["paths"]:
    ways = (os.listdir, open, os.unlink, lambda path: socket.socket(socket.AF_UNIX).connect(path))
    for way in ways:
        tried += 1
        try:
            way(path)
            reached.append((path, ways.index(way)))
        except OSError:
            pass
FINAL(f"reached {reached}, tried {tried}")
```"""


def ray_ports() -> set[int]:
    """Ports on which Ray's processes listen."""
    found = set()
    for process in psutil.process_iter(["name", "cmdline"]):
        with contextlib.suppress(psutil.Error):
            if "ray" in " ".join(process.info["cmdline"] or ()):
                found |= {each.laddr.port for each in process.net_connections() if each.status == psutil.CONN_LISTEN}
    return found


def ray_paths() -> list[str]:
    """Files and sockets of Ray's."""
    session = Path("/tmp/ray/session_latest")
    return ["/tmp/ray", str(session), *map(str, (session / "sockets").iterdir()), str(Path("~/.ray").expanduser())]


CANCELS = """
import asyncio, sys, threading
import ray
from rlm_broker import RayCluster
from sandbox_worker.wire.level import LevelName

begun, connect = threading.Event(), ray.init

def connects(*given, **named):
    begun.set()
    return connect(*given, **named)

async def main():
    opening = asyncio.create_task(RayCluster(sys.argv[1]).__aenter__())
    await asyncio.to_thread(begun.wait)
    opening.cancel()
    await asyncio.wait({opening})
    return opening.cancelled()

ray.init = connects
print(asyncio.run(main()), ray.is_initialized())  # all threads have ended
"""


def test_cancelled_opening_leaves_no_connection_with_ray(machines: Any) -> None:
    """Ray connects in a thread, which goes on after the cancellation."""
    assert python("-c", CANCELS, machines.address, check=True).stdout.split() == ["True", "False"]


def test_missing_ray_is_one_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "rlm_broker.nodes.ray_agents", raising=False)
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(ConfigurationError, match=r"RayCluster needs packages .*: pip install 'rlm-broker\[ray\]'"):
        RayCluster()
