"""Real agents of a cluster as processes of their own, the ways in which they are lost, and agents that a test plays."""

import asyncio
import contextlib
import os
import signal
import subprocess
from collections.abc import AsyncIterator, Callable, Iterator
from typing import Any

from rlm_broker.broker.clients.base import BaseClient, LMReply, LMRequest
from rlm_broker.cluster.dialing import Target, join
from rlm_broker.cluster.link import Link
from rlm_broker.cluster.messages import PROTOCOL, Begin, FromBroker, Join, Load
from rlm_broker.cluster.nodes import Nodes
from rlm_broker.usage import Usage
from sandbox_worker import RELEASE
from tests.support.command import COMMAND, ENVIRONMENT
from tests.support.waiting import WAIT_S, until


class Agent:
    """One `rlm-broker node`, in a process group of its own."""

    def __init__(self, process: "subprocess.Popen[bytes]") -> None:
        self.process = process

    def signal(self, number: signal.Signals) -> None:
        """Send a signal to the agent and all processes of its group."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, number)


@contextlib.contextmanager
def agent(nodes: Nodes, name: str, max_runs: int = 4, port: int | None = None) -> Iterator[Agent]:
    """An agent, which is killed with all of its processes at the end.

    Args:
        port: Port on loopback that it connects to; None takes that of the cluster.
    """
    host, own = nodes.address
    words = ["node", "--connect", f"{host}:{port or own}", "--name", name, "--max-runs", str(max_runs)]
    environment = {**ENVIRONMENT, "RLM_BROKER_NODE_TOKEN": nodes.token}
    with subprocess.Popen(
        [*COMMAND, *words], env=environment, start_new_session=True, stderr=subprocess.DEVNULL
    ) as process:
        started = Agent(process)
        try:
            yield started
        finally:
            started.signal(signal.SIGCONT)
            started.signal(signal.SIGKILL)


class Proxy:
    """A way to a port that can be cut: then nothing is forwarded, and no connection is closed.

    Attributes:
        port: Port to connect to.
    """

    def __init__(self, to: int) -> None:
        self.port = 0
        self._to = to
        self._tasks: set[asyncio.Task[None]] = set()
        self._is_cut = False
        self._writers: list[asyncio.StreamWriter] = []

    def cut(self) -> None:
        """Forward nothing more."""
        self._is_cut = True

    @contextlib.asynccontextmanager
    async def listening(self) -> AsyncIterator["Proxy"]:
        """Listen until the context manager exits."""
        server = await asyncio.start_server(self._connected, "127.0.0.1", 0)
        self.port = server.sockets[0].getsockname()[1]
        try:
            yield self
        finally:
            server.close()
            for task in self._tasks:
                task.cancel()
            for writer in self._writers:
                writer.close()

    async def _connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if self._is_cut:
            self._writers.append(writer)
            return
        there, back = await asyncio.open_connection("127.0.0.1", self._to)
        self._writers += [writer, back]
        for one, other in ((reader, back), (there, writer)):
            task = asyncio.get_running_loop().create_task(self._forward(one, other))
            self._tasks.add(task)

    async def _forward(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(OSError):  # one side was killed
            while data := await reader.read(1 << 16):
                if not self._is_cut:
                    writer.write(data)
                    await writer.drain()
        if not self._is_cut:
            writer.close()


class Crew:
    """A cluster and its agents, each behind a proxy of its own. What a test has lost, the next one replaces.

    Attributes:
        nodes: The cluster.
    """

    def __init__(self, nodes: Nodes, stack: contextlib.AsyncExitStack) -> None:
        self.nodes = nodes
        self._stack = stack
        self._agents: dict[str, tuple[Agent, Proxy]] = {}

    @staticmethod
    @contextlib.asynccontextmanager
    async def gathered() -> AsyncIterator["Crew"]:
        """Open a cluster, and end all of its agents at the end."""
        async with contextlib.AsyncExitStack() as stack:
            yield Crew(await stack.enter_async_context(Nodes()), stack)

    async def has(self, number: int) -> None:
        """Wait until that many nodes are there, and start those that are missing."""
        for _ in range(number - len(self.nodes.stats().nodes)):
            name = f"node-{len(self._agents) + 1}"
            proxy = await self._stack.enter_async_context(Proxy(self.nodes.address[1]).listening())
            self._agents[name] = self._stack.enter_context(agent(self.nodes, name, port=proxy.port)), proxy
        await until(lambda: len(self.nodes.stats().nodes) >= number)

    def busy(self) -> tuple[Agent, Proxy]:
        """Return the agent that has the only run, and the way to it."""
        [name] = [node.name for node in self.nodes.stats().nodes if node.runs]
        return self._agents[name]


class Gated(BaseClient):
    """A model whose replies come from a function, and wait where the test holds them.

    Args:
        reply: Returns the text of a reply.

    Attributes:
        asked: Last message of each request so far.
        requests: The requests.
        cancelled: Last message of each request that was cancelled while it was held.
        held: Text of a last message → event that its replies wait for.
    """

    model_name = "gated"
    is_priced = True

    def __init__(self, reply: Callable[[LMRequest], str]) -> None:
        self._reply = reply
        self.asked: list[str] = []
        self.requests: list[LMRequest] = []
        self.cancelled: list[str] = []
        self.held: dict[str, asyncio.Event] = {}

    async def complete(self, request: LMRequest) -> LMReply:
        last = str(request.messages[-1].content)
        self.asked.append(last)
        self.requests.append(request)
        if (held := self.held.get(last)) is not None:
            try:
                await held.wait()
            except asyncio.CancelledError:
                self.cancelled.append(last)
                raise
        text = self._reply(request)
        if request.on_text is not None:
            request.on_text(text)
        return LMReply(text, Usage(1, 10, 5, 0.25))


def looping(code: str, answer: Callable[[str], str] = str.upper) -> Callable[[LMRequest], str]:
    """Replies of a run whose loop has one block of code, and whose queries are answered by a function."""
    return lambda request: f"```repl\n{code}\n```" if request.is_loop else answer(str(request.messages[-1].content))


@contextlib.asynccontextmanager
async def played(nodes: Nodes, name: str = "played", max_runs: int = 4) -> AsyncIterator[Link[FromBroker]]:
    """The link of an agent that the test plays, message by message."""
    host, port = nodes.address
    asked = Join(nodes.token, PROTOCOL, RELEASE, name, cpus=1, memory_bytes=1 << 30, max_runs=max_runs)
    link, _ = await join(Target(host, port), asked)
    link.beat = lambda: Load(0, 1 << 30)
    try:
        yield link
    finally:
        link.close()


async def taken(link: Link[FromBroker], kind: Any) -> Any:
    """Return the next message of a class that the orchestrator sends; others are dropped."""
    async with asyncio.timeout(WAIT_S):
        async for message, _ in link.receive():
            if isinstance(message, kind):
                return message
    raise AssertionError(f"the link has ended: {link.why_lost}")


async def begun(link: Link[FromBroker]) -> Begin:
    """Return the next run that the orchestrator begins."""
    message = await taken(link, Begin)
    assert isinstance(message, Begin)
    return message
