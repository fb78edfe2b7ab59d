"""Clusters of nodes on this machine: real agents, as subprocesses, without Ray."""

import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Mapping
from typing import Any

import msgspec

from rlm_broker.nodes.agent import MODULE
from rlm_broker.nodes.cluster import NodeSandbox
from tests.support.command import ENVIRONMENT


class LocalNodes(NodeSandbox):
    """A sandbox whose REPLs are on nodes of this machine.

    Args:
        places: Name → REPLs that the node gives at the same time.
        at: Address of this machine to listen on.
        given: As for `NodeSandbox`.

    Attributes:
        agents: Name → agent, in a process group of its own.
    """

    def __init__(self, places: Mapping[str, int] | None = None, at: str = "127.0.0.1", **given: Any) -> None:
        super().__init__(**given)
        self._at = at
        self._places = {"one": 4} if places is None else places
        self.agents: dict[str, subprocess.Popen[bytes]] = {}

    def start(self, name: str, places: int = 4) -> "subprocess.Popen[bytes]":
        """Start an agent."""
        agent = subprocess.Popen(
            [sys.executable, "-m", MODULE],
            stdin=subprocess.PIPE,
            stderr=None if os.environ.get("RLM_TEST_AGENTS") else subprocess.DEVNULL,
            start_new_session=True,
            env=ENVIRONMENT,
        )
        assert agent.stdin is not None
        agent.stdin.write(msgspec.json.encode(self.order(name, places)) + b"\n")
        agent.stdin.flush()
        self.agents[name] = agent
        return agent

    def signal(self, name: str, number: signal.Signals = signal.SIGKILL) -> None:
        """Send a signal to an agent and all processes of its group, which are not its workers."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.agents[name].pid, number)

    async def _begin(self) -> None:
        await self._listen(self._at)
        for name, places in self._places.items():
            self.start(name, places)

    async def _end(self) -> None:
        for name, agent in self.agents.items():
            self.signal(name, signal.SIGCONT)
            assert agent.stdin is not None
            agent.stdin.close()
            agent.wait()
        self.agents.clear()
