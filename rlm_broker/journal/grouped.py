"""Work that a thread does for many at a time: one write and one sync for all lines that have come meanwhile."""

import asyncio
import contextlib
import threading
from collections.abc import Callable, Sequence
from queue import SimpleQueue
from typing import Generic, TypeVar

T = TypeVar("T")


class Grouped(Generic[T]):
    """Hands entries to a function in a thread of its own, as many at a time as have come. Made on an event loop.

    After the first failure no further entry is handed over.

    Args:
        work: Called in the thread with entries, in their order.
        on_failure: Called on the event loop with the first exception of `work`.
        name: Name of the thread.
    """

    def __init__(
        self, work: Callable[[Sequence[T]], None], on_failure: Callable[[BaseException], object], name: str
    ) -> None:
        self._work = work
        self._on_failure = on_failure
        self._loop = asyncio.get_running_loop()
        self._entries: SimpleQueue[tuple[T, asyncio.Future[None] | None] | None] = SimpleQueue()
        self._ended: asyncio.Future[None] = self._loop.create_future()
        self._waiting: set[asyncio.Future[None]] = set()
        self._failure: BaseException | None = None
        self._is_closing = False
        threading.Thread(target=self._run, name=name, daemon=True).start()

    def put(self, entry: T) -> None:
        """Hand over an entry, from any thread, and do not wait for it."""
        self._entries.put((entry, None))

    async def done(self, entry: T) -> None:
        """Hand over an entry, and wait until the work with it is done.

        Raises:
            BaseException: The first exception of the work, whichever entry it was for.
        """
        if self._failure is not None:
            raise self._failure
        future: asyncio.Future[None] = self._loop.create_future()
        self._waiting.add(future)
        try:
            self._entries.put((entry, future))
            await future
        finally:
            self._waiting.discard(future)

    async def aclose(self) -> None:
        """Do the work with all entries that were handed over, then end the thread."""
        if not self._is_closing:
            self._is_closing = True
            self._entries.put(None)
        await asyncio.shield(self._ended)

    def _run(self) -> None:
        while (first := self._entries.get()) is not None:
            group = [first]
            is_last = False
            while not self._entries.empty():
                if (entry := self._entries.get()) is None:
                    is_last = True
                    break
                group.append(entry)
            try:
                self._work([entry for entry, _ in group])
            except BaseException as error:  # noqa: BLE001 - passed to the event loop
                self._tell(self._fail, error)
                break
            if waiting := [future for _, future in group if future is not None]:
                self._tell(_resolve, waiting)
            if is_last:
                break
        self._tell(_resolve, [self._ended])

    def _fail(self, error: BaseException) -> None:
        self._failure = error
        self._on_failure(error)
        for future in self._waiting:
            if not future.done():
                future.set_exception(error)

    def _tell(self, call: Callable[..., object], *given: object) -> None:
        with contextlib.suppress(RuntimeError):  # the event loop has ended
            self._loop.call_soon_threadsafe(call, *given)


def _resolve(futures: "Sequence[asyncio.Future[None]]") -> None:
    for future in futures:
        if not future.done():
            future.set_result(None)
