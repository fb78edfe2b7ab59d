"""The worker of one REPL: taken when the REPL opens, restarted after a kill, replaced when lost, ended with it."""

import asyncio
import contextlib

from rlm_broker.concurrency.deadline import to_its_end
from rlm_broker.context.stored import StoredContext
from rlm_broker.errors import ReplClosed, SandboxFailed, WorkerDied
from rlm_broker.limits import ReplLimits
from rlm_broker.sandbox.repl_context import ReplContext
from rlm_broker.sandbox.workers.source import StartedWorker, Workers
from rlm_broker.sandbox.workers.worker import Worker
from rlm_broker.transport.connection import Connection
from rlm_broker.transport.provisions import Provisions
from sandbox_worker.wire.bounds import SCRATCH_LIMITS
from sandbox_worker.wire.control import Exceeded, LastSeen


class ReplWorker:
    """Holds the worker of one REPL, and the connection of the REPL that runs in it.

    Args:
        workers: Give a worker, and another one if that is lost.
        context: See `ReplContext`.
        provisions: What each REPL gets with its first block.

    Attributes:
        started: The worker, or None.
        connection: Of the REPL that lives, or None.
        is_open, is_closed: Whether it was opened; and closed.
    """

    def __init__(self, workers: Workers, context: object, limits: ReplLimits, provisions: Provisions) -> None:
        self.started: StartedWorker | None = None
        self.connection: Connection | None = None
        self.is_open = False
        self.is_closed = False
        self._workers = workers
        self._context = ReplContext(context, limits.later_context_bytes)
        self._limits = limits
        self._provisions = provisions
        self._restarts = 0
        self._adding = asyncio.Lock()

    @property
    def worker(self) -> Worker:
        """The worker that there is. Raises: ReplClosed."""
        if self.started is None:
            raise ReplClosed("this REPL was closed")
        return self.started.worker

    def require_open(self) -> None:
        """Raises: ReplClosed, SandboxFailed."""
        if self.is_closed:
            raise ReplClosed("this REPL was closed")
        if not self.is_open:  # what ends its processes is the end of `with`
            raise SandboxFailed("the REPL is not open: use it as `with sandbox.repl() as repl:`")

    async def open(self) -> None:
        """Get the first worker. Harmless when repeated."""
        if self.is_closed:
            raise ReplClosed("this REPL was closed: make another")
        if self.is_open:
            return
        self.is_open = True
        try:
            await self._use(await self._workers.start(await self._context.stored(), self._limits))
        except BaseException:
            await self.close()
            raise

    async def close(self) -> None:
        """End the worker and all that it started. Harmless when repeated."""
        self.is_closed = True
        if self.connection is not None:
            await self.connection.close()
        await self._end()
        self._context.close()

    async def require_repl(self) -> Connection:
        """Return the connection of a REPL that lives: if need be, of a fresh one.

        Raises:
            ReplClosed: It was closed, or has been restarted too often.
            SandboxFailed: It is not open, or no REPL can be started.
        """
        self.require_open()
        if self._is_lost_unused():
            await self.end_repl()
            await self._end()  # it may be its REPL alone that died
        elif self.connection is None:
            if self._restarts >= self._limits.max_repl_restarts:
                raise ReplClosed(f"this REPL was killed more often than max_repl_restarts = {self._restarts} allows")
            self._restarts += 1
            if self.started is not None:
                try:
                    await self._connected(await self.started.restart())
                except WorkerDied:  # its init was ended from outside since the last block, or with the zygote
                    await self._end()
        if self.started is None:
            await self._use(await self._workers.start(await self._context.stored(), self._limits))
        assert self.connection is not None
        return self.connection

    async def end_repl(self, explain: bool = False) -> LastSeen | None:
        """Kill the REPL, and end the queries that it has open. Its worker stays, with the context in place.

        Returns:
            What the REPL was doing, if `explain` asks for it and it could be seen.
        """
        connection, self.connection = self.connection, None
        worker = self.worker
        exceeded = worker.died if isinstance(worker.died, Exceeded) else None
        seen = exceeded.post_mortem if exceeded else None
        if not worker.gone.is_set():
            with contextlib.suppress(SandboxFailed):  # then its init was killed, and the REPL with it
                seen = await worker.stop(explain and seen is None) or seen
        # A scratch folder that is too full would end the next REPL, too: that one gets another worker.
        if worker.gone.is_set() or (exceeded is not None and exceeded.limit in SCRATCH_LIMITS):
            await self._end()
        if connection is not None:
            await connection.close()
        return seen

    async def add_context(self, given: object) -> str:
        """Give the REPL one more context; return its name. A REPL that takes the place of this one gets it, too.

        Raises:
            ReplClosed: The REPL was closed.
            SandboxFailed: It is not open.
            ConfigurationError: There is no room for the context.
            ContextRefused: It cannot be read.
        """
        self.require_open()
        async with self._adding:
            name = await self._context.add(given)
            pieces = self._context.later[name].pieces()
            more = Provisions.of_context(name, [piece for _, piece in pieces], self._limits.max_frame_bytes)
            try:
                if self.connection is not None and self.started is not None:
                    with contextlib.suppress(WorkerDied):  # the next one gets it
                        await self.started.worker.hand(pieces)
            except BaseException:
                self._context.drop(name)
                raise
            self._provisions.add(more)
            if self.connection is not None:
                self.connection.provide(more)
        return name

    def context_named(self, name: str) -> StoredContext | None:
        """Return the context that code has as the variable `name`, or None."""
        return self._context.named(name)

    def renew(self) -> None:
        """Count restarts from 0 again."""
        self._restarts = 0

    async def _use(self, started: StartedWorker) -> None:
        """Go on with a worker. If the REPL was closed while the worker was started, end the worker.

        Raises:
            ReplClosed: It was closed.
        """
        if self.is_closed:
            await started.connection.close()
            await to_its_end(started.end)
            raise ReplClosed("this REPL was closed")
        self.started = started
        await self._connected(started.connection)

    async def _connected(self, connection: Connection) -> None:
        """Go on with a fresh REPL, which gets all that was provided so far with its first block.

        Raises:
            WorkerDied: It died meanwhile.
        """
        async with self._adding:  # or a context that is added just now would be handed twice
            try:
                for stored in self._context.later.values():
                    await self.worker.hand(stored.pieces())
            except BaseException:  # no block is to run without what it was to find
                await to_its_end(connection.close)
                raise
            self.connection = connection
            connection.provide(self._provisions)

    async def _end(self) -> None:
        """End the worker, if there is one. It is kept until it has ended, since this may be cancelled."""
        started = self.started
        if started is not None:
            await started.end()
            if self.started is started:
                self.started = None

    def _is_lost_unused(self) -> bool:
        """Return whether its processes died before any block ran: there are no variables that code could miss."""
        if self.started is None or self.connection is None or self.connection.block:
            return False
        worker = self.started.worker
        return worker.gone.is_set() or worker.died is not None or not self.connection.is_open
