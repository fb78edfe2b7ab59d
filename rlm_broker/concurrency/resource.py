"""Objects that live on one event loop: how they are opened and closed, also for callers that are gone meanwhile.

Theory of operation
-------------------
How an object is opened decides where it lives:

- By `async with` (or `borrowed`): on the loop that runs. When the object is closed it has no loop any more, and may be
  opened again on another one. Two calls of `asyncio.run` are two loops.
- By a plain `with` (or `bind_loop`): on the background loop of this process, for good.

An opened object is closed, also if its caller is cancelled at any `await`, or interrupted while it waits. Four rules
make that hold:

1. Openings and closings of an object take turns. A `close` during an opening cancels the opening first.
2. An opening has a task of its own, and is cancelled once (`deadline.within`). If it does not succeed, `_close` takes
   back its beginnings.
3. If an opening succeeds although its caller was cancelled, no `with` block would end it. Each caller brings an object
   of its own, the opener, and closes the object if that is its opener.
4. A closing is never cancelled, only the wait for it is (`EventLoopRef.clean_up`). anyio cancels its tasks again at
   each `await`, and `asyncio.run` cancels all tasks of its loop after a second Ctrl+C.
"""

import asyncio
import contextlib
from collections.abc import AsyncIterator
from functools import partial
from types import TracebackType
from typing import Self

from rlm_broker.concurrency.deadline import StopRequested, to_its_end, within
from rlm_broker.concurrency.event_loop import EventLoopRef
from rlm_broker.concurrency.forks import FORKING
from rlm_broker.errors import SandboxFailed


class AsyncResource:
    """An object on one loop: a context manager of both kinds, opened once and closed once.

    A subclass defines `_open` and `_close`, of which one runs at a time. It may set `_event_loop` before it is opened,
    to live beside another object. If an opening fails, is cancelled or is overtaken by `close`, then `_close` takes
    back its beginnings, and the object may be opened again.
    """

    _event_loop: EventLoopRef | None = None
    _loop_is_callers = False
    _is_open = False
    _opener: object = None
    _borrowers: frozenset[object] = frozenset()
    _turn: asyncio.Lock | None = None
    _changes = 0
    _stop_opening: "asyncio.Future[None] | None" = None

    async def _open(self) -> None:
        raise NotImplementedError

    async def _close(self) -> None:
        raise NotImplementedError

    @property
    def event_loop(self) -> EventLoopRef | None:
        """The object's loop; None where that is not decided yet."""
        return self._event_loop

    @property
    def is_open(self) -> bool:
        """Whether the object was opened, and not closed since."""
        return self._is_open

    def bind_loop(self) -> EventLoopRef:
        """Return the object's loop. If it has none, it is bound to the background loop for good."""
        with FORKING:
            if self._event_loop is None:
                self._event_loop = EventLoopRef.background()
            return self._event_loop

    def __enter__(self) -> Self:
        loop, opener = self.bind_loop(), object()
        try:
            return loop.run(self.__aenter__(opener))
        except BaseException:
            loop.clean_up(partial(self._leave_if, opener))
            raise

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    async def __aenter__(self, opener: object = None, *, borrows: bool = False) -> Self:
        """Open the object, unless it is open. If that fails in any way, close what is open of it by then.

        Args:
            opener: Stands for the caller, which may be cancelled later.
            borrows: Whether the caller is a borrower. It is counted, unless the owner has opened the object.
        """
        loop, opener = self._bind_here(), opener or object()
        if not loop.is_here:
            try:
                return await loop.arun(self.__aenter__(opener, borrows=borrows))
            except BaseException:
                await loop.aclean_up(partial(self._leave_if, opener))
                raise
        async with self._changing():
            is_counted = borrows and (bool(self._borrowers) or not self._is_open)
            if not self._is_open:
                self._stop_opening = asyncio.get_running_loop().create_future()
                try:
                    await within(None, self._open(), self._stop_opening)
                    self._is_open = True
                except StopRequested:
                    await to_its_end(self._close)
                    raise SandboxFailed("this was closed while it was being opened: open it again") from None
                except BaseException:
                    await to_its_end(self._close)
                    raise
                finally:
                    self._stop_opening = None
            if is_counted:
                self._borrowers |= {opener}
            elif not borrows:
                self._opener = self._opener or opener
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.aclose()

    def close(self) -> None:
        """Close the object and everything below it. Has no effect when repeated, or once its event loop has ended."""
        if self._event_loop is not None:
            self._event_loop.clean_up(self._leave)

    async def aclose(self) -> None:
        """Close the object as `close` does, from any loop."""
        if self._event_loop is not None:
            await self._event_loop.aclean_up(self._leave)

    @contextlib.asynccontextmanager
    async def borrowed(self) -> AsyncIterator[None]:
        """Use the object inside the block. If its owner has not opened it, it is open until its last borrower ends."""
        loop, borrower = self._bind_here(), object()
        try:
            await loop.arun(self.__aenter__(borrower, borrows=True))
            yield
        finally:
            await loop.aclean_up(partial(self._give_back, borrower))

    def _bind_here(self) -> EventLoopRef:
        """Return the object's loop. If it has none, it is bound to the running one until it closes."""
        with FORKING:
            if self._event_loop is None:
                self._event_loop, self._loop_is_callers = EventLoopRef.here(), True
            return self._event_loop

    @contextlib.asynccontextmanager
    async def _changing(self) -> AsyncIterator[None]:
        """Wait for the turn to open or close the object. With the last turn, a closed object is free of its loop."""
        self._changes += 1
        try:
            self._bind_here()  # the turn before may have been the last
            self._turn = self._turn or asyncio.Lock()
            async with self._turn:
                yield
        finally:
            self._changes -= 1
            if self._loop_is_callers and not self._changes and not self._is_open:
                with FORKING:
                    self._event_loop, self._loop_is_callers, self._turn = None, False, None

    async def _leave(self) -> None:
        if self._stop_opening is not None and not self._stop_opening.done():
            self._stop_opening.set_result(None)
        async with self._changing():
            self._is_open, self._opener, self._borrowers = False, None, frozenset()
            await self._close()

    async def _leave_if(self, opener: object) -> None:
        """Close the object if it is open by this opener, for whom no `with` block would close it."""
        if self._opener is opener and not self._borrowers:
            await self._leave()
        elif self._opener is opener:
            self._opener = None

    async def _give_back(self, borrower: object) -> None:
        """Count a borrower no more. With the last one the object is closed, if its owner has not opened it since."""
        if borrower not in self._borrowers:
            return
        async with self._changing():
            self._borrowers -= {borrower}
            if self._is_open and not self._borrowers and self._opener is None:
                self._is_open = False
                await self._close()
