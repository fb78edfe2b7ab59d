"""REPLs that live on between the responses of a conversation."""

import contextlib
import secrets
from collections.abc import AsyncIterator
from typing import Final

from rlm_broker.hosting.owner import Busy, Owner, UnknownHandle
from rlm_broker.hosting.repls import ID_BYTES, HeldRepls
from rlm_broker.rlm import RLM
from rlm_broker.run.persistent_repl import PersistentRepl

MOST_IDLE: Final = 16
"""REPLs between two responses that one owner has; the one that was used least recently makes room for a new one."""


class LastingRepl:
    """A REPL of one conversation. While a run has it, it counts as part of the run; between runs it is held.

    Between runs it is also a container of its owner, under its id: it can be looked into, and is closed after its idle
    time, or when newer ones need its room.

    Args:
        rlm: The open `RLM`.
        repls: Live REPLs of all owners.
        owner: Owner of the conversation.
        idle_s: Seconds between two runs after which it is closed.

    Attributes:
        id: Id of the container.
        last: Id of the response whose variables it has, or None.
        run: Id of the last run that had it, or None.
        is_over: Whether it is closed when the run that has it ends.
        persistent: The REPL, for `RLM.start`.
    """

    def __init__(self, rlm: RLM, repls: HeldRepls, owner: Owner, idle_s: float) -> None:
        self.id = f"cntr_{secrets.token_hex(ID_BYTES)}"
        self.last: str | None = None
        self.run: str | None = None
        self.is_over = False
        self.persistent: PersistentRepl = rlm.persistent_repl()
        self._repls = repls
        self._owner = owner
        self._idle_s = idle_s

    @property
    def is_held(self) -> bool:
        """Whether the REPL lives and is held."""
        try:
            return not self._repls.get(self._owner, self.id).repl.is_closed
        except UnknownHandle:
            return False

    @contextlib.asynccontextmanager
    async def lent(self) -> AsyncIterator[None]:
        """Keep the REPL open for a run within the block, and hold it afterwards."""
        if self.is_held:
            async with self._repls.used(self._owner, self.id):
                yield
            if self.is_over:
                await self.close()
            return
        await self.persistent.__aenter__()
        try:
            yield
        finally:
            await self._hold()

    async def _hold(self) -> None:
        repl = self.persistent.sandboxed
        if repl is None or repl.is_closed or self.is_over:
            await self.persistent.aclose()
            return
        self._make_room()
        try:
            async with self._repls.room(self._owner):
                close = self.persistent.aclose
                self._repls.hold(
                    self._owner, repl, close, id=self.id, name="response", run=self.run, idle_s=self._idle_s
                )
        except Busy:  # all places run blocks: the next response begins with a new REPL and the whole conversation
            await self.persistent.aclose()

    def _make_room(self) -> None:
        """End the REPLs of the owner's oldest conversations, so that its other containers keep their places."""
        idle = [held for held in self._repls.of(self._owner) if held.run is not None and not held.users]
        idle.sort(key=lambda held: held.used_at)
        for held in idle[: max(0, len(idle) + 1 - MOST_IDLE)]:
            self._repls.end(self._owner, held.id)

    async def close(self) -> None:
        """End the REPL, if it is held."""
        with contextlib.suppress(UnknownHandle):
            await self._repls.close(self._owner, self.id)
