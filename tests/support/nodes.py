"""Clusters of nodes on this machine, without Ray: real agents as subprocesses, and agents that a test plays."""

import asyncio
import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Mapping
from typing import Any

import msgspec

from rlm_broker.nodes import messages
from rlm_broker.nodes.agent import MODULE, AgentOrder
from rlm_broker.nodes.cluster import NodeSandbox
from rlm_broker.nodes.link import Link
from sandbox_worker import RELEASE
from sandbox_worker.wire.frames import encode_frame
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
        agent.stdin.write(msgspec.json.encode(self._order(name, places)) + b"\n")
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


class PlayedAgent:
    """An agent that the test plays, message by message.

    Attributes:
        link: Link to the orchestrator.
        got: Messages of the orchestrator, heartbeats left out.
        ends_workers: Whether it ends a worker when it is told to.
    """

    def __init__(self) -> None:
        self.ends_workers = True
        self.got: list[Any] = []
        self._came = asyncio.Event()
        self.link = Link(messages.from_orchestrator, self._take, lambda _: self._came.set())

    @staticmethod
    @contextlib.asynccontextmanager
    async def joined(order: AgentOrder, *, opens: bool = True) -> AsyncIterator["PlayedAgent"]:
        """Join, and say that a sandbox with one place is open."""
        played = PlayedAgent()
        transport, _ = await asyncio.get_running_loop().create_connection(asyncio.Protocol, order.host, order.port)
        join = messages.encoded(messages.Join(order.token, messages.PROTOCOL, RELEASE))
        transport.write(encode_frame(join, len(join)))
        transport.set_protocol(played.link)
        played.link.connection_made(transport)
        try:
            if opens:
                asked = await played.next(messages.OpenNode)
                opened = messages.NodeOpened(asked.request, "strict", [], True, 1, 2, 8 << 30, [])
                played.link.post(opened)
            yield played
        finally:
            played.link.close("the test is over")

    def _take(self, message: Any) -> None:
        if isinstance(message, messages.Kill) and self.ends_workers:
            self.link.post(messages.Gone(message.worker))
        if not isinstance(message, messages.Beat):
            self.got.append(message)
            self._came.set()

    async def next(self, kind: type[Any]) -> Any:
        """Return the first message of a class, also of those to come, and forget it."""
        while True:
            for message in self.got:
                if isinstance(message, kind):
                    self.got.remove(message)
                    return message
            assert self.link.why_lost is None, self.link.why_lost
            self._came.clear()
            await self._came.wait()

    async def forked(self) -> int:
        """Fork a worker that is asked for, and return its number."""
        asked = await self.next(messages.Fork)
        self.link.post(messages.RequestDone(asked.request))
        return int(asked.worker)
