"""Contexts of objects that are used again: decoded once, in a fork server of their own, and shared by their REPLs.

Texts are shared as they are: every worker maps them. Other objects are made anew in each worker, which takes seconds
and memory for large ones. So the second time that a REPL is wanted on the same context, a fork server decodes it, and
only forks from there on. It has run no model code. This is for "strict" alone, which confines the fork
server: elsewhere what may be hostile would be decoded without any isolation.
"""

import asyncio
import contextlib
import hashlib
import mmap
import weakref
from dataclasses import dataclass
from typing import Final, TypeVar

from rlm_broker.context.store import StoredContext
from rlm_broker.errors import RlmBrokerError, SandboxFailed
from rlm_broker.sandbox.workers.fork_server import ForkServer
from rlm_broker.sandbox.workers.source import ColdStart, StartedWorker
from rlm_broker.sandbox.workers.warm_pool import WarmPool
from rlm_broker.sandbox.workers.worker import Worker
from rlm_broker.sandbox.workers.zygote_process import Preparation
from rlm_broker.transport.connection import Connection
from rlm_broker.transport.listener import Listener

SHARED_FROM_BYTES: Final = 4 << 20
"""Of JSON: less is decoded in the time that a fork server takes to start."""
OF_ALL_MEMORY: Final = 0.25
"""What all these fork servers may take of the machine's memory; who was used least recently goes first."""
HEAP_PER_BYTE: Final = 6
"""Memory of objects for each byte of their JSON, as long as it is not known: a guess. Records have 4, numbers 10."""
MAX_SEEN: Final = 256
"""Contexts of which it is remembered that they were used, and what they took."""

T = TypeVar("T")


@dataclass(eq=False)
class _Shared:
    """One context's fork server.

    Attributes:
        memory_bytes: What it takes, or is thought to take as long as it is being made.
        making: Ends in the fork server, or in None where there could be none.
        users: REPLs that have it or wait for it. While there are any, it is not ended.
        is_listed: Whether further ones may have it.
    """

    digest: bytes
    memory_bytes: int
    making: "asyncio.Task[ForkServer | None]"
    users: int = 0
    is_listed: bool = True


class ContextCache:
    """Starts REPLs as `pool` does, and those on a context that was used before from a fork server that has it.

    Lives on one event loop.

    Args:
        max_bytes: Memory of all these fork servers together. One whose REPLs live is not ended for another.
    """

    def __init__(self, pool: WarmPool, listener: Listener, max_bytes: int) -> None:
        self.fork_server = pool.fork_server
        self.limits = pool.limits
        self._pool = pool
        self._listener = listener
        self._max_bytes = max_bytes
        self._seen: dict[asyncio.Task[bytes | None], int] = {}
        """Digests of the contexts that were used so far, and their sizes."""
        self._digests = weakref.WeakKeyDictionary[StoredContext, asyncio.Task[bytes | None]]()
        """Of those that may be given again as they are."""
        self._listed: dict[bytes, _Shared] = {}
        """By digest; who was used last comes last."""
        self._alive: set[_Shared] = set()
        self._heaps: dict[bytes, int] = {}
        """What each took in memory when it was decoded."""
        self._used_by: dict[Worker, _Shared] = {}
        self._ending: set[asyncio.Task[None]] = set()
        self._closed = False

    async def start(self, context: StoredContext | None) -> StartedWorker:
        """See `WorkerSource`."""
        if context is not None and not self._closed and self._is_worth_it(context):
            digest = await self._digest_if_used_before(context)
            if digest is not None and (started := await self._start_shared(digest, context)) is not None:
                return started
        return await self._pool.start(context)

    async def restart(self, worker: Worker) -> Connection:
        """See `WorkerSource`."""
        return await self._pool.restart(worker)

    async def end(self, worker: Worker) -> None:
        """See `WorkerSource`."""
        shared = self._used_by.pop(worker, None)
        fork_server = None if shared is None else shared.making.result()
        try:
            await (fork_server or self._pool).end(worker)
        finally:
            if shared is not None:
                self._leave(shared)

    async def close(self) -> None:
        """End all that no REPL uses; the others end with the fork server that made them. Harmless when repeated."""
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
        form = context.info.form
        return self.fork_server.level.confines_zygote and form.kind == "json" and form.size_bytes >= SHARED_FROM_BYTES

    async def _digest_if_used_before(self, context: StoredContext) -> bytes | None:
        """None for the first of its content. Only who meets another one of the same size waits for the digests."""
        if (of_its_own := self._digests.get(context)) is not None:
            return await _result(of_its_own)
        size = context.info.form.size_bytes
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

    async def _start_shared(self, digest: bytes, context: StoredContext) -> StartedWorker | None:
        """None where there can be no fork server for it, or it can fork no more."""
        if self._closed:  # while we looked whether it was used before
            return None
        shared = self._listed.pop(digest, None) or self._to_be_made(digest, context)
        self._listed[digest] = shared  # at the end, as who was used last
        shared.users += 1
        started: StartedWorker | None = None
        try:
            fork_server = await _result(shared.making)
            if fork_server is not None:
                self._weigh(shared, fork_server.memory_bytes)
                started = await ColdStart(fork_server, self._listener, self.limits).start(None)
                self._used_by[started[0]] = shared
        except RlmBrokerError:
            pass
        finally:
            if started is None:
                self._leave(shared)
        if started is None:
            self._unlist(shared)
        return started

    def _to_be_made(self, digest: bytes, context: StoredContext) -> _Shared:
        needed_bytes = self._heaps.get(digest, context.info.form.size_bytes * HEAP_PER_BYTE)
        making = self._make(context.another(), self._make_room(needed_bytes))
        shared = _Shared(digest, needed_bytes, asyncio.get_running_loop().create_task(making))
        self._alive.add(shared)
        return shared

    async def _make(self, context: StoredContext, has_room: bool) -> ForkServer | None:
        with context:
            if not has_room:
                return None
            try:
                return await self.fork_server.prepared(
                    Preparation(context=context, timeout_s=self.limits.start_timeout_s)
                )
            except (RlmBrokerError, OSError):  # each of its REPLs decodes it, and says what is wrong
                return None

    def _weigh(self, shared: _Shared, memory_bytes: int) -> None:
        """It is made: what was a guess is known. Where that is too much, it ends with those who have it by now."""
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
        """End fork servers that nobody uses until there is room; none, where that would not be enough."""
        in_use_bytes = sum(shared.memory_bytes for shared in self._alive if shared.users)
        if in_use_bytes + needed_bytes > self._max_bytes:
            return False
        for shared in list(self._listed.values()):
            if not shared.users and sum(each.memory_bytes for each in self._alive) + needed_bytes > self._max_bytes:
                self._unlist(shared)
        return True

    def _unlist(self, shared: _Shared) -> None:
        """No further REPL gets it; it ends with its last."""
        if shared.is_listed:
            shared.is_listed = False
            del self._listed[shared.digest]
            self._end_if_done(shared)

    def _leave(self, shared: _Shared) -> None:
        shared.users -= 1
        self._end_if_done(shared)

    def _end_if_done(self, shared: _Shared) -> None:
        if shared.is_listed or shared.users:
            return
        self._alive.discard(shared)
        shared.making.cancel()  # nobody waits for it any more
        ending = asyncio.get_running_loop().create_task(_ended(shared.making))
        self._ending.add(ending)
        ending.add_done_callback(self._ending.discard)


async def _result(task: "asyncio.Task[T]") -> T | None:
    """What it comes to; None where it was cancelled, which the end of the sandbox does, and not whoever waits here."""
    await asyncio.wait({task})
    return None if task.cancelled() else task.result()


async def _ended(making: "asyncio.Task[ForkServer | None]") -> None:
    await asyncio.wait({making})
    fork_server = None if making.cancelled() or making.exception() is not None else making.result()
    if fork_server is not None:
        with contextlib.suppress(SandboxFailed):  # the one that made it says what could not be removed
            await fork_server.close()


async def _digested(context: StoredContext) -> bytes | None:
    """None where there is no memory or no thread to look at it: then it is like no other."""
    try:
        return await asyncio.to_thread(_digest, context)
    except (OSError, RuntimeError):
        return None


def _digest(context: StoredContext) -> bytes:
    with context, mmap.mmap(context.fd, context.info.form.size_bytes, access=mmap.ACCESS_READ) as mapped:
        return hashlib.sha256(mapped).digest()
