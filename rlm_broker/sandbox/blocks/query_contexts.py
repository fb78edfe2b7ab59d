"""Contexts of children, as model code gives them: found when a query comes, stored when the child begins."""

import asyncio
import contextlib
import os
import stat
from collections.abc import AsyncIterator, Awaitable, Callable
from functools import partial
from typing import Any

import msgspec

from rlm_broker.concurrency.threads import in_thread
from rlm_broker.context.store import store_as_it_is, store_part
from rlm_broker.context.stored_context import StoredContext
from rlm_broker.errors import ContextRefused, RlmBrokerError
from rlm_broker.sandbox.workers.worker import Worker
from sandbox_worker.wire.control import OpenToRead
from sandbox_worker.wire.messages import Query
from sandbox_worker.wire.prompts import MAX_INLINE_BYTES, ChildContext

Opener = Callable[[int | None], contextlib.AbstractAsyncContextManager[StoredContext]]


class QueryContexts:
    """The contexts of children in the queries of one REPL.

    Args:
        worker: Returns the worker with the REPL's files.
        own: Returns the REPL's own context of a name, or None.
        max_bytes: Largest size of a file; a larger one is refused.
    """

    def __init__(
        self, worker: Callable[[], Awaitable[Worker]], own: Callable[[str], StoredContext | None], max_bytes: int
    ) -> None:
        self._worker = worker
        self._own = own
        self._max_bytes = max_bytes

    def of(self, query: Query) -> "QueryWithContexts":
        """Return the query with its contexts, not stored yet. Raise ContextRefused unless each prompt has one."""
        if len(query.contexts) != len(query.prompts):
            raise ContextRefused(f"{len(query.contexts):,} contexts for {len(query.prompts):,} prompts")
        files: dict[str, _Shared] = {}
        given = tuple(
            None if each is None else GivenContext(self._opener(each, files), each) for each in query.contexts
        )
        fields: dict[str, Any] = {name: getattr(query, name) for name in query.__struct_fields__}
        return QueryWithContexts(**fields, given=given)

    def _opener(self, asked: ChildContext, files: "dict[str, _Shared]") -> "Opener":
        """Return a function that stores a context, once for the same file of one query."""
        if asked.file is None:
            return _Shared(partial(self._stored, asked)).held
        return files.setdefault(f"{asked.file}/{asked.is_json}", _Shared(partial(self._stored, asked))).held

    async def _stored(self, asked: ChildContext, most_bytes: int | None) -> StoredContext:
        """Store a context for the caller to close. Raise ContextRefused if it is not available, or larger than
        `most_bytes`."""
        try:
            if asked.own is not None:
                if (own := self._own(asked.own)) is None:
                    raise ContextRefused(f"this REPL has no context {asked.own!r} to give to a child: give a copy")
                return own.another()
            if asked.file is not None:
                return await self._read(asked.file, asked.is_json, most_bytes)
            if asked.value is None:
                raise ContextRefused("a context has no value")
            if len(asked.value) > MAX_INLINE_BYTES:  # decoding a longer one would hold up the event loop
                raise ContextRefused(f"a value of {len(asked.value):,} bytes in a query, {MAX_INLINE_BYTES:,} at most")
            return store_as_it_is(msgspec.json.decode(asked.value))
        except (RlmBrokerError, OSError, msgspec.MsgspecError, RecursionError, UnicodeError) as error:
            raise ContextRefused(f"a context is not available: {error}") from None

    async def _read(self, name: str, is_json: bool, most_bytes: int | None) -> StoredContext:
        if "/" in name or "\0" in name or name in ("", ".", ".."):
            raise ContextRefused(f"{name!r} is not a file name")
        fd = await (await self._worker()).open_file(OpenToRead([os.fsencode(name)]))
        with contextlib.ExitStack() as opened:
            opened.callback(os.close, fd)
            found = os.fstat(fd)
            if not stat.S_ISREG(found.st_mode):  # init checks, too, but a descriptor out of a worker is untrusted
                raise ContextRefused(f"{name!r} is not a regular file")
            if most_bytes is not None and found.st_size > most_bytes:
                raise ContextRefused(f"it has {found.st_size:,} bytes, more than {most_bytes:,}: give a smaller part")
            work = partial(store_part, fd, is_json, self._max_bytes)
            return await in_thread(work, discard=StoredContext.close, at_end=opened.pop_all().close)


class _Shared:
    """A context, stored once for all children with it open at the same time. `store` takes its largest size."""

    def __init__(self, store: Callable[[int | None], Awaitable[StoredContext]]) -> None:
        self._store = store
        self._storing = asyncio.Lock()
        self._context: StoredContext | None = None
        self._users = 0

    @contextlib.asynccontextmanager
    async def held(self, most_bytes: int | None = None) -> AsyncIterator[StoredContext]:
        """Keep the context stored inside the block. The last of several blocks at the same time closes it."""
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
    """The context of one child, as model code has given it.

    Example:
        ```python
        async def answer(query: QueryWithContexts) -> list[Slot]:
            async with query.given[0].opened() as context:
                return [Slot(str(context.info.total_chars))]

        with sandbox.repl(answer=answer) as repl:
            print(repl.execute("print(rlm_query('How long is it?', context='abc'))").stdout)  # 3
        ```

    Args:
        opener: Stores the context until its context manager is left.
        asked: Description of the context, from the query.
    """

    __slots__ = ("_asked", "_opener")

    def __init__(self, opener: Opener, asked: ChildContext) -> None:
        self._opener = opener
        self._asked = asked

    @property
    def is_task(self) -> bool:
        """Whether the child's task is inside the context. The prompt then is the task's beginning and end."""
        return self._asked.is_task

    @property
    def name(self) -> str | None:
        """Name of the REPL's own context for the child; None for any other."""
        return self._asked.own

    @property
    def key(self) -> object:
        """Key of the context. Equal contexts of one query have equal keys."""
        return msgspec.structs.astuple(self._asked)

    def opened(self, most_bytes: int | None = None) -> contextlib.AbstractAsyncContextManager[StoredContext]:
        """Store the context until the context manager is left.

        Args:
            most_bytes: Bytes of a file; a larger one is refused before it is read. None allows the `scratch_bytes` of
                the REPL.

        Raises:
            ContextRefused: The context is not available.
        """
        return self._opener(most_bytes)


class QueryWithContexts(Query, frozen=True):
    """A query whose children have contexts.

    Example:
        ```python
        async def answer(query: QueryWithContexts) -> list[Slot]:
            return [Slot("" if given is None else given.name) for given in query.given]

        sandbox.repl(answer=answer)
        ```

    Attributes:
        given: Context of each prompt; None where the prompt itself is the context.
    """

    given: tuple[GivenContext | None, ...] = ()
