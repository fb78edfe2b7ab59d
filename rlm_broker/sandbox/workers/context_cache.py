"""Fork servers for contexts of objects used again: each decodes one, and its workers share the objects.

Every worker maps the texts of a context, and decodes other objects: for large ones this takes seconds and memory. When
a second REPL has the same context, a fork server of its own decodes it once. After it only forks, and it runs no model
code. This is done at "strict" alone, where the fork server is confined. At other levels it would decode a hostile
context without any isolation.
"""

import asyncio
import contextlib
import logging
import weakref
from functools import partial
from typing import Final, TypeVar

from msgspec import Struct

from rlm_broker.broker.transport.listener import Listener
from rlm_broker.concurrency.deadline import unlisted
from rlm_broker.context.stored_context import StoredContext, digest_of
from rlm_broker.errors import RlmBrokerError, SandboxFailed
from rlm_broker.limits import ReplLimits
from rlm_broker.sandbox.workers.fork_server import Forker
from rlm_broker.sandbox.workers.source import ColdStart, StartedWorker
from rlm_broker.sandbox.workers.zygote_process import Preparation

SHARED_FROM_BYTES: Final = 4 << 20
"""Smallest shared context, in bytes of JSON. A smaller one is decoded faster than a fork server starts."""
OF_ALL_MEMORY: Final = 0.25
"""Share of the machine's memory for all these fork servers. Beyond it the least recently used one is ended."""
HEAP_PER_BYTE: Final = 6
"""Bytes of objects for each byte of their JSON, as a guess until they are decoded. Records have 4, numbers 10."""
MAX_SEEN: Final = 256
"""Contexts whose use and memory are remembered. Beyond it the oldest one is forgotten."""

T = TypeVar("T")

_log = logging.getLogger("rlm_broker")


class _SharedServer(Struct, eq=False):
    """The fork server of one context.

    Attributes:
        memory_bytes: Memory it takes; a guess while it is being made.
        making: Returns the fork server, or None if it could not be started.
        users: REPLs with it, or in wait for it. While there are any, it is not ended.
        is_listed: Whether further REPLs may have it.
    """

    digest: bytes
    memory_bytes: int
    making: "asyncio.Task[Forker | None]"
    users: int = 0
    is_listed: bool = True


class ContextCache:
    """A source of workers for contexts used before, each forked from a process with the context. Lives on one event
    loop.

    Args:
        fork_server: Fork server of the same level, whose `prepared` starts the others.
        limits: Limits with the time for a fork server to decode a context.
        max_bytes: Memory of all these fork servers together. One with live REPLs is not ended to make room.
    """

    def __init__(self, fork_server: Forker, listener: Listener, limits: ReplLimits, max_bytes: int) -> None:
        self._fork_server = fork_server
        self._listener = listener
        self._limits = limits
        self._max_bytes = max_bytes
        self._seen: dict[asyncio.Task[bytes | None], int] = {}
        """Task that computes the digest of a context that was used → the size of the context in bytes."""
        self._digests = weakref.WeakKeyDictionary[StoredContext, asyncio.Task[bytes | None]]()
        """Context object that was given → the same task. The same object may be given again."""
        self._listed: dict[bytes, _SharedServer] = {}
        """Digest → fork server; the one that was used last comes last."""
        self._alive: set[_SharedServer] = set()
        self._heaps: dict[bytes, int] = {}
        """Digest → memory in bytes that the context took when it was decoded."""
        self._ending: set[asyncio.Task[None]] = set()
        self._closed = False
        self._has_failed = False

    async def take(self, context: StoredContext | None, limits: ReplLimits) -> StartedWorker | None:
        """Return a worker with a context used before, see `WorkerSource`."""
        if context is None or self._closed or not self._is_worth_it(context):
            return None
        digest = await self._digest_if_used_before(context)
        return None if digest is None else await self._take_shared(digest, context, limits)

    async def close(self) -> None:
        """End the fork servers without REPLs. The others end with the one that made them. May be repeated."""
        self._closed = True
        digests = {*self._seen, *self._digests.values()}
        for digest in digests:
            digest.cancel()
        await asyncio.gather(*digests, return_exceptions=True)
        for shared in list(self._listed.values()):
            shared.making.cancel()
            self._unlist(shared)
        await asyncio.gather(*self._ending)

    # -- whether it was used before ----------------------------------------------------------------------------------

    def _is_worth_it(self, context: StoredContext) -> bool:
        if not self._fork_server.level.confines_zygote:
            return False
        json_bytes = sum(piece.form.size_bytes for _, piece in context.pieces() if piece.form.kind == "json")
        return json_bytes >= SHARED_FROM_BYTES

    async def _digest_if_used_before(self, context: StoredContext) -> bytes | None:
        """Return the digest of a context used before, else None. Only contexts of equal size are compared."""
        if (of_its_own := self._digests.get(context)) is not None:
            return await _result(of_its_own)
        size = context.size_bytes
        others = [task for task, other_size in self._seen.items() if other_size == size]
        own = asyncio.get_running_loop().create_task(_digested(context.another()))
        self._digests[context] = own
        if others:
            digest = await _result(own)
            if digest is not None and digest in [await _result(other) for other in others]:
                return digest
        self._seen[own] = size
        if len(self._seen) > MAX_SEEN:
            del self._seen[next(iter(self._seen))]
        return None

    # -- the fork servers --------------------------------------------------------------------------------------------

    async def _take_shared(self, digest: bytes, context: StoredContext, limits: ReplLimits) -> StartedWorker | None:
        """Return a worker; None if no fork server can have the context, or the one that has it can fork no more."""
        if self._closed:  # while the digests were compared
            return None
        shared = self._listed.pop(digest, None) or self._to_be_made(digest, context)
        self._listed[digest] = shared  # moved to the end, since it was used last
        shared.users += 1
        started: StartedWorker | None = None
        try:
            fork_server = await _result(shared.making)
            if fork_server is not None:
                self._weigh(shared, fork_server.memory_bytes)
                started = await ColdStart(fork_server, self._listener).take(None, limits)
                started.on_end = partial(self._leave, shared)
        except RlmBrokerError:
            pass
        finally:
            if started is None:
                self._leave(shared)
        if started is None:
            self._unlist(shared)
        return started

    def _to_be_made(self, digest: bytes, context: StoredContext) -> _SharedServer:
        needed_bytes = self._heaps.get(digest, context.size_bytes * HEAP_PER_BYTE)
        making = self._make(context.another(), self._make_room(needed_bytes))
        shared = _SharedServer(digest, needed_bytes, asyncio.get_running_loop().create_task(making))
        self._alive.add(shared)
        return shared

    async def _make(self, context: StoredContext, has_room: bool) -> Forker | None:
        with context:
            if not has_room:
                return None
            try:
                preparation = Preparation(context=context, timeout_s=self._limits.start_timeout_s)
                return await self._fork_server.prepared(preparation)
            except (RlmBrokerError, OSError) as error:  # each REPL decodes the context itself, and gives the reason
                if not self._has_failed and not self._closed:
                    self._has_failed = True
                    _log.warning("a context is decoded by each REPL, since its fork server cannot start: %s", error)
                return None

    def _weigh(self, shared: _SharedServer, memory_bytes: int) -> None:
        """Replace the guess by the measured memory. If that is too much, give the fork server to no further REPL."""
        if shared.memory_bytes != memory_bytes:
            shared.memory_bytes = memory_bytes
            self._remember_heap(shared.digest, memory_bytes)
            if not self._make_room(0):
                self._unlist(shared)

    def _remember_heap(self, digest: bytes, memory_bytes: int) -> None:
        self._heaps[digest] = memory_bytes
        if len(self._heaps) > MAX_SEEN:
            del self._heaps[next(iter(self._heaps))]

    def _make_room(self, needed_bytes: int) -> bool:
        """End fork servers without REPLs until there is room, and return whether there is. If not, end none."""
        in_use_bytes = sum(shared.memory_bytes for shared in self._alive if shared.users)
        if in_use_bytes + needed_bytes > self._max_bytes:
            return False
        for shared in list(self._listed.values()):
            if not shared.users and sum(each.memory_bytes for each in self._alive) + needed_bytes > self._max_bytes:
                self._unlist(shared)
        return True

    def _unlist(self, shared: _SharedServer) -> None:
        """Give the fork server to no further REPL. It ends with its last one."""
        if shared.is_listed:
            shared.is_listed = False
            del self._listed[shared.digest]
            self._end_if_done(shared)

    def _leave(self, shared: _SharedServer) -> None:
        shared.users -= 1
        self._end_if_done(shared)

    def _end_if_done(self, shared: _SharedServer) -> None:
        if shared.is_listed or shared.users:
            return
        self._alive.discard(shared)
        shared.making.cancel()  # no REPL waits for it any more
        ending = unlisted(_ended(shared.making))
        self._ending.add(ending)
        ending.add_done_callback(self._ending.discard)


async def _result(task: "asyncio.Task[T]") -> T | None:
    """Return the task's result; None if the sandbox cancelled it. Cancelling the caller does not cancel the task."""
    await asyncio.wait({task})
    return None if task.cancelled() else task.result()


async def _ended(making: "asyncio.Task[Forker | None]") -> None:
    await asyncio.wait({making})
    fork_server = None if making.cancelled() or making.exception() is not None else making.result()
    if fork_server is not None:
        with contextlib.suppress(SandboxFailed):  # its maker reports what could not be removed
            await fork_server.close()


async def _digested(context: StoredContext) -> bytes | None:
    """Return the digest; None if there is no memory or thread to compute it. The context then equals no other."""
    try:
        return await asyncio.to_thread(_digest, context)
    except (OSError, RuntimeError):
        return None


def _digest(context: StoredContext) -> bytes:
    with context:
        return digest_of(context)
