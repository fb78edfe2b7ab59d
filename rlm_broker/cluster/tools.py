"""Calls of the user's functions that nodes ask for. A further attempt of a run gets the results of the one before it.

Code in a REPL is seeded, so a further attempt calls what the one before has called. A function with an effect is then
not called twice, and one that depends on the time does not lead the attempt astray. Equal calls are told apart by their
order, as calls of models are in `journal.paid`.
"""

import asyncio
import hashlib
from collections import Counter, defaultdict

from rlm_broker.cluster.messages import ToolReply, UseTool
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
        self._answered = defaultdict[bytes, list[Slot]](list)
        self._under_way = defaultdict[bytes, list[asyncio.Task[Slot]]](list)
        """Calls of abandoned attempts, by the digest of what was called."""

    async def aclose(self) -> None:
        """End the calls that abandoned attempts have left under way."""
        left = [task for tasks in self._under_way.values() for task in tasks]
        self._under_way.clear()
        for task in left:
            task.cancel()
        if left:
            await asyncio.wait(left)

    def answer(self, key: bytes, number: int) -> Slot | None:
        """Return the result of a call of that number, from 0; None if there is none yet."""
        answers = self._answered.get(key, ())
        return answers[number] if number < len(answers) else None

    def begin(self, key: bytes, use: UseTool) -> "asyncio.Task[Slot]":
        """Return a call that an abandoned attempt has left under way, or begin one."""
        left = self._under_way.get(key)
        return left.pop(0) if left else asyncio.get_running_loop().create_task(self._called(key, use))

    def leave(self, key: bytes, call: "asyncio.Task[Slot]") -> None:
        """Keep a call that is under way for a further attempt to join."""
        self._under_way[key].append(call)

    async def _called(self, key: bytes, use: UseTool) -> Slot:
        tools = self._tools.for_children if use.is_of_child else self._tools
        slot = await tools.call(use.name, use.arguments, min(use.timeout_s, self._limit_s))
        self._kept_chars += len(slot.text) + len(slot.error or "")
        if self._kept_chars <= MOST_KEPT_CHARS:
            self._answered[key].append(slot)
        return slot


class AttemptTools:
    """The user's functions for one attempt."""

    def __init__(self, run: RunTools) -> None:
        self._run = run
        self._asked = Counter[bytes]()
        self._is_abandoned = False

    def abandon(self) -> None:
        """Let calls that are under way go on when they are cancelled, for the next attempt to join."""
        self._is_abandoned = True

    async def answer(self, use: UseTool) -> ToolReply:
        """Call a function that code on a node calls, and return how that ended."""
        said = f"{use.is_of_child}\n{use.name}\n{use.arguments}".encode("utf-8", "surrogatepass")
        key = hashlib.blake2b(said, digest_size=16).digest()
        number = self._asked[key]
        self._asked[key] += 1
        slot = self._run.answer(key, number)
        if slot is None:
            under_way = self._run.begin(key, use)
            try:
                slot = await asyncio.shield(under_way)
            except asyncio.CancelledError:
                if under_way.done():
                    raise
                if self._is_abandoned:
                    self._run.leave(key, under_way)
                else:
                    under_way.cancel()
                    await asyncio.wait({under_way})
                raise
        return ToolReply(use.run, use.call, slot.text, slot.error)
