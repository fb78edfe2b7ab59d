"""The contexts that code gives its children: found when a query comes, stored when the child begins."""

import asyncio
import contextlib
import os
import stat
from collections.abc import AsyncIterator, Awaitable, Callable
from functools import partial
from typing import Any

import msgspec

from rlm_broker.concurrency.threads import in_thread
from rlm_broker.context.parts import store_part
from rlm_broker.context.store import store_as_it_is
from rlm_broker.context.stored import StoredContext
from rlm_broker.errors import ContextRefused, RlmBrokerError
from rlm_broker.sandbox.workers.worker import Worker
from sandbox_worker.wire.control import OpenToRead
from sandbox_worker.wire.messages import Query
from sandbox_worker.wire.tasks import MAX_INLINE_BYTES, ChildContext

Opener = Callable[[int | None], contextlib.AbstractAsyncContextManager[StoredContext]]


class QueryContexts:
    """Has the contexts that the queries of one REPL give.

    Args:
        worker: Returns the worker that has the REPL's files.
        own: Returns the context that the REPL has under a name, or None.
        max_bytes: Of a file that is stored.
    """

    def __init__(
        self,
        worker: Callable[[], Awaitable[Worker]],
        own: Callable[[str], StoredContext | None],
        max_bytes: int,
    ) -> None:
        self._worker = worker
        self._own = own
        self._max_bytes = max_bytes

    def of(self, query: Query) -> "QueryWithContexts":
        """Return the query with its contexts.

        Raises:
            ContextRefused: Not each prompt has one, or None.
        """
        if len(query.contexts) != len(query.prompts):
            raise ContextRefused(f"{len(query.contexts):,} contexts for {len(query.prompts):,} prompts")
        files: dict[str, _Shared] = {}
        given = tuple(
            None if each is None else GivenContext(self._opener(each, files), each) for each in query.contexts
        )
        fields: dict[str, Any] = {name: getattr(query, name) for name in query.__struct_fields__}
        return QueryWithContexts(**fields, given=given)

    def _opener(self, asked: ChildContext, files: "dict[str, _Shared]") -> "Opener":
        """Return what stores a context. Children of one query that have one file share what is stored of it."""
        if asked.file is None:
            return _Shared(partial(self._stored, asked)).held
        return files.setdefault(f"{asked.file}/{asked.is_json}", _Shared(partial(self._stored, asked))).held

    async def _stored(self, asked: ChildContext, most_bytes: int | None) -> StoredContext:
        """Store one, for the caller to close.

        Raises:
            ContextRefused: It cannot be had, or takes more than `most_bytes`.
        """
        try:
            if asked.own is not None:
                return self._another(asked.own)
            if asked.file is not None:
                return await self._read(asked.file, asked.is_json, most_bytes)
            if asked.value is None:
                raise ContextRefused("a context has no value")
            if len(asked.value) > MAX_INLINE_BYTES:  # decoding a long one would hold the event loop
                raise ContextRefused(f"a value of {len(asked.value):,} bytes in a query, {MAX_INLINE_BYTES:,} at most")
            return store_as_it_is(msgspec.json.decode(asked.value))
        except (RlmBrokerError, OSError, msgspec.MsgspecError, RecursionError, UnicodeError) as error:
            raise ContextRefused(f"a context cannot be had: {error}") from None

    def _another(self, name: str) -> StoredContext:
        own = self._own(name)
        if own is None:
            raise ContextRefused(f"this REPL has no context {name!r} that a child could have: give a copy")
        return own.another()

    async def _read(self, name: str, is_json: bool, most_bytes: int | None) -> StoredContext:
        if "/" in name or "\0" in name or name in ("", ".", ".."):
            raise ContextRefused(f"{name!r} is no name of a file")
        fd = await (await self._worker()).open_file(OpenToRead([os.fsencode(name)]))
        try:
            found = os.fstat(fd)
            if not stat.S_ISREG(found.st_mode):  # init has looked; what comes out of a worker is looked at again
                raise ContextRefused(f"{name!r} is no regular file")
            if most_bytes is not None and found.st_size > most_bytes:
                raise ContextRefused(f"it has {found.st_size:,} bytes, more than {most_bytes:,}: give a smaller part")
            return await in_thread(lambda stop: store_part(fd, is_json, self._max_bytes, stop))
        finally:
            os.close(fd)


class _Shared:
    """A context that is stored once for all that have it open at the same time.

    Args:
        store: Stores it, unless it takes more bytes than it is told.
    """

    def __init__(self, store: Callable[[int | None], Awaitable[StoredContext]]) -> None:
        self._store = store
        self._storing = asyncio.Lock()
        self._context: StoredContext | None = None
        self._users = 0

    @contextlib.asynccontextmanager
    async def held(self, most_bytes: int | None = None) -> AsyncIterator[StoredContext]:
        """Have it stored until this is left by the last one."""
        async with self._storing:
            context = self._context
            if context is None:
                context = self._context = await self._store(most_bytes)
            self._users += 1
        try:
            yield context
        finally:
            self._users -= 1
            if not self._users:
                self._context = None
                context.close()


class GivenContext:
    """The context of one child, as code has given it.

    Args:
        opener: Stores it for as long as its context manager is not left.
        asked: Where it is.
    """

    __slots__ = ("_asked", "_opener")

    def __init__(self, opener: Opener, asked: ChildContext) -> None:
        self._opener = opener
        self._asked = asked

    @property
    def is_task(self) -> bool:
        """Whether the child's task stands in it; the prompt is then its beginning and end."""
        return self._asked.is_task

    @property
    def name(self) -> str | None:
        """Name of the REPL's own context that it is, or None."""
        return self._asked.own

    @property
    def key(self) -> object:
        """What equal ones of one query have in common."""
        return msgspec.structs.astuple(self._asked)

    def opened(self, most_bytes: int | None = None) -> contextlib.AbstractAsyncContextManager[StoredContext]:
        """Store it for as long as this is not left.

        Args:
            most_bytes: A larger file is refused before it is read. None: up to the `scratch_bytes` of the REPL.

        Raises:
            ContextRefused: It cannot be had.
        """
        return self._opener(most_bytes)


class QueryWithContexts(Query, frozen=True):
    """A query whose children have contexts.

    Attributes:
        given: For each prompt its context; None where that is the prompt.
    """

    given: tuple[GivenContext | None, ...] = ()
