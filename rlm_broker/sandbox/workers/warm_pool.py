"""Workers that are started ahead, with all layers applied. Each is used once."""

import asyncio
import logging
from collections import deque

from rlm_broker.context.stored import StoredContext
from rlm_broker.errors import RlmBrokerError, ValueTooLarge, shortage_told
from rlm_broker.limits import ReplLimits
from rlm_broker.sandbox.workers.source import ColdStart, StartedWorker
from rlm_broker.transport.provisions import Provisions
from sandbox_worker.loading.context import ContextBroken

REFILL_AFTER_S = 0.002
"""Seconds until the pool is refilled, so that the caller that has just taken a worker runs first."""
SMALL_BYTES = 1 << 16
"""Bytes of a context that is given to a ready REPL as a value, in less time than a fork takes. For a larger context the
pool gives no worker."""


_log = logging.getLogger("rlm_broker")


class WarmPool:
    """Keeps `size` workers ready, and starts a new one in the background when one is taken.

    A ready worker gets a small context as a value. A large one is mapped by init when it is forked, so that a ready
    worker is of no use for it.

    Args:
        cold_start: Starts the workers.
        limits: Limits of the workers. A REPL with other bounds gets none of them.
        size: Number of workers. None keeps one ready, from the second REPL on: a caller that wants one REPL should not
            pay for two.

    Attributes:
        ready: Workers that wait to be taken.
    """

    def __init__(self, cold_start: ColdStart, limits: ReplLimits, size: int | None) -> None:
        self.ready: deque[StartedWorker] = deque()
        self._cold_start = cold_start
        self._limits = limits
        self._bounds = limits.repl_bounds()
        self._size = size
        self._asked = 0
        self._making: set[asyncio.Task[None]] = set()
        self._closed = False
        self._has_failed = False

    async def take(self, context: StoredContext | None, limits: ReplLimits) -> StartedWorker | None:
        """Return a ready worker if there is one that suits, see `WorkerSource`."""
        if limits is not self._limits and not self._suits(limits):
            return None
        self._asked += 1
        value = self._as_value(context)
        taken = None if value is None else await self._take_ready()
        asyncio.get_running_loop().call_later(REFILL_AFTER_S, self._refill)
        if taken is not None and value is not None:
            taken.limits = limits
            taken.provide_context(value)
        return taken

    def fill(self) -> None:
        """Begin to start workers, if the pool has a fixed size."""
        if self._size is not None:
            self._refill()

    async def close(self) -> None:
        """End the workers that were not taken. Has no effect when repeated."""
        self._closed = True
        for task in self._making:
            task.cancel()
        await asyncio.gather(*self._making, return_exceptions=True)
        while self.ready:
            await _give_up(self.ready.pop())

    def _suits(self, limits: ReplLimits) -> bool:
        """Return whether a ready worker has the bounds that these limits set for it and for its connection."""
        return (
            limits.repl_bounds() == self._bounds and limits.max_queries_in_flight == self._limits.max_queries_in_flight
        )

    async def _take_ready(self) -> StartedWorker | None:
        while self.ready:
            started = self.ready.popleft()
            worker = started.worker
            if started.connection.is_open and worker.died is None and not worker.gone.is_set():
                return started
            await _give_up(started)  # its fork server died since
        return None

    def _refill(self) -> None:
        size = self._size if self._size is not None else min(1, self._asked - 1)
        while not self._closed and len(self.ready) + len(self._making) < size:
            self._making.add(asyncio.get_running_loop().create_task(self._make()))

    async def _make(self) -> None:
        task = asyncio.current_task()
        assert task is not None
        try:
            with shortage_told("too few of the machine's resources"):
                self.ready.append(await self._cold_start.take(None, self._limits))
            self._has_failed = False
        except RlmBrokerError as error:  # the next caller finds no worker, starts one itself, and gets the error
            if not self._has_failed and not self._closed:
                self._has_failed = True
                _log.warning("no REPL can be started ahead; not logged again until one can: %s", error)
        finally:
            self._making.discard(task)  # in the same step as `append`, or `_refill` would count the worker twice

    def _as_value(self, context: StoredContext | None) -> Provisions | None:
        """Return the provisions that give a small context to a ready REPL; None for one that init has to load."""
        if context is None:
            return Provisions()
        if not self.ready or context.size_bytes > SMALL_BYTES:
            return None
        try:
            value = context.value()
        except ContextBroken:  # a parent run's code has made it; the worker that loads it gives the reason
            return None
        try:
            are_json = all(piece.form.kind != "value" for _, piece in context.pieces())
            return Provisions.of({"context": value}, self._limits.max_frame_bytes, are_json=are_json)
        except ValueTooLarge:
            return None


async def _give_up(started: StartedWorker) -> None:
    await started.connection.close()
    await started.end()
