"""Contexts of a node: each is fetched once, by its digest, and shared by all runs that have it.

A context lies in sealed memfds, like one that was stored here. What arrives is compared with the digest before a run
gets it. Contexts without a run stay while there is room, and the least recently used one goes first.
"""

import asyncio
import contextlib
from collections.abc import AsyncIterator
from dataclasses import dataclass

import msgspec

from rlm_broker.cluster.agent.load import free_bytes, reserve_bytes
from rlm_broker.cluster.link import Link
from rlm_broker.cluster.messages import ContextSpec, FromBroker, Need, NoContext, Piece
from rlm_broker.context.memfd import Memfd
from rlm_broker.context.stored import ContextInfo, StoredContext, close_all, digest_of
from rlm_broker.errors import ContextRefused, SandboxFailed
from rlm_broker.sandbox.workers.cgroups import memory_bytes
from sandbox_worker.loading.form import MAX_PIECES

SHARE_OF_MEMORY = 0.25
"""Share of the node's memory for contexts. Those that runs have may take more."""
STALL_S = 60.0
"""Seconds without any bytes of a context that is on its way; then the runs that wait for it fail."""


class Arrival:
    """A context on its way. Its bytes are written as they come.

    Args:
        spec: Its description.

    Raises:
        ContextRefused: The description contradicts itself.
        OSError: There is no memory, or no descriptor.
    """

    def __init__(self, spec: ContextSpec) -> None:
        sizes = [piece.form.size_bytes for piece in spec.pieces]
        if not 0 < len(sizes) <= MAX_PIECES or sum(sizes) != spec.size_bytes:
            raise ContextRefused("the description of a context contradicts itself")
        self.spec = spec
        self._at = 0
        self._place = 0
        self._sizes = sizes
        self._memfds: list[Memfd] = []
        try:
            for _ in sizes:
                self._memfds.append(Memfd())
        except OSError:
            self.close()
            raise

    @property
    def is_whole(self) -> bool:
        """Whether all bytes have come."""
        return self._at == self.spec.size_bytes

    def add(self, at: int, data: bytes | bytearray) -> None:
        """Write the next bytes.

        Raises:
            SandboxFailed: They are not the next ones.
            OSError: There is no memory for them.
        """
        if at != self._at or at + len(data) > self.spec.size_bytes or not data:
            raise SandboxFailed(f"a context arrives out of order: byte {at:,} came, and {self._at:,} was next")
        self._at += len(data)
        while data:
            memfd = self._memfds[self._place]
            room = self._sizes[self._place] - memfd.size_bytes
            memfd.write(data if len(data) <= room else data[:room])
            data = data[room:]
            self._place += memfd.size_bytes == self._sizes[self._place]

    def sealed(self) -> StoredContext:
        """Return the context that has come. The caller closes it."""
        info = msgspec.convert(self.spec.info, ContextInfo)
        fds: list[int] = []
        try:
            for memfd in self._memfds:
                fds.append(memfd.seal())
        except BaseException:
            close_all(fds)
            raise
        return StoredContext(zip(fds, self.spec.pieces, strict=True), info)

    def close(self) -> None:
        """Give up what has come and was not sealed."""
        for memfd in self._memfds:
            with memfd:
                pass
        self._memfds.clear()


@dataclass(eq=False, slots=True)
class _Entry:
    """One context: here, or on its way.

    Attributes:
        arrival: What has come so far.
        has_come: Resolved when all bytes are here, or with the reason why they will not come.
        context: Returns the context when it is here and was checked.
        deadline: Time limit until the next bytes.
        users: Runs that have it or wait for it.
    """

    arrival: Arrival
    has_come: asyncio.Future[None]
    context: asyncio.Task[StoredContext]
    deadline: asyncio.Timeout
    users: int = 0


class Contexts:
    """The contexts of a node.

    Args:
        link: Link to the orchestrator.
        max_bytes: Bytes of contexts, beyond which those without a run go; None takes `SHARE_OF_MEMORY` of the memory.
    """

    def __init__(self, link: Link[FromBroker], max_bytes: int | None = None) -> None:
        self._link = link
        self._max_bytes = int(memory_bytes() * SHARE_OF_MEMORY) if max_bytes is None else max_bytes
        self._entries: dict[str, _Entry] = {}

    @property
    def size_bytes(self) -> int:
        """Bytes of all contexts that are here or on their way."""
        return sum(entry.arrival.spec.size_bytes for entry in self._entries.values())

    @contextlib.asynccontextmanager
    async def held(self, spec: ContextSpec) -> AsyncIterator[StoredContext]:
        """Have a context until the block ends. It is fetched if it is not here.

        Raises:
            SandboxFailed: There is no memory for it on this node, it does not come, or it arrived damaged.
            LinkLost: The link has ended.
        """
        entry = self._entries.pop(spec.digest, None) or self._expected(spec)
        self._entries[spec.digest] = entry  # moved to the end, since it was used last
        entry.users += 1
        try:
            context = await asyncio.shield(entry.context)
            info = msgspec.convert(spec.info, ContextInfo)
            if info == context.info:
                yield context
            else:  # equal bytes, which the orchestrator has read from elsewhere
                with context.another(info) as other:
                    yield other
        finally:
            entry.users -= 1
            self._make_room(0)

    def take(self, piece: Piece, data: bytes | bytearray) -> None:
        """Take bytes that the orchestrator has sent. Those that are not expected are dropped."""
        entry = self._entries.get(piece.digest)
        if entry is None or entry.has_come.done():
            return
        try:
            entry.arrival.add(piece.at, data)
        except (SandboxFailed, OSError) as error:
            entry.has_come.set_exception(error)
            return
        if entry.arrival.is_whole:
            entry.has_come.set_result(None)
        else:
            with contextlib.suppress(RuntimeError):  # the task has not begun: these bytes are left of an earlier one
                entry.deadline.reschedule(asyncio.get_running_loop().time() + STALL_S)

    def missing(self, message: NoContext) -> None:
        """Take the answer that the orchestrator does not have a context any more."""
        entry = self._entries.get(message.digest)
        if entry is not None and not entry.has_come.done():
            entry.has_come.set_exception(SandboxFailed("the orchestrator does not have the context any more"))

    async def aclose(self) -> None:
        """Drop all contexts."""
        entries = list(self._entries.values())
        self._entries.clear()
        for entry in entries:
            entry.context.cancel()
        for context in await asyncio.gather(*(entry.context for entry in entries), return_exceptions=True):
            if isinstance(context, StoredContext):
                context.close()

    # -- fetching ----------------------------------------------------------------------------------------------------

    def _expected(self, spec: ContextSpec) -> _Entry:
        """Make room for a context that is not here, and ask for it."""
        self._make_room(spec.size_bytes)
        no_memory = f"the node has no memory for a context of {spec.size_bytes:,} bytes"
        if spec.size_bytes > free_bytes() - reserve_bytes():
            raise SandboxFailed(no_memory)
        try:
            arrival = Arrival(spec)
        except OSError as error:
            raise SandboxFailed(f"{no_memory}: {error.strerror}") from None
        loop = asyncio.get_running_loop()
        has_come, deadline = loop.create_future(), asyncio.timeout(STALL_S)
        entry = _Entry(arrival, has_come, loop.create_task(self._fetched(arrival, has_come, deadline)), deadline)
        entry.context.add_done_callback(lambda task: self._end(spec.digest, entry, task))
        return entry

    async def _fetched(
        self, arrival: Arrival, has_come: asyncio.Future[None], deadline: asyncio.Timeout
    ) -> StoredContext:
        try:
            async with deadline:
                await self._link.send(Need(arrival.spec.digest))
                await has_come
            return await _checked(arrival.sealed(), arrival.spec.digest)
        except TimeoutError:
            raise SandboxFailed(f"the orchestrator sent nothing of a context for {STALL_S:g} s") from None
        except OSError as error:
            raise SandboxFailed(f"the node has no memory for a context: {error.strerror}") from None

    def _end(self, digest: str, entry: _Entry, task: asyncio.Task[StoredContext]) -> None:
        """Close what has come. Remove a context that did not arrive, so that a further run asks for it again."""
        entry.arrival.close()  # here and not in the task, which may have been cancelled before it began
        if (task.cancelled() or task.exception() is not None) and self._entries.get(digest) is entry:
            del self._entries[digest]

    def _make_room(self, needed_bytes: int) -> None:
        """Drop contexts without a run until there is room, the least recently used first."""
        for digest, entry in list(self._entries.items()):
            if self.size_bytes + needed_bytes <= self._max_bytes:
                return
            if not entry.users and entry.context.done():
                del self._entries[digest]
                entry.context.result().close()


async def _checked(context: StoredContext, digest: str) -> StoredContext:
    """Return the context if it has the digest, else close it.

    Raises:
        SandboxFailed: It has another digest.
    """
    try:
        found = await asyncio.to_thread(_digest, context.another())
    except BaseException:
        context.close()
        raise
    if found != digest:
        context.close()
        raise SandboxFailed("a context arrived damaged: its digest is another one")
    return context


def _digest(context: StoredContext) -> str:
    with context:
        return digest_of(context).hex()
