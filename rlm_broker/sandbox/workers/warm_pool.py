"""Workers made and locked down ahead of time, each used once."""

import asyncio
from collections import deque

from rlm_broker.context.store import StoredContext
from rlm_broker.errors import RlmBrokerError
from rlm_broker.sandbox.workers.source import ColdStart, StartedWorker
from rlm_broker.sandbox.workers.worker import Worker
from rlm_broker.transport.connection import Connection
from rlm_broker.transport.provisions import Provisions
from sandbox_worker.wire.errors import FrameTooLarge

REFILL_AFTER_S = 0.002
"""Who has just got a worker is to have the loop first."""
SMALL_BYTES = 1 << 16
"""Of a context that is given to a ready REPL through its connection, as a value, faster than a worker is forked."""


class WarmPool:
    """Keeps `size` workers ready, and makes each new one in the background when one is taken.

    A small context is given to a worker that is ready; for a large one, which is mapped and not sent, one is made.

    Args:
        size: None: one, from the second REPL on that is asked for. Who wants a single REPL does not pay for two.
    """

    def __init__(self, cold_start: ColdStart, size: int | None) -> None:
        self.fork_server = cold_start.fork_server
        self.limits = cold_start.limits
        self._cold_start = cold_start
        self._size = size
        self._asked = 0
        self._ready: deque[StartedWorker] = deque()
        self._making: set[asyncio.Task[None]] = set()
        self._contexts: dict[Worker, Provisions] = {}
        """Of the workers that were given theirs as a value: a REPL that is started again has none in place."""
        self._closed = False

    async def start(self, context: StoredContext | None) -> StartedWorker:
        """See `WorkerSource`."""
        self._asked += 1
        value = self._as_value(context)
        taken = None if value is None else await self._take()
        asyncio.get_running_loop().call_later(REFILL_AFTER_S, self._refill)
        if taken is None or value is None:
            return await self._cold_start.start(context)
        worker, connection = taken
        self._contexts[worker] = value
        connection.provide(value)
        return taken

    async def restart(self, worker: Worker) -> Connection:
        """See `WorkerSource`."""
        connection = await self._cold_start.restart(worker)
        if worker in self._contexts:
            connection.provide(self._contexts[worker])
        return connection

    async def end(self, worker: Worker) -> None:
        """See `WorkerSource`."""
        self._contexts.pop(worker, None)
        await self._cold_start.end(worker)

    def fill(self) -> None:
        """Begin to make what is missing."""
        if self._size is not None:
            self._refill()

    async def close(self) -> None:
        """End what nobody took. Harmless when repeated."""
        self._closed = True
        for task in self._making:
            task.cancel()
        await asyncio.gather(*self._making, return_exceptions=True)
        while self._ready:
            await self._give_up(*self._ready.pop())

    async def _take(self) -> StartedWorker | None:
        while self._ready:
            worker, connection = self._ready.popleft()
            if connection.is_open and worker.died is None and not worker.gone.is_set():
                return worker, connection
            await self._give_up(worker, connection)  # its fork server died meanwhile
        return None

    def _refill(self) -> None:
        size = self._size if self._size is not None else min(1, self._asked - 1)
        while not self._closed and len(self._ready) + len(self._making) < size:
            self._making.add(asyncio.get_running_loop().create_task(self._make()))

    async def _make(self) -> None:
        task = asyncio.current_task()
        assert task is not None
        try:
            self._ready.append(await self._cold_start.start(None))
        except RlmBrokerError:
            pass  # whoever asks next finds none, makes one, and hears what is wrong
        finally:
            self._making.discard(task)  # in the same step, or it would be counted twice

    async def _give_up(self, worker: Worker, connection: Connection) -> None:
        await connection.close()
        await self.end(worker)

    def _as_value(self, context: StoredContext | None) -> Provisions | None:
        """What gives a small context to a REPL that is ready; None for one that has to be loaded."""
        if context is None:
            return Provisions()
        if not self._ready or context.info.form.size_bytes > SMALL_BYTES:
            return None
        value = context.value()
        try:
            return Provisions.of({"context": value}, self.limits.max_frame_bytes, are_json=True)
        except FrameTooLarge:
            return None
