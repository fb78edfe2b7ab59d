"""Where a REPL's worker comes from: forked, behind its layers, with its context, on a connection of its own."""

import asyncio
import contextlib
import socket
from typing import Protocol

from rlm_broker.context.store import StoredContext
from rlm_broker.errors import SandboxFailed, WorkerDied
from rlm_broker.limits import Limits
from rlm_broker.sandbox.workers.fork_server import TRIES, ForkServer
from rlm_broker.sandbox.workers.worker import Worker
from rlm_broker.transport.connection import Connection
from rlm_broker.transport.dialing import dial
from rlm_broker.transport.listener import Listener
from rlm_broker.transport.session import Session

StartedWorker = tuple[Worker, Connection]


class WorkerSource(Protocol):
    """Whoever has workers: made now, or ahead."""

    fork_server: ForkServer
    limits: Limits

    async def start(self, context: StoredContext | None) -> StartedWorker:
        """A worker whose REPL is ready; whoever gets it ends it.

        Args:
            context: None is what its fork server has.
        """
        ...

    async def restart(self, worker: Worker) -> Connection:
        """A fresh REPL in a worker whose last one has ended, with the same context."""
        ...

    async def end(self, worker: Worker) -> None:
        """Kill a worker; return when it is gone."""
        ...


class ColdStart:
    """Makes each worker when it is asked for."""

    def __init__(self, fork_server: ForkServer, listener: Listener, limits: Limits) -> None:
        self.fork_server = fork_server
        self.limits = limits
        self._listener = listener

    async def start(self, context: StoredContext | None) -> StartedWorker:
        """See `WorkerSource`. A worker that dies before its REPL is ready has run no code: another takes its place."""
        tries = TRIES
        while True:
            try:
                return await self._start(context)
            except WorkerDied:
                if not (tries := tries - 1):
                    raise

    async def _start(self, context: StoredContext | None) -> StartedWorker:
        """Nothing waits for what it does not need: a connection is opened while init is forked."""
        opening = asyncio.get_running_loop().create_task(self._connect(after_others=True))
        worker: Worker | None = None
        try:
            worker = await self.fork_server.spawn(self.limits)
            connection, connected = await opening
            with connected:
                timeout_s = self.limits.start_timeout_s
                loads = None if context is None else (context.fd, context.info.form)
                await worker.launch(loads, connected.fileno(), timeout_s)
            await self._ready(connection)
        except BaseException:
            opening.cancel()
            with contextlib.suppress(asyncio.CancelledError, SandboxFailed):
                connection, connected = await opening
                connected.close()
                await connection.close()
            if worker is not None:
                await self.fork_server.end(worker)
            raise
        return worker, connection

    async def restart(self, worker: Worker) -> Connection:
        """See `WorkerSource`. On a fresh connection: the last REPL may have stopped inside a frame."""
        connection, connected = await self._connect()
        with connected:
            await worker.start(connected.fileno(), self.limits.start_timeout_s)
        await self._ready(connection)
        return connection

    async def end(self, worker: Worker) -> None:
        """See `WorkerSource`."""
        await self.fork_server.end(worker)

    async def _connect(self, after_others: bool = False) -> tuple[Connection, socket.socket]:
        if after_others:  # such as the request to the fork server, which has the longer way to go
            await asyncio.sleep(0)
        timeout_s = self.limits.start_timeout_s
        session = Session(self.limits.max_frame_bytes)
        connection = Connection(session, self.limits.max_queries_in_flight)
        address = self._listener.address
        if address is None:
            raise SandboxFailed("the port that REPLs connect to is closed")
        return connection, await dial(address, self._listener.expect(connection, timeout_s), timeout_s)

    async def _ready(self, connection: Connection) -> None:
        timeout_s = self.limits.start_timeout_s
        try:
            async with asyncio.timeout(timeout_s):
                await connection.ready()
        except TimeoutError:
            raise SandboxFailed(f"a REPL was not ready within start_timeout_s = {timeout_s:g} s") from None
