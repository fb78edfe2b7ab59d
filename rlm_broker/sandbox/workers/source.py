"""Sources of workers, asked in order; the last one starts a worker."""

import asyncio
import contextlib
import logging
import mmap
import socket
import weakref
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable
from fcntl import F_ADD_SEALS, F_SEAL_GROW, F_SEAL_SEAL, F_SEAL_SHRINK, fcntl
from functools import partial
from io import FileIO
from typing import Protocol

from rlm_broker.broker.transport.connection import Connection
from rlm_broker.broker.transport.listener import Listener, dial
from rlm_broker.broker.transport.provisions import Provisions
from rlm_broker.broker.transport.session import Session
from rlm_broker.concurrency.deadline import to_its_end
from rlm_broker.concurrency.forks import socketpair_of_parent
from rlm_broker.context.memfd import new_memfd
from rlm_broker.context.stored_context import StoredContext
from rlm_broker.errors import ForkRefused, RlmBrokerError, SandboxFailed, ValueTooLarge, WorkerDied, shortage_told
from rlm_broker.limits import ReplLimits
from rlm_broker.sandbox.workers.fork_server import TRIES, Forker
from rlm_broker.sandbox.workers.held_process import ForkInit, WorkerSocket
from rlm_broker.sandbox.workers.worker import NOT_FORKED, Worker
from sandbox_worker.loading.context import ContextBroken

_NO_REPL = "a REPL cannot be started"
RESUMES_S = 10.0
"""Most seconds until a checkpoint says ready. Model code may have spoiled it; a fresh REPL is started then."""


class WorkerSource(Protocol):
    """A store of workers for some contexts."""

    async def take(self, context: StoredContext | None, limits: ReplLimits) -> "StartedWorker | None":
        """Return a worker, which the caller ends; or None, after which the next source is asked. The context is the
        value of the REPL's variable; None stands for the fork server's, if it has one."""
        ...

    async def close(self) -> None:
        """End all workers that were not taken. The taker of one ends it."""
        ...


class StartedWorker:
    """A worker whose REPL is ready, with the means to restart and end it.

    Attributes:
        connection: Connection of its first REPL.
        limits: Limits of each of its REPLs. Its taker may change those that init does not enforce.
        on_end: Called once, when the worker has ended. Its source may set it.
        context: Small context that each of its REPLs is given as a value, since init does not have it; else None.
        relatives: This worker and its forks, as far as they have not ended; empty if it was never forked, or is none.
            They share one init.
    """

    def __init__(self, worker: Worker, connection: Connection, limits: ReplLimits, cold_start: "ColdStart") -> None:
        self.worker = worker
        self.connection = connection
        self.limits = limits
        self.on_end: Callable[[], None] | None = None
        self.relatives: set[StartedWorker] = set()
        self._first: StartedWorker | None = None
        self._cold_start = cold_start
        self.context: Provisions | None = None

    async def restart(self) -> Connection:
        """Start a fresh REPL with the same context, in place of one that has ended, and return its connection."""
        with shortage_told(_NO_REPL):
            async with self._cold_start.connecting(self.limits) as (connection, fd):
                await self.worker.start(fd, self.limits.start_timeout_s)
        return connection

    async def resume(self, checkpoint: int, block: int) -> Connection:
        """Have the checkpoint of that number go on as the REPL, and return its connection. `block` is the number of the
        last block, after which it counts on. Raise SandboxFailed if it is not there, or does not go on."""
        limits = self.limits.replace(start_timeout_s=min(self.limits.start_timeout_s, RESUMES_S))
        with shortage_told(_NO_REPL):
            async with self._cold_start.connecting(limits, block) as (connection, fd):
                await self.worker.resume(checkpoint, fd)
        return connection

    @property
    def is_shared(self) -> bool:
        """Whether other REPLs live in the worker, or its first one did: no fresh REPL may be started there."""
        return self._first is not None or len(self.relatives) > 1

    @property
    def with_files(self) -> Worker:
        """The worker with the scratch folder and the programs, which a REPL shares with its forks."""
        return (self._first or self).worker

    async def fork(self, block: int, becomes_hub: Callable[[], Awaitable[None]] | None) -> "StartedWorker":
        """Return a fork of the REPL. The caller ends it.

        Args:
            block: Number of the last block, after which the fork counts on.
            becomes_hub: Runs the block with which the REPL becomes a hub; None if it has become one.

        Raises:
            ForkRefused: The REPL cannot be forked, or not now.
            SandboxFailed: The REPL has ended.
        """
        level, init = self._cold_start.fork_server.level, self.worker.init
        if not level.has_pid_namespace:
            raise ForkRefused(f"{NOT_FORKED}: that needs isolation level 'strict', and it has {level.name!r}")
        if not isinstance(init, WorkerSocket):
            raise ForkRefused(f"{NOT_FORKED}: it is on a node")
        if self.worker.group is not None:
            raise ForkRefused(f"{NOT_FORKED}: a control group limits its memory (exact_memory)")
        with shortage_told(f"{NOT_FORKED}: the machine is short of something"):
            control, theirs = socketpair_of_parent()
            worker = Worker(level, ForkInit(control, init))
            worker.layers = self.worker.layers
            try:
                async with self._cold_start.connecting(self.limits, block) as (connection, fd):
                    with theirs, _new_bell() as bell:
                        fds = theirs.fileno(), fd, bell.fileno()
                        await self.worker.prepare_fork(becomes_hub is not None, *fds)
                    if becomes_hub is not None:
                        await becomes_hub()
                    await worker.forked(self.limits.start_timeout_s)
            except BaseException:
                theirs.close()
                await to_its_end(worker.kill)
                raise
        fork = StartedWorker(worker, connection, self.limits, self._cold_start)
        fork._first, fork.relatives = self._first or self, self.relatives
        self.relatives.update((self, fork))
        return fork

    async def end(self) -> None:
        """Kill the worker, and return when it is gone. The last one of relatives ends their init. Has no effect when
        repeated."""
        self.relatives.discard(self)
        if self._first is not None:
            await self.worker.kill()
        elif self.relatives and not self.worker.gone.is_set():
            with contextlib.suppress(SandboxFailed):
                await self.worker.stop()
        if not self.relatives:
            first = self._first or self
            try:
                await self._cold_start.fork_server.end(first.worker)
            finally:
                on_end, first.on_end = first.on_end, None
                if on_end is not None:
                    on_end()


class ColdStart:
    """Starts each worker when it is asked for one: forks it, has it apply its layers, load its context and connect."""

    def __init__(self, fork_server: Forker, listener: Listener) -> None:
        self.fork_server = fork_server
        self._listener = listener

    async def take(self, context: StoredContext | None, limits: ReplLimits) -> StartedWorker:
        """Return a new worker, see `WorkerSource`. A worker that dies before its REPL is ready is replaced silently.

        It has run no model code by then. The connection is opened while init is forked, since neither needs the other.
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

    @contextlib.asynccontextmanager
    async def connecting(self, limits: ReplLimits, block: int = 0) -> AsyncIterator[tuple[Connection, int]]:
        """Yield a fresh connection, and the descriptor of its other end for a REPL: the last REPL may have ended inside
        a frame. Then wait until the REPL is ready. If either fails, close the connection.

        Args:
            block: Number of the last block of the REPL.
        """
        connection, connected = await self._connect(limits, block=block)
        try:
            with connected:
                yield connection, connected.fileno()
            await self._ready(connection, limits)
        except BaseException:
            await to_its_end(connection.close)
            raise

    async def _connect(
        self, limits: ReplLimits, after_others: bool = False, block: int = 0
    ) -> tuple[Connection, socket.socket]:
        if after_others:  # the request to the fork server is sent first, since its answer takes longer
            await asyncio.sleep(0)
        timeout_s = limits.start_timeout_s
        session = Session(limits.max_frame_bytes, block)
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
        """End all parts of an unfinished worker."""
        opening.cancel()
        with contextlib.suppress(asyncio.CancelledError, SandboxFailed, OSError):
            connection, connected = await opening
            connected.close()
            await connection.close()
        if worker is not None:
            await self.fork_server.end(worker)


def _new_bell() -> FileIO:
    """Return a file for the bell of a fork: one page, which no process can make larger."""
    bell = FileIO(new_memfd("bell"), "r+")
    bell.truncate(mmap.PAGESIZE)
    fcntl(bell.fileno(), F_ADD_SEALS, F_SEAL_GROW | F_SEAL_SHRINK | F_SEAL_SEAL)
    return bell


class Closing(Protocol):
    """A thing to close, any number of times."""

    def close(self) -> None:
        """Let go of what it has."""


class Workers:
    """Starts workers: asks each source in turn, and has `cold_start` make a new worker if none has one.

    Attributes:
        fork_server: Fork server of new workers. The sources' servers have the same level and layers.
        limits: Limits of each REPL without its own.
        sources: Sources, in their order.
    """

    def __init__(self, cold_start: ColdStart, limits: ReplLimits, sources: tuple[WorkerSource, ...] = ()) -> None:
        self.fork_server = cold_start.fork_server
        self.limits = limits
        self.sources = sources
        self._cold_start = cold_start
        self._contexts = weakref.WeakSet[Closing]()

    def hold(self, context: Closing) -> None:
        """Close the context of a REPL with the sources, unless the REPL is closed before."""
        self._contexts.add(context)

    async def start(self, context: StoredContext | None, limits: ReplLimits) -> StartedWorker:
        """Return a worker, which the caller ends, see `WorkerSource`."""
        with shortage_told(_NO_REPL):
            for source in self.sources:
                if (taken := await source.take(context, limits)) is not None:
                    return taken
            return await self._cold_start.take(context, limits)

    async def close(self) -> None:
        """Close the sources, and the contexts of REPLs that are open. Has no effect when repeated."""
        for source in self.sources:
            await source.close()
        for context in list(self._contexts):
            context.close()


REFILL_AFTER_S = 0.002
"""Seconds until the pool is refilled, so that the caller that has just taken a worker runs first."""
SMALL_BYTES = 1 << 16
"""Bytes of a context given to a ready REPL as a value, in less time than a fork takes. For a larger context the
pool gives no worker."""


_log = logging.getLogger("rlm_broker")


class WarmPool:
    """Keeps `size` workers ready, and starts a new one in the background when one is taken.

    A ready worker gets a small context as a value. A large one is mapped by init when it is forked, so that a ready
    worker is of no use for it. A REPL with other bounds than those of `limits` gets no ready worker.

    Args:
        size: Number of workers. None keeps one ready, from the second REPL on: one REPL should not cost as much as two.

    Attributes:
        ready: Workers waiting to be taken.
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
        if taken is not None:
            taken.limits, taken.context = limits, value
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
        """Return whether a ready worker and its connection have the bounds of these limits."""
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
        """Return a small context as provisions for a ready REPL; None for one that init has to load."""
        if context is None:
            return Provisions()
        if not self.ready or context.size_bytes > SMALL_BYTES:
            return None
        try:
            value = context.value()
        except ContextBroken:  # made by code of a parent run; the worker gives the reason
            return None
        try:
            are_json = all(piece.form.kind != "value" for _, piece in context.pieces())
            return Provisions.of({"context": value}, self._limits.max_frame_bytes, are_json=are_json)
        except ValueTooLarge:
            return None


async def _give_up(started: StartedWorker) -> None:
    await started.connection.close()
    await started.end()
