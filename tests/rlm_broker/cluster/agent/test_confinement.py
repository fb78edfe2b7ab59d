"""Hostile code on a node: it reaches neither the broker's port, nor Ray's, nor the files and secrets of the agent."""

import contextlib
import socket
import tempfile
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import pytest
import pytest_asyncio

from rlm_broker.broker.clients.scripted import ScriptedClient
from rlm_broker.cluster.nodes import Nodes
from rlm_broker.errors import IsolationUnavailable
from rlm_broker.rlm import RLM
from rlm_broker.sandbox.sandbox import Sandbox
from tests.support.nodes import agent
from tests.support.places import SHORT
from tests.support.waiting import until

pytestmark = pytest.mark.asyncio(loop_scope="module")

CONNECTS = """
import socket
family = socket.AF_UNIX if isinstance(PEER, str) else socket.AF_INET
connection = socket.socket(family)
connection.settimeout(2)
connection.connect(PEER)
FINAL('got through')
"""
READS = "FINAL('got through' if open(PEER, 'rb').read() or True else '')"
LISTS = "import os\nFINAL('got through' + str(os.listdir(PEER)))"
ENDS = "import os, signal\nos.kill(PEER, signal.SIGKILL)\nFINAL('got through')"
HAS = "import os\nFINAL('got through' if PEER in str(dict(os.environ)) + open('/proc/self/environ').read() else 'no')"


@dataclass
class Surroundings:
    """A node, and what is around it.

    Attributes:
        ray_port, ray_socket: Listening like the ports of Ray's server on a node and the socket of its raylet.
        ray_folder: Folder in the home of the node's user, as `~/.ray` is.
        token_file: File with a token, in that home.
    """

    nodes: Nodes
    rlm: RLM
    client: ScriptedClient
    pid: int
    ray: socket.socket
    ray_unix: socket.socket
    home: Path

    def peers(self) -> dict[str, tuple[str, Any]]:
        """Attack → its code, and what it aims at."""
        return {
            "broker": (CONNECTS, self.nodes.address),
            "ray_port": (CONNECTS, self.ray.getsockname()),
            "ray_socket": (CONNECTS, self.ray_unix.getsockname()),
            "ray_folder": (LISTS, str(self.home / ".ray")),
            "ray_file": (READS, str(self.home / ".ray" / "auth_token")),
            "token_file": (READS, str(self.home / "token")),
            "environment_of_the_agent": (READS, f"/proc/{self.pid}/environ"),
            "memory_of_the_agent": (READS, f"/proc/{self.pid}/maps"),
            "files_of_the_agent": (LISTS, f"/proc/{self.pid}/fd"),
            "life_of_the_agent": (ENDS, self.pid),
            "own_environment": (HAS, self.nodes.token),
        }


@pytest_asyncio.fixture(scope="module", loop_scope="module", params=["strict", "standard"])
async def around(request: pytest.FixtureRequest) -> AsyncIterator[Surroundings]:
    """A real node at one level, with what Ray has on a machine."""
    level = request.param
    try:
        async with Sandbox(isolation=level):
            pass
    except IsolationUnavailable as unavailable:
        pytest.skip(str(unavailable))
    client = ScriptedClient([])
    with contextlib.ExitStack() as stack:
        home = Path(stack.enter_context(tempfile.TemporaryDirectory(dir=SHORT)))
        home.chmod(0o755)
        (home / ".ray").mkdir()
        ray = stack.enter_context(socket.create_server(("127.0.0.1", 0)))
        ray_unix = stack.enter_context(socket.socket(socket.AF_UNIX))
        ray_unix.bind(str(home / "raylet"))
        ray_unix.listen()
        async with Nodes(sandbox=level) as nodes, RLM(client, sandbox=nodes) as rlm:
            for path in (home / ".ray" / "auth_token", home / "token"):
                path.write_text(nodes.token)
                path.chmod(0o644)
            started = stack.enter_context(agent(nodes, "node"))
            await until(lambda: nodes.stats().nodes)
            yield Surroundings(nodes, rlm, client, started.process.pid, ray, ray_unix, home)


ATTACKS = (
    *("broker", "ray_port", "ray_socket", "ray_folder", "ray_file", "token_file", "environment_of_the_agent"),
    *("memory_of_the_agent", "files_of_the_agent", "life_of_the_agent", "own_environment"),
)


async def tried(around: Surroundings, name: str) -> str:
    """Return what an attack on the node brought: its answer, or the error of its code."""
    code, peer = around.peers()[name]
    around.client._replies = lambda request: (  # the model is the attacker's
        f"```repl\nPEER = {peer!r}\n{code}\n```" if len(request.messages) == 2 else "FINAL(no)"
    )
    completion = await around.rlm.acompletion("text", "?")
    assert completion.isolation is not None
    return f"{completion.response} {completion.trajectory[0].blocks[0].error}"


@pytest.mark.parametrize("name", ATTACKS)
async def test_code_reaches_nothing_of_the_node(around: Surroundings, name: str) -> None:
    """Each attack fails, and the agent lives on."""
    assert "got through" not in await tried(around, name)
    assert psutil.pid_exists(around.pid)


@pytest.mark.filterwarnings("ignore::rlm_broker.sandbox.workers.levels.IsolationWarning")
async def test_the_attacks_get_through_without_protection(around: Surroundings) -> None:
    """Each attack works where nothing prevents it. No worker gets the token, and no agent is to be ended here."""
    async with Sandbox(isolation="process", warm=0) as sandbox:
        for name, (code, peer) in around.peers().items():
            if name not in ("life_of_the_agent", "own_environment"):
                async with sandbox.repl("text") as repl:
                    assert "got through" in str((await repl.aexecute(f"PEER = {peer!r}\n{code}")).final_answer), name


async def test_processes_below_an_agent_have_no_token(around: Surroundings) -> None:
    """No process that an agent starts has the token in its environment or on its command line."""
    await tried(around, "own_environment")
    below = psutil.Process(around.pid).children(recursive=True)
    assert below
    for process in below:
        with contextlib.suppress(psutil.NoSuchProcess, psutil.AccessDenied):
            assert around.nodes.token not in str([process.environ(), process.cmdline()])
