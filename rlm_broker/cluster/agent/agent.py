"""The agent of a node: it holds one joined link, and runs what the orchestrator sends, until the link ends.

Theory of operation. An agent has one link, the sandboxes of its runs, and one cache of contexts. All that it has
started ends with the link: lost, silent, or closed in order. First every run is cancelled, which kills its REPLs. What
has not ended after `ENDING_S` ends with its sandbox, whose fork server takes all workers with it. A killed agent needs
no code for that: the kernel closes the control sockets of its fork servers. A link is served once: an agent that joins
again begins with a fresh state.
"""

import asyncio

from rlm_broker.cluster.agent.contexts import Contexts
from rlm_broker.cluster.agent.load import free_bytes, reserve_bytes
from rlm_broker.cluster.agent.runs import NodeRun
from rlm_broker.cluster.agent.sandboxes import Sandboxes
from rlm_broker.cluster.link import Link
from rlm_broker.cluster.messages import (
    Begin,
    Cancel,
    FromBroker,
    Judged,
    Load,
    NoContext,
    Piece,
    Quit,
    Reply,
    ReplyText,
    Retried,
    Stop,
    ToolReply,
    Welcome,
)
from rlm_broker.concurrency.deadline import to_its_end

ENDING_S = 0.3
"""Seconds that cancelled runs have to end by themselves, before their sandboxes are closed."""


async def serve(link: Link[FromBroker], welcome: Welcome, *, context_bytes: int | None = None) -> None:
    """Run what the orchestrator sends, until the link ends. All runs and REPLs have ended when this returns.

    Cancelling it ends the runs likewise. The orchestrator is told first, so that it places them elsewhere at once.

    Args:
        link: Link of an agent that was admitted.
        welcome: Answer of the orchestrator.
        context_bytes: Bytes of contexts that the node keeps; None takes a share of its memory.
    """
    del welcome
    agent = Agent(link, context_bytes)
    link.beat = agent.load
    try:
        await agent.receive()
    except asyncio.CancelledError:
        link.post(Quit("the node was stopped"))
        raise
    finally:
        await to_its_end(agent.aclose)
        await link.aclose()


class Agent:
    """One node's runs, and what they share.

    Args:
        link: Link to the orchestrator.
        context_bytes: As for `serve`.
    """

    def __init__(self, link: Link[FromBroker], context_bytes: int | None) -> None:
        self._link = link
        self._sandboxes = Sandboxes()
        self._contexts = Contexts(link, context_bytes)
        self._runs: dict[int, NodeRun] = {}
        self._tasks: set[asyncio.Task[None]] = set()

    def load(self) -> Load:
        """Return the heartbeat. The node is full while its memory is short, or while it can open no file to look."""
        try:
            free = free_bytes()
        except OSError:
            free = 0
        return Load(len(self._runs), free, is_full=free < reserve_bytes())

    async def receive(self) -> None:
        """Do what the orchestrator says, until the link ends."""
        async for message, data in self._link.receive():
            match message:
                case Reply() | ReplyText() | Retried() | ToolReply() | Judged():
                    if (run := self._runs.get(message.run)) is not None:
                        run.exchange.take(message)
                case Piece():
                    self._contexts.take(message, data or b"")
                case NoContext():
                    self._contexts.missing(message)
                case Begin():
                    self._begin(message)
                case Stop() | Cancel():
                    self._end(message)
                case Quit():
                    self._link.close(f"the orchestrator has left: {message.why[:200]}")

    async def aclose(self) -> None:
        """End all runs, the sandboxes and the contexts. No outcome is sent: the runs go on elsewhere."""
        for run in self._runs.values():
            run.abandon()
        if self._tasks:
            await asyncio.wait(self._tasks, timeout=ENDING_S)
        await self._sandboxes.aclose()
        if self._tasks:
            await asyncio.wait(self._tasks)
        await self._contexts.aclose()

    def _begin(self, begin: Begin) -> None:
        if begin.run in self._runs:
            self._link.close(f"the orchestrator began run {begin.run} twice")
            return
        run = self._runs[begin.run] = NodeRun(begin, self._link, self._contexts, self._sandboxes)
        task = asyncio.get_running_loop().create_task(run.to_its_end())
        self._tasks.add(task)
        task.add_done_callback(lambda task: self._ended(begin.run, task))

    def _end(self, wish: Stop | Cancel) -> None:
        run = self._runs.get(wish.run)
        if run is None:
            return
        if isinstance(wish, Cancel):
            run.cancel()
        else:
            run.stop()

    def _ended(self, run: int, task: asyncio.Task[None]) -> None:
        del self._runs[run]
        self._tasks.discard(task)
