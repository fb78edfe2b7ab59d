"""`RayCluster` on a real Ray: a head and a second node on this machine."""

import contextlib
import socket
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from rlm_broker import RLM, ConfigurationError, RunLimits, ScriptedClient
from rlm_broker.cluster.on_ray.child import MODULE
from rlm_broker.cluster.on_ray.ray_cluster import RayCluster
from tests.support.waiting import until_now

pytest.importorskip("ray.cluster_utils", reason="needs the extra ray")  # a folder `ray` is importable as well

pytestmark = pytest.mark.ray
SLOW_S = 90.0
"""Seconds that Ray may take on a busy machine."""
ANSWERS = "```repl\nFINAL(len(context))\n```"


@pytest.fixture(scope="module")
def machines() -> Iterator[Any]:
    """Two nodes of Ray, of which the second has the resource `rlm`."""
    from ray.cluster_utils import Cluster

    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 1})
    cluster.add_node(num_cpus=1, resources={"rlm": 1})
    try:
        yield cluster
    finally:
        cluster.shutdown()


@pytest.fixture(scope="module")
def cluster(machines: Any) -> Iterator[RayCluster]:
    with RayCluster(machines.address, min_nodes=2, join_timeout_s=SLOW_S) as cluster:
        yield cluster


def children() -> list[psutil.Process]:
    """Agents of this machine."""
    found = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            if MODULE in process.cmdline():
                found.append(process)
    return found


def names(cluster: RayCluster) -> set[str]:
    return {node.name for node in cluster.stats().nodes}


def test_runs_are_answered_on_all_nodes(cluster: RayCluster) -> None:
    """Two runs that wait for each other are on two nodes."""
    both = threading.Barrier(2)
    seen = set[str]()

    def meet(host: str) -> str:
        seen.add(host)
        both.wait(SLOW_S)
        return host

    code = "```repl\nimport os\nmeet(str(os.getpid()) + open('/proc/self/stat').read())\nFINAL(len(context))\n```"
    with RLM(ScriptedClient([code, code]), sandbox=cluster, tools={"meet": meet}) as rlm:
        runs = [rlm.start("four", "How long is it?") for _ in range(2)]
        assert [run.result(SLOW_S).response for run in runs] == ["4", "4"]
    assert len(names(cluster)) == 2


def test_token_is_in_no_command_line(cluster: RayCluster) -> None:
    """The token of an agent is in no command line and in no environment."""
    agents = children()
    assert len(agents) == 2
    for process in agents:
        assert process.cmdline()[1:] == ["-m", MODULE]
        assert cluster.token not in str(process.environ())
        assert not any("token" in name.lower() for name in process.environ())


def test_killed_agent_is_replaced(cluster: RayCluster) -> None:
    before = children()
    before[0].kill()
    until_now(lambda: before[0] not in (now := children()) and len(now) == 2)
    until_now(lambda: len(names(cluster)) == 2)


def test_new_node_gets_agent_and_lost_node_none(machines: Any, cluster: RayCluster) -> None:
    """A node that joins the Ray cluster gets an agent; when it is lost, the agent has ended, and Nodes knows it."""
    added = machines.add_node(num_cpus=1)
    until_now(lambda: len(names(cluster)) == 3)
    machines.remove_node(added, allow_graceful=False)
    until_now(lambda: len(names(cluster)) == 2 and len(children()) == 2)
    with RLM(ScriptedClient([ANSWERS]), sandbox=cluster) as rlm:
        assert rlm.completion("four", "How long is it?").response == "4"


@pytest.mark.parametrize("level", ["strict", "standard"])
def test_repl_on_node_reaches_nothing_of_ray(level: str, machines: Any) -> None:
    """Code on a node reaches no port of Ray, no port of the broker, no socket of Ray's, and no file of its."""
    with (
        RayCluster(machines.address, sandbox=level, join_timeout_s=SLOW_S) as cluster,
        RLM(ScriptedClient([TRIES]), sandbox=cluster) as rlm,
    ):
        ports = sorted({*ray_ports(), cluster.address[1]})
        assert len(ports) > 4
        address = {"ports": ports, "hosts": ["127.0.0.1", cluster.address[0], node_address()], "paths": ray_paths()}
        answer = rlm.completion(address, "?", limits=RunLimits(max_iterations=1))
        assert any(reachable(host, port) for host in ("127.0.0.1", node_address()) for port in ports)
    assert answer.response == f"reached [], tried {3 * len(ports) + 5 * len(ray_paths())}"


def test_cluster_with_resources_takes_nodes_with_them(machines: Any, cluster: RayCluster) -> None:
    before = len(children())
    assert before == len(names(cluster))
    with RayCluster(machines.address, resources={"rlm": 1}, join_timeout_s=SLOW_S) as other:
        with RLM(ScriptedClient([ANSWERS]), sandbox=other) as rlm:
            assert rlm.completion("four", "How long is it?").response == "4"
        assert len(names(other)) == 1
        assert len(children()) == before + 1
    until_now(lambda: len(children()) == before)


def test_resources_that_no_node_has_are_refused(machines: Any, cluster: RayCluster) -> None:
    with (
        pytest.raises(ConfigurationError, match="no node of the Ray cluster has the resources"),
        RayCluster(machines.address, resources={"nothing": 1}),
    ):
        pass
    assert len(names(cluster)) == 2


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
    ways = (os.listdir, open, lambda path: open(path + "/new", "x"), os.unlink,
            lambda path: socket.socket(socket.AF_UNIX).connect(path))
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


def node_address() -> str:
    from ray.util import get_node_ip_address

    return str(get_node_ip_address())


def reachable(host: str, port: int) -> bool:
    with contextlib.suppress(OSError), socket.create_connection((host, port), timeout=1):
        return True
    return False
