"""Contexts of runs on their way to nodes: each goes to a node once, in pieces, when the node asks for it."""

import asyncio
import contextlib
import os
import weakref
from collections.abc import AsyncIterator

from rlm_broker.cluster.described import context_spec
from rlm_broker.cluster.link import Link, LinkLost
from rlm_broker.cluster.messages import PIECE_BYTES, ContextSpec, FromAgent, NoContext, Piece
from rlm_broker.context.stored import StoredContext
from rlm_broker.errors import ContextRefused

SMALL_BYTES = 1 << 16
"""Bytes of a context whose digest is computed at once: that takes less time than a thread's turn."""


class Contexts:
    """The contexts of the runs that go on, by their digests. Lives on one event loop."""

    def __init__(self) -> None:
        self._lent: dict[str, list[StoredContext]] = {}
        """Digest → the contexts that runs have lent, which are equal. The first one is read."""
        self._specs = weakref.WeakKeyDictionary[StoredContext, ContextSpec]()

    @contextlib.asynccontextmanager
    async def lent(self, context: StoredContext) -> AsyncIterator[ContextSpec]:
        """Let nodes have a context until the context manager exits. Its digest is computed when it is first lent.

        Raises:
            ContextRefused: The context was closed, or cannot be read.
        """
        spec = self._specs.get(context)
        if spec is None:
            try:
                is_small = context.size_bytes <= SMALL_BYTES
                spec = _spec(context) if is_small else await asyncio.to_thread(_spec, context)
            except OSError as error:
                raise ContextRefused(f"the context cannot be read for the cluster: {error.strerror}") from error
            self._specs[context] = spec
        lent = self._lent.setdefault(spec.digest, [])
        lent.append(context)
        try:
            yield spec
        finally:
            lent.remove(context)
            if not lent:
                del self._lent[spec.digest]

    def find(self, digest: str) -> StoredContext | None:
        """Return a context that is lent just now."""
        lent = self._lent.get(digest)
        return lent[0] if lent else None


async def send_context(link: Link[FromAgent], digest: str, context: StoredContext | None) -> None:
    """Send all bytes of a context, piece by piece, or say that there is none. An end of the link ends it, too."""
    with contextlib.suppress(LinkLost):
        try:
            if context is None:
                raise ContextRefused("the run that needs it has ended")
            with context.another() as own:  # the run may end, and close the descriptors, while this goes on
                await _send_pieces(link, digest, own)
        except (ContextRefused, OSError):
            link.post(NoContext(digest))


async def _send_pieces(link: Link[FromAgent], digest: str, context: StoredContext) -> None:
    at = 0
    for fd, piece in context.pieces():
        for start in range(0, piece.form.size_bytes, PIECE_BYTES):
            data = os.pread(fd, PIECE_BYTES, start)  # of memory: 50 us, for which a thread would cost more
            await link.send(Piece(digest, at), data)
            at += len(data)
            await asyncio.sleep(0)  # a send that need not wait lets no other task run


def _spec(context: StoredContext) -> ContextSpec:
    with context.another() as own:  # the run may be cancelled, and close its descriptors, while this reads
        return context_spec(own)
