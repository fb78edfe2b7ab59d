"""One node of a cluster, as the orchestrator knows it: its link, its room and its runs."""

import asyncio
from collections.abc import Callable
from typing import Protocol

from rlm_broker.cluster.contexts import Contexts, send_context
from rlm_broker.cluster.link import Link
from rlm_broker.cluster.messages import (
    BEAT_S,
    Ask,
    Begin,
    Ended,
    FromAgent,
    Happened,
    Join,
    Judge,
    Leave,
    Load,
    Need,
    Quit,
    UseTool,
)
from rlm_broker.concurrency.deadline import to_its_end
from rlm_broker.errors import ProtocolViolation
from rlm_broker.values.stats import NodeStats

LAG_S = 3 * BEAT_S
"""Seconds without a heartbeat after which a node gets no further run. It is not lost yet."""
MOST_RUNS = 65_536
"""Maximum runs that one node is believed to take at the same time."""
WHY_CHARS = 200
"""Characters of an agent's own words that are kept."""

OfARun = Ask | Leave | UseTool | Judge | Happened | Ended
"""Messages of an agent that belong to one run."""


class Attempt(Protocol):
    """The orchestrator's half of a run on one node, as the node sees it."""

    @property
    def begin(self) -> Begin:
        """The message that began the run on the node."""
        ...

    def take(self, message: OfARun) -> None:
        """Take a message of the run.

        Raises:
            ProtocolViolation: No agent sends such a message.
        """
        ...

    def lose(self, why: str) -> None:
        """Learn that the node is lost."""
        ...


class Node:
    """One node. `serve` takes its messages until its link ends. Lives on one event loop.

    Args:
        link: Link to its agent, which has the name of the node.
        join: First message of its agent.
        on_change: Called when the node may have more room.
        source: Address that the node has joined from, as `admission.source_of` returns it.

    Attributes:
        load: Last load that its agent told.
        placed: Runs that were placed there and have not ended.
        lost: Runs that this node lost or failed, and that went on elsewhere.
        faults: Runs in a row that failed because of the node.
        joined_at: When it has joined, as a time of the loop.
        is_proven: Whether it has answered a run. `Placement` sets it.
        has_quit: Whether its agent has left by itself.
        asked_chars: Weight of the calls that its runs have open. `NodeAttempt` counts it.
    """

    def __init__(
        self,
        link: Link[FromAgent],
        join: Join,
        contexts: Contexts,
        on_change: Callable[[], None],
        source: str = "",
    ) -> None:
        self.name = link.name
        self.link = link
        self.load = Load(0, max(0, join.memory_bytes))
        self.placed = self.lost = self.faults = self.asked_chars = 0
        self.source = source
        self.is_proven = self.has_quit = False
        self._max_runs = min(max(1, join.max_runs), MOST_RUNS)
        self._contexts = contexts
        self._on_change = on_change
        self._loop = asyncio.get_running_loop()
        self.joined_at = self._heard = self._loop.time()
        self._attempts: dict[int, Attempt] = {}
        self._last = 0
        self._sending: dict[str, asyncio.Task[None]] = {}
        """Digest of a context → the task that sends it."""

    # -- its room ----------------------------------------------------------------------------------------------------

    @property
    def has_room(self) -> bool:
        """Whether a further run may go there. A node that has failed a run gets one at a time until one succeeds."""
        most = 1 if self.faults else self._max_runs
        is_late = self._loop.time() - self._heard > LAG_S
        return self.placed < most and not (self.load.is_full or is_late or self.link.is_lost)

    @property
    def fullness(self) -> float:
        """Share of its places that are taken."""
        return self.placed / self._max_runs

    def stats(self) -> NodeStats:
        """Return what the node is doing."""
        is_full = self.load.is_full or self.placed >= self._max_runs
        return NodeStats(self.name, self.placed, self._max_runs, self.load.free_bytes, is_full, self.lost)

    # -- its runs ----------------------------------------------------------------------------------------------------

    def number(self) -> int:
        """Return the number of a further run on this link."""
        self._last += 1
        return self._last

    def begin(self, attempt: Attempt) -> None:
        """Pass the messages of a run on, from now until `end`."""
        self._attempts[attempt.begin.run] = attempt

    def end(self, attempt: Attempt) -> None:
        """Pass no further message of a run on."""
        self._attempts.pop(attempt.begin.run, None)

    async def serve(self) -> str:
        """Take the messages of the agent until the link ends. Then its runs are lost.

        Returns:
            Why the link has ended.
        """
        try:
            async for message, _ in self.link.receive():
                self._heard = self._loop.time()
                try:
                    self._take(message)
                except ProtocolViolation as violation:
                    self.link.close(str(violation))
            return self.link.why_lost or "the connection was closed"
        finally:
            self.link.close()
            await to_its_end(self._lose)

    def _take(self, message: FromAgent) -> None:
        match message:
            case Load():
                self.load = message
                if self.has_room:  # else a look at all nodes would be in vain
                    self._on_change()
            case Need():
                self._send(message.digest)
            case Quit():
                self.has_quit = True
                self.link.close(f"its agent has left: {message.why[:WHY_CHARS]}")
            case _:
                attempt = self._attempts.get(message.run)
                if attempt is not None:  # else the run has ended here, and the agent does not know it yet
                    attempt.take(message)

    def _send(self, digest: str) -> None:
        """Begin to send a context that a run of this node has. A node that asks again meanwhile is not sent two."""
        if digest in self._sending:
            return
        is_due = any(attempt.begin.context.digest == digest for attempt in self._attempts.values())
        context = self._contexts.find(digest) if is_due else None
        task = self._loop.create_task(send_context(self.link, digest, context))
        self._sending[digest] = task
        task.add_done_callback(lambda _: self._sending.pop(digest, None))

    async def _lose(self) -> None:
        why = self.link.why_lost or ""
        for attempt in list(self._attempts.values()):
            attempt.lose(why)
        sending = list(self._sending.values())
        for task in sending:
            task.cancel()
        if sending:
            await asyncio.wait(sending)
