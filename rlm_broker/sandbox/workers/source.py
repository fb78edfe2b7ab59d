"""Where a REPL's worker comes from: sources that are asked in order, and the one that makes a worker at once."""

import asyncio
import contextlib
import socket
from collections.abc import Callable
from functools import partial
from typing import Protocol

from rlm_broker.concurrency.deadline import to_its_end
from rlm_broker.context.stored import StoredContext
from rlm_broker.errors import SandboxFailed, WorkerDied
from rlm_broker.limits import ReplLimits
from rlm_broker.sandbox.workers.fork_server import TRIES, ForkServer
from rlm_broker.sandbox.workers.worker import Worker
from rlm_broker.transport.connection import Connection
from rlm_broker.transport.dialing import dial
from rlm_broker.transport.listener import Listener
from rlm_broker.transport.provisions import Provisions
from rlm_broker.transport.session import Session


class WorkerSource(Protocol):
    """Has workers for some contexts."""

    async def take(self, context: StoredContext | None, limits: ReplLimits) -> "StartedWorker | None":
        """Return a worker for the caller to end, or None: then the next source is asked.

        Args:
            context: What the REPL's variable holds; None is what the fork server has.
            limits: Of the REPL.
        """
        ...

    async def close(self) -> None:
        """End all that it keeps. Workers that were taken are ended by their takers."""
        ...


class StartedWorker:
    """A worker whose REPL is ready, and how to restart and end it.

    Attributes:
        connection: Of its first REPL.
        limits: Of each of its REPLs. The taker may change those that the worker itself is not bounded by.
        on_end: Called once, when the worker has been ended; set by the source that wants to know.
    """

    def __init__(self, worker: Worker, connection: Connection, limits: ReplLimits, cold_start: "ColdStart") -> None:
        self.worker = worker
        self.connection = connection
        self.limits = limits
        self.on_end: Callable[[], None] | None = None
        self._cold_start = cold_start
        self._context: Provisions | None = None

    def provide_context(self, context: Provisions) -> None:
        """Give the REPL its context as a value. A REPL that is started again gets it again: it has none in place."""
        self._context = context
        self.connection.provide(context)

    async def restart(self) -> Connection:
        """Start a fresh REPL, with the same context, in place of one that has ended; return its connection."""
        connection = await self._cold_start.restart(self.worker, self.limits)
        if self._context is not None:
            connection.provide(self._context)
        return connection

    async def end(self) -> None:
        """Kill the worker; return when it is gone. Harmless when repeated."""
        try:
            await self._cold_start.fork_server.end(self.worker)
        finally:
            on_end, self.on_end = self.on_end, None
            if on_end is not None:
                on_end()


class ColdStart:
    """Makes each worker when it is asked for: forked, behind its layers, with its context, on its own connection."""

    def __init__(self, fork_server: ForkServer, listener: Listener) -> None:
        self.fork_server = fork_server
        self._listener = listener

    async def take(self, context: StoredContext | None, limits: ReplLimits) -> StartedWorker:
        """See `WorkerSource`; there always is one. A worker that dies before its REPL is ready is replaced unseen.

        The worker has run no code by then. The connection is opened while init is forked: neither needs the other.
        """
        tries = TRIES
        while True:
            opening = asyncio.get_running_loop().create_task(self._connect(limits, after_others=True))
            worker: Worker | None = None
            try:
                worker = await self.fork_server.spawn(limits)
                connection, connected = await opening
                with connected:
                    pieces = None if context is None else context.pieces()
                    await worker.launch(pieces, connected.fileno(), limits.start_timeout_s)
                await self._ready(connection, limits)
                return StartedWorker(worker, connection, limits, self)
            except BaseException as error:
                await to_its_end(partial(self._undo, opening, worker))
                tries -= 1
                if not isinstance(error, WorkerDied) or not tries:
                    raise

    async def restart(self, worker: Worker, limits: ReplLimits) -> Connection:
        """Start a fresh REPL in a worker, on a fresh connection: the last REPL may have stopped inside a frame."""
        connection, connected = await self._connect(limits)
        with connected:
            await worker.start(connected.fileno(), limits.start_timeout_s)
        await self._ready(connection, limits)
        return connection

    async def _connect(self, limits: ReplLimits, after_others: bool = False) -> tuple[Connection, socket.socket]:
        if after_others:  # such as the request to the fork server, which has the longer way to go
            await asyncio.sleep(0)
        timeout_s = limits.start_timeout_s
        session = Session(limits.max_frame_bytes)
        connection = Connection(session, limits.max_queries_in_flight)
        address = self._listener.address
        if address is None:
            raise SandboxFailed("the port that REPLs connect to is closed")
        return connection, await dial(address, self._listener.expect(connection, timeout_s), timeout_s)

    async def _ready(self, connection: Connection, limits: ReplLimits) -> None:
        timeout_s = limits.start_timeout_s
        try:
            async with asyncio.timeout(timeout_s):
                await connection.ready()
        except TimeoutError:
            raise SandboxFailed(f"a REPL was not ready within start_timeout_s = {timeout_s:g} s") from None

    async def _undo(self, opening: "asyncio.Task[tuple[Connection, socket.socket]]", worker: Worker | None) -> None:
        """End what there is of a worker that could not be started."""
        opening.cancel()
        with contextlib.suppress(asyncio.CancelledError, SandboxFailed):
            connection, connected = await opening
            connected.close()
            await connection.close()
        if worker is not None:
            await self.fork_server.end(worker)


class Workers:
    """Starts workers: asks each source in turn, and makes one where none has one.

    Attributes:
        fork_server: The one that new workers are forked from. Others have the same level and layers.
        limits: Of each REPL that is given none of its own.
        sources: In the order in which they are asked.
    """

    def __init__(self, cold_start: ColdStart, limits: ReplLimits, sources: tuple[WorkerSource, ...] = ()) -> None:
        self.fork_server = cold_start.fork_server
        self.limits = limits
        self.sources = sources
        self._cold_start = cold_start

    async def start(self, context: StoredContext | None, limits: ReplLimits) -> StartedWorker:
        """Return a worker for the caller to end.

        Args:
            context: What the REPL's variable holds; None is what the fork server has.
            limits: Of the REPL.
        """
        for source in self.sources:
            if (taken := await source.take(context, limits)) is not None:
                return taken
        return await self._cold_start.take(context, limits)

    async def close(self) -> None:
        """Close the sources. Harmless when repeated."""
        for source in self.sources:
            await source.close()
