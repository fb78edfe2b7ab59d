"""Calls of the user's functions that nodes ask for. A further attempt of a run gets the results of the one before it.

Code in a REPL is seeded, so a further attempt calls what the one before has called. A function with an effect is then
not called twice, and one that depends on the time does not lead the attempt astray. Equal calls are told apart by their
order, as calls of models are in `journal.paid`.
"""

import asyncio
import hashlib

from rlm_broker.cluster.messages import ToolReply, UseTool
from rlm_broker.journal.answered import Answered, Asking
from rlm_broker.run.tool_set import ToolSet
from sandbox_worker.wire.messages import Slot

MOST_KEPT_CHARS = 16 << 20
"""Maximum characters of the results that are kept for a run. Beyond it, a further attempt calls the functions again."""


class RunTools:
    """The user's functions for one run, over all of its attempts. Lives on one event loop.

    Args:
        tools: Functions that code of the run may call.
        limit_s: Seconds of one call.
    """

    def __init__(self, tools: ToolSet, limit_s: float) -> None:
        self._tools = tools
        self._limit_s = limit_s
        self._kept_chars = 0
        self.answered = Answered[Slot]()

    async def aclose(self) -> None:
        """End the calls that abandoned attempts have left under way."""
        await self.answered.aclose()

    async def called(self, key: bytes, use: UseTool) -> Slot:
        """Call a function, and keep its result for further attempts, as long as there is room."""
        tools = self._tools.for_children if use.is_of_child else self._tools
        slot = await tools.call(use.name, use.arguments, min(use.timeout_s, self._limit_s))
        self._kept_chars += len(slot.text) + len(slot.error or "")
        if self._kept_chars <= MOST_KEPT_CHARS:
            self.answered.add(key, slot)
        return slot


class AttemptTools:
    """The user's functions for one attempt."""

    def __init__(self, run: RunTools) -> None:
        self._run = run
        self._asking = Asking(run.answered)

    def abandon(self) -> None:
        """Let calls that are under way go on when they are cancelled, for the next attempt to join."""
        self._asking.is_abandoned = True

    async def answer(self, use: UseTool) -> ToolReply:
        """Call a function that code on a node calls, and return how that ended."""
        said = f"{use.is_of_child}\n{use.name}\n{use.arguments}".encode("utf-8", "surrogatepass")
        key = hashlib.blake2b(said, digest_size=16).digest()
        slot = self._run.answered.answer(key, self._asking.number(key))
        if slot is None:
            work = self._run.answered.join(key) or asyncio.get_running_loop().create_task(self._run.called(key, use))
            slot = await self._asking.ended(key, work)
        return ToolReply(use.run, use.call, slot.text, slot.error)
