"""REPLs that outlive one request: each has an id, an owner and an idle time."""

import asyncio
import contextlib
import secrets
import time
from collections import OrderedDict
from collections.abc import AsyncIterator, Callable, Coroutine
from dataclasses import dataclass, field
from typing import Any, Final

from rlm_broker import SandboxedRepl
from rlm_broker.serve.hosting.owner import Busy, Owner, UnknownHandle
from rlm_broker.watch.board import BOARD

ID_BYTES: Final = 16
"""Random bytes of an unguessable id."""
RETRY_AFTER_S: Final = 5.0
"""Seconds until a refused request may find a place."""


@dataclass(eq=False)
class HeldRepl:
    """One live REPL. `HeldRepls.hold` makes it.

    Attributes:
        id: Unguessable text, for example "cntr_5f...".
        owner: Owner of the REPL.
        repl: The REPL.
        close: Closes it.
        name: Name given by the owner; may be empty.
        run: Id of the run whose REPL it was, or None.
        idle_s: Seconds without use until it is closed.
        created_at: Unix time in seconds.
        used_at: Unix time in seconds of its last use.
        given: Paths of files put in by its owner. All others were made by code.
        users: Number of its blocks and requests under way.
        closing: Ends when it is closed; None while it is held.
        timer: Closes it at the end of its idle time; None while it is used.
    """

    id: str
    owner: Owner
    repl: SandboxedRepl
    close: Callable[[], Coroutine[Any, Any, object]]
    name: str
    run: str | None
    idle_s: float
    created_at: float = field(default_factory=time.time)
    used_at: float = field(default_factory=time.time)
    given: set[str] = field(default_factory=set)
    users: int = 0
    closing: "asyncio.Task[object] | None" = None
    timer: asyncio.TimerHandle | None = None


class HeldRepls:
    """Live REPLs of all owners, at most so many each. The least recently used idle one makes room for a new one.

    Lives on one event loop. Use it as an async context manager: all REPLs have ended when it is left.
    """

    def __init__(self, most: int = 1_000, most_per_owner: int = 20) -> None:
        self._most = most
        self._most_per_owner = most_per_owner
        self._held: OrderedDict[str, HeldRepl] = OrderedDict()
        """REPLs by id, the least recently used first."""
        self._opening: dict[str, int] = {}
        self._closing: set[asyncio.Task[object]] = set()

    def __len__(self) -> int:
        return len(self._held)

    async def __aenter__(self) -> "HeldRepls":
        return self

    async def __aexit__(self, *_: object) -> None:
        for held in list(self._held.values()):
            self._end(held)
        await self._ended()

    @contextlib.asynccontextmanager
    async def room(self, owner: Owner) -> AsyncIterator[None]:
        """Make room for one more REPL of the owner, and keep that room while the block opens it.

        Raises:
            Busy: All places are taken by busy REPLs.
        """
        while self._count(owner) >= self._most_per_owner or self._total() >= self._most:
            of_owner = self._count(owner) >= self._most_per_owner
            idle = (held for held in self._held.values() if not held.users and (not of_owner or held.owner == owner))
            oldest = next(idle, None)
            if oldest is None:
                bound = self._most_per_owner if of_owner else self._most
                raise Busy(f"all {bound:,} REPLs are in use: end one, or try again later", RETRY_AFTER_S)
            self._end(oldest)
        self._opening[owner.name] = self._opening.get(owner.name, 0) + 1
        try:
            yield
        finally:
            self._opening[owner.name] -= 1
            if not self._opening[owner.name]:
                del self._opening[owner.name]

    def hold(
        self,
        owner: Owner,
        repl: SandboxedRepl,
        close: Callable[[], Coroutine[Any, Any, object]],
        *,
        prefix: str = "repl_",
        id: str | None = None,
        name: str = "",
        run: str | None = None,
        idle_s: float = 1_200.0,
    ) -> HeldRepl:
        """Keep an open REPL until it is closed, or was idle for `idle_s` seconds. Call it within `room`.

        Args:
            owner: Owner of the REPL.
            repl: The open REPL.
            close: Closes it.
            prefix: Beginning of its id.
            id: Its whole id, if the caller has made an unguessable one.
            name, run, idle_s: As for `HeldRepl`.
        """
        held = HeldRepl(id or prefix + secrets.token_hex(ID_BYTES), owner, repl, close, name, run, idle_s)
        self._held[held.id] = held
        self._wait_idle(held)
        BOARD.add_repl(repl, id=held.id, owner=owner.name, end=lambda now: self._stopped(held, now))
        return held

    def get(self, owner: Owner, id: str) -> HeldRepl:
        """Find a REPL by its id.

        Raises:
            UnknownHandle: The owner has no such REPL, or it was closed.
        """
        held = self._held.get(id)
        if held is None or held.owner != owner:
            raise UnknownHandle(f"there is no REPL {id[:100]!r}: it was closed, was idle too long, or never existed")
        return held

    def of(self, owner: Owner) -> list[HeldRepl]:
        """Return all REPLs of an owner, the oldest first."""
        mine = (held for held in self._held.values() if held.owner == owner)
        return sorted(mine, key=lambda held: held.created_at)

    def all(self) -> list[HeldRepl]:
        """Return all REPLs of all owners."""
        return list(self._held.values())

    @contextlib.asynccontextmanager
    async def used(self, owner: Owner, id: str) -> AsyncIterator[HeldRepl]:
        """Use a REPL within the block: it is not closed for being idle.

        Raises:
            UnknownHandle: As for `get`.
        """
        held = self.get(owner, id)
        held.users += 1
        if held.timer is not None:
            held.timer.cancel()
            held.timer = None
        try:
            yield held
        finally:
            held.users -= 1
            held.used_at = time.time()
            if held.id in self._held:
                self._held.move_to_end(held.id)
                if held.repl.is_closed:
                    self._end(held)
                elif not held.users:
                    self._wait_idle(held)

    def end(self, owner: Owner, id: str) -> None:
        """Begin to end a REPL, as `close` does, and do not wait.

        Raises:
            UnknownHandle: As for `get`.
        """
        self._end(self.get(owner, id))

    async def close(self, owner: Owner, id: str) -> None:
        """End a REPL, with the block it runs.

        Raises:
            UnknownHandle: As for `get`.
        """
        held = self.get(owner, id)
        self._end(held)
        if held.closing is not None:
            await asyncio.shield(held.closing)

    async def _stopped(self, held: HeldRepl, now: bool) -> None:
        """Interrupt the block of a REPL, or end the REPL, as `rlm-broker runs stop` asks for it."""
        if not now:
            await held.repl.ainterrupt()
            return
        self._end(held)
        await self._ended()

    def _count(self, owner: Owner) -> int:
        return sum(held.owner == owner for held in self._held.values()) + self._opening.get(owner.name, 0)

    def _total(self) -> int:
        return len(self._held) + sum(self._opening.values())

    def _wait_idle(self, held: HeldRepl) -> None:
        held.timer = asyncio.get_running_loop().call_later(held.idle_s, self._end, held)

    def _end(self, held: HeldRepl) -> None:
        if self._held.pop(held.id, None) is None:
            return
        if held.timer is not None:
            held.timer.cancel()
        held.closing = asyncio.get_running_loop().create_task(held.close())
        self._closing.add(held.closing)
        held.closing.add_done_callback(self._closing.discard)

    async def _ended(self) -> None:
        while self._closing:
            await asyncio.wait(set(self._closing))
