"""The process of one REPL: its worker, and the contexts of each of its workers.

A worker is taken when the REPL opens, restarted after a kill, replaced when it is lost, and ended with the REPL. The
contexts are stored once, and kept as long as the REPL.
"""

import asyncio
import contextlib
from collections.abc import Awaitable, Callable, Iterable

from msgspec import Struct

from rlm_broker.broker.transport.connection import Connection
from rlm_broker.broker.transport.provisions import Provisions
from rlm_broker.broker.transport.session import Wanted
from rlm_broker.concurrency.deadline import to_its_end
from rlm_broker.concurrency.threads import in_thread
from rlm_broker.context.store import refuse_a_name, store, store_as_it_is
from rlm_broker.context.stored_context import StoredContext
from rlm_broker.errors import ConfigurationError, FileRefused, ReplClosed, SandboxFailed, WorkerDied
from rlm_broker.limits import ReplLimits
from rlm_broker.sandbox.blocks.checkpoints import Checkpoints
from rlm_broker.sandbox.blocks.record import Given, ReplRecord, ReplRecorder
from rlm_broker.sandbox.workers.source import StartedWorker, Workers
from rlm_broker.sandbox.workers.worker import Worker
from sandbox_worker.wire.bounds import SCRATCH_LIMITS
from sandbox_worker.wire.control import EndHub, Exceeded, LastSeen, ListedEntry
from sandbox_worker.wire.names import CONTEXT, numbered

SPOILED, LOST = "it could not go on", "its worker has ended"
"""Reasons why a REPL has no checkpoint, as clauses."""


class ReplWorker:
    """The worker of one REPL, and the connection of its REPL process.

    Args:
        workers: Source of the worker, and of another one after a loss.
        context: Contexts of the REPL.
        provisions: Tools, values and environment for the first block of each REPL process.
        recorder: Makes the record of what a fresh REPL process has to run again to have the variables of this one.

    Attributes:
        started: The worker; None before the REPL opens, and while there is none.
        connection: Connection of the live REPL process; None after it was killed, or the REPL was closed.
        is_open: Whether the REPL was opened. It stays so when it is closed.
        is_closed: Whether the REPL was closed, for good.
        busy: Held while a block runs.
        provisions: All that it was given.
        checkpoints: Account of the checkpoints of the REPL process.
        is_behind: Whether blocks that the live REPL process has not run are to run again before the next one.
        is_at_hub: Whether the REPL has become a hub, and no block has begun since.
        last_block: Number of the last block of the last REPL process.
    """

    def __init__(
        self,
        workers: Workers,
        context: "ReplContext",
        limits: ReplLimits,
        provisions: Provisions,
        recorder: ReplRecorder,
    ) -> None:
        self.started: StartedWorker | None = None
        self.connection: Connection | None = None
        self.is_open = self.is_closed = self.is_behind = self.is_at_hub = False
        self.busy = asyncio.Lock()
        self.checkpoints = Checkpoints(limits.checkpoint, limits.keep_checkpoints)
        self.provisions = provisions
        self.recorder = recorder
        self.last_block = 0
        self._workers = workers
        self._context = context
        self._limits = limits
        self._restarts = 0
        self._adding = asyncio.Lock()

    @property
    def worker(self) -> Worker:
        """The present worker. Raises ReplClosed if there is none, since the REPL was closed."""
        if self.started is None:
            raise ReplClosed("this REPL was closed")
        return self.started.worker

    def require_open(self) -> None:
        """Raise ReplClosed if the REPL was closed, SandboxFailed if it was never opened."""
        if self.is_closed:
            raise ReplClosed("this REPL was closed")
        if not self.is_open:  # only the end of its `with` block would end its processes
            raise SandboxFailed("the REPL is not open: use it as `with sandbox.repl() as repl:`")

    async def open(self) -> None:
        """Take the first worker. The caller closes the REPL if this fails."""
        if self.is_closed:
            raise ReplClosed("this REPL was closed: make another")
        self._workers.hold(self._context)
        await self._use(await self._workers.start(await self._context.stored(), self._limits))
        self.is_open = True

    async def close(self) -> None:
        """End the worker and all that it started. A REPL that was never open may be opened later."""
        self.is_closed = self.is_open
        connection, self.connection = self.connection, None
        if connection is not None:
            await connection.close()
        await self.end()
        if self.is_closed:
            self._context.close()
        else:
            self._context.free()

    @property
    def is_lost_unused(self) -> bool:
        """Whether the processes died before any block ran, so that no variables are lost with them."""
        if self.started is None or self.connection is None or self.connection.block:
            return False
        worker = self.started.worker
        return worker.gone.is_set() or worker.died is not None or not self.connection.is_open

    def count_restart(self) -> None:
        """Count a restart. Raise ReplClosed beyond their maximum."""
        if self._restarts >= self._limits.max_repl_restarts:
            raise ReplClosed(f"this REPL was killed more often than max_repl_restarts = {self._restarts} allows")
        self._restarts += 1

    def renew(self) -> None:
        """Count restarts from 0 again."""
        self._restarts = 0

    async def start_afresh(self, for_replay: bool = False) -> None:
        """Start a REPL process without variables, in place of one that has ended.

        Args:
            for_replay: Whether it is given what the first one had when it opened, in place of all that was given since.

        Raises:
            ReplClosed: The REPL was closed meanwhile.
            SandboxFailed: No process can be started.
        """
        if self.started is not None:
            try:
                await self._connected_afresh(await self.started.restart(), for_replay)
                return
            except WorkerDied:  # init was killed by another process since the last block, or ended with the zygote
                await self.end()
        await self._use(await self._workers.start(await self._context.stored(), self._limits), for_replay)

    async def files(self) -> list[ListedEntry] | None:
        """Return entries of the scratch folder; None if they are not known. Those of its folders are not among them."""
        try:
            return (await self.worker.list_folder([], b"")).entries
        except (SandboxFailed, FileRefused):
            return None

    async def give(self, given: Given) -> str | None:
        """Give a REPL in a replay what it was given before; return why that is impossible, as a clause."""
        if given.context is not None:
            stored = self._context.later.get(given.context)
            if stored is None:
                return f"{given.context} is not there"
            await self.worker.hand(stored.pieces())
        if self.connection is not None:
            self.connection.provide(Provisions.of_parts(given.tools, given.frames, given.again))
        return None

    def adopt(self, record: ReplRecord) -> None:
        """Take the entries of a record, and have their tools and values given to each fresh process from now on."""
        self.recorder.begin_with(record.entries)
        for each in record.entries:
            if isinstance(each, Given) and each.context is None:
                self.provisions.add(Provisions.of_parts(each.tools, each.frames, each.again))

    async def fork(self, becomes_hub: Callable[[], Awaitable[None]]) -> "ReplWorker":
        """Return a fork of the live REPL, which is open. No block runs meanwhile.

        Args:
            becomes_hub: Runs the block with which the REPL becomes a hub.

        Raises:
            ForkRefused: The REPL cannot be forked, or not now.
            ReplClosed, SandboxFailed: The REPL was closed, or has ended.
        """
        connection, started = self.connection, self.started
        assert connection is not None
        assert started is not None
        is_there, self.is_at_hub = self.is_at_hub, True
        block = connection.block + (not is_there)
        try:
            forked = await started.fork(block, None if is_there else becomes_hub)
        except BaseException:
            self.leave_hub()
            raise
        provisions, recorder = self.provisions.copy(), self.recorder.copy()
        fork = ReplWorker(self._workers, self._context.another(), self._limits, provisions, recorder)
        fork.started, fork.connection, fork.is_open = forked, forked.connection, True
        fork.checkpoints.blocks = self.checkpoints.blocks
        fork.checkpoints.given_up()
        forked.connection.on_answered = recorder.answered
        self._workers.hold(fork._context)
        return fork

    def leave_hub(self) -> None:
        """Let the hub end, since the REPL is not in its state any more."""
        if self.is_at_hub and self.started is not None:
            self.started.worker.init.say(EndHub())
        self.is_at_hub = False

    async def with_checkpoint(self, wanted: Wanted) -> Wanted:
        """Have a checkpoint prepared, and have the next block make it, if it can be. A REPL at its hub leaves that, and
        makes none."""
        checkpoints = self.checkpoints
        if self.is_at_hub:
            self.leave_hub()
            return wanted
        number = checkpoints.next_number()
        try:
            problem = await self.worker.prepare_checkpoint(number)
        except WorkerDied:  # the block finds that out, too
            return wanted
        if problem is not None:
            checkpoints.refused(problem)
            return wanted
        checkpoints.asked(number)
        return wanted._replace(checkpoint=self._limits.keep_checkpoints + 1)

    async def go_back(self, back: int) -> int:
        """Kill the REPL process, and go on from the checkpoint that lies so many checkpoints back. The caller holds
        `busy`, and the REPL lives.

        Returns:
            Number of blocks whose variables are lost.

        Raises:
            ConfigurationError: There are not so many checkpoints. The REPL is as it was.
            SandboxFailed: The checkpoint could not go on. The next block begins with what there is.
        """
        await self.worker.drain()  # init may not have told yet of the checkpoint of the last block
        self.checkpoints.require(back)
        blocks = self.checkpoints.blocks
        await self.end_repl()
        if not await self.roll_back(back):
            raise SandboxFailed(f"the REPL cannot go back to this checkpoint: {self.checkpoints.problem or LOST}")
        self.recorder.cut(self.checkpoints.blocks)
        self.is_behind = False
        return blocks - self.checkpoints.blocks

    async def roll_back(self, back: int = 1) -> bool:
        """Go on from the last checkpoint, or an earlier one, after `end_repl`. Return whether it could go on."""
        started, point = self.started, self.checkpoints.point(back)
        if started is None or point is None or started.worker.gone.is_set():
            return False
        try:
            connection = await started.resume(point.number, self.last_block)
            if self.is_closed:  # while it was resumed
                await connection.close()
                return False
            await self._connected(connection, point.provisions, point.contexts)
        except SandboxFailed:  # model code has spoiled it: a fresh REPL takes its place
            self.checkpoints.problem = SPOILED
            return False
        self.is_behind = True
        self.checkpoints.rolled_back(point)
        return True

    async def beside_blocks(self) -> Worker:
        """Return the worker, which has the files and runs programs, also while its REPL is dead or runs a block."""
        self.require_open()
        if self._has_lost_worker and not self.busy.locked():
            async with self.busy:
                if self._has_lost_worker:
                    self.count_restart()
                    await self.start_afresh()
                    self.is_behind = True
        if self.started is None:
            raise SandboxFailed("the REPL is being replaced: try again when its block has begun")
        return self.started.with_files

    @property
    def _has_lost_worker(self) -> bool:
        """Whether there is none, or it has ended since the REPL did."""
        return self.started is None or (self.connection is None and self.started.worker.gone.is_set())

    async def end_repl(self, explain: bool = False) -> LastSeen | None:
        """Kill the REPL process, and end its open queries. Its worker stays, with the context in place.

        If init is to `explain`, it looks at the REPL first. Its state is returned, if init could see it.
        """
        connection, self.connection, self.is_at_hub = self.connection, None, False
        if connection is not None:
            self.last_block = connection.block
        worker = self.worker
        exceeded = worker.died if isinstance(worker.died, Exceeded) else None
        seen = exceeded.post_mortem if exceeded else None
        if not worker.gone.is_set():
            with contextlib.suppress(SandboxFailed):  # init was killed meanwhile, and the REPL with it
                stopped = await worker.stop(explain and seen is None)
                self.checkpoints.spared(stopped.checkpoints)
                seen = stopped.post_mortem or seen
        # A full scratch folder would end the next REPL, too. So the next one gets another worker. It also does if forks
        # share the worker: a fresh REPL would not be kept apart from them.
        is_shared = self.started is not None and self.started.is_shared
        if worker.gone.is_set() or is_shared or (exceeded is not None and exceeded.limit in SCRATCH_LIMITS):
            await self.end()
        if connection is not None:
            await connection.close()
        return seen

    async def end(self) -> None:
        """End the worker, if there is one. `started` is kept until it has ended, since this may be cancelled."""
        started = self.started
        if started is not None:
            await started.end()
            if self.started is started:
                self.started = None

    async def add_context(self, given: object) -> str:
        """Give the REPL, and each process in its place, one more context; return its name.

        Raises:
            ConfigurationError: There is no room for the context.
            ContextRefused: The context cannot be read.
            ReplClosed, SandboxFailed: The REPL is not open.
        """
        self.require_open()
        async with self._adding:
            name = await self._context.add(given)
            pieces = self._context.later[name].pieces()
            more = Provisions.of_context(name, [piece for _, piece in pieces], self._limits.max_frame_bytes)
            try:
                if self.connection is not None and self.started is not None:
                    with contextlib.suppress(WorkerDied):  # the next process gets the context
                        await self.started.worker.hand(pieces)
            except BaseException:
                self._context.drop(name)
                raise
            self.provide(more, name)
        return name

    def provide(self, more: Provisions, context: str | None = None) -> None:
        """Give the REPL, and each process in its place, more tools and values, or the added context of this name."""
        self.provisions.add(more)
        self.leave_hub()
        self.checkpoints.provided(more, context)
        self.recorder.given(more, context)
        if self.connection is not None:
            self.connection.provide(more)

    def context_named(self, name: str) -> StoredContext | None:
        """Return the context in code's variable `name`, or None."""
        return self._context.named(name)

    async def _use(self, started: StartedWorker, for_replay: bool = False) -> None:
        """Go on with a worker. If the REPL was closed while the worker was started, end the worker, and raise
        ReplClosed."""
        if self.is_closed:
            await started.connection.close()
            await to_its_end(started.end)
            raise ReplClosed("this REPL was closed")
        self.started = started
        if not self._workers.fork_server.level.has_pid_namespace:
            self.checkpoints.cannot_be()
        started.worker.on_checkpointed = self.checkpoints.made
        if self.recorder.seed is None:
            self.recorder.seed = started.worker.seed
        await self._connected_afresh(started.connection, for_replay)

    async def _connected_afresh(self, connection: Connection, for_replay: bool) -> None:
        """Go on with a fresh REPL process, see `start_afresh`. Raise WorkerDied if it died meanwhile."""
        self.checkpoints.all_is_lost()
        if self.started is not None and self.started.context is not None:
            connection.provide(self.started.context)
        if for_replay:
            await self._connected(connection, self.recorder.opening(self._limits.max_frame_bytes), ())
        else:
            await self._connected(connection, self.provisions, self._context.later)

    async def _connected(self, connection: Connection, provisions: Provisions, contexts: Iterable[str]) -> None:
        """Go on with a REPL process, and give it these provisions and added contexts with its first block. Raise
        WorkerDied if it died meanwhile."""
        async with self._adding:  # or a context that is added now would be handed over twice
            try:
                for name in [*contexts]:
                    await self.worker.hand(self._context.later[name].pieces())
            except BaseException:  # a block must not run without the contexts it was promised
                await to_its_end(connection.close)
                raise
            self.connection = connection
            connection.on_answered = self.recorder.answered
            connection.provide(provisions)


class Inherited(Struct, frozen=True):
    """Stands for a context of the REPL's fork server, inherited by its workers. `stored` is the orchestrator's copy of
    it."""

    stored: StoredContext


SMALL_CHARS = 1 << 16
"""Characters of a text stored on the event loop, in less time than a thread takes to start. A thread stores a
longer one."""


MAX_LATER = 256
"""Memfds of later contexts of one REPL; more are refused. A fresh REPL gets all of them at once, and the kernel queues
278 small packets on a unix socket: each takes 768 of the 212,992 bytes of net.core.wmem_default."""


class ReplContext:
    """The contexts of one REPL, each stored once.

    Args:
        given: First context of the REPL, see `Sandbox.repl`; or `Inherited`. A name in place of its content, for
            example a file's, is refused.
        later_bytes: Bytes of all added contexts together.

    Attributes:
        later: Name of the variable → added context.
    """

    def __init__(self, given: object, later_bytes: int) -> None:
        refuse_a_name(given)
        self._given = given
        self._later_bytes = later_bytes
        self.later: dict[str, StoredContext] = {}
        self._own: StoredContext | None = None
        self._is_closed = False

    async def stored(self) -> StoredContext | None:
        """Return the context as a worker loads it; None if there is none, or the fork server has it.

        Raises:
            ReplClosed: The REPL was closed, maybe while a worker was restarted.
            ContextRefused: The context cannot be read.
        """
        if self._is_closed:
            raise ReplClosed("this REPL was closed")
        if self._given is None or isinstance(self._given, Inherited):
            return None
        if isinstance(self._given, StoredContext):  # its owner closes it; several REPLs may share it
            return self._given
        if self._own is None:
            if isinstance(self._given, str) and len(self._given) < SMALL_CHARS:
                self._own = store_as_it_is(self._given)
            else:
                self._own = await in_thread(lambda _: store_as_it_is(self._given), discard=StoredContext.close)
        return self._own

    def named(self, name: str) -> StoredContext | None:
        """Return the context in code's variable `name`, or None. The REPL closes it."""
        if name in self.later:
            return self.later[name]
        if self._is_closed or name not in (CONTEXT, numbered(CONTEXT, 0)):
            return None
        given = self._given.stored if isinstance(self._given, Inherited) else self._given
        return given if isinstance(given, StoredContext) else self._own

    async def add(self, given: object) -> str:
        """Store one more context for the open REPL, and return its name. Raise ConfigurationError if there is no room
        for it, and otherwise as `stored` does."""
        if isinstance(given, StoredContext):
            stored = given.another()
        else:
            stored = await in_thread(lambda _: store(given), discard=StoredContext.close)
        try:
            if self._is_closed:
                raise ReplClosed("this REPL was closed")
            self._require_room([piece.form.mapped_bytes for _, piece in stored.pieces()])
        except BaseException:
            stored.close()
            raise
        name = numbered(CONTEXT, len(self.later) + 1)
        self.later[name] = stored
        return name

    def another(self) -> "ReplContext":
        """Return the same contexts for a fork, with descriptors of their own."""
        made = ReplContext(self._given, self._later_bytes)
        made._own = None if self._own is None else self._own.another()
        made.later = {name: stored.another() for name, stored in self.later.items()}
        return made

    def drop(self, name: str) -> None:
        """Forget and close an added context."""
        self.later.pop(name).close()

    def _require_room(self, sizes_bytes: list[int]) -> None:
        has = [piece.form.mapped_bytes for stored in self.later.values() for _, piece in stored.pieces()]
        room_bytes = self._later_bytes - sum(has)
        if sum(sizes_bytes) > room_bytes:
            raise ConfigurationError(
                f"a further context has {sum(sizes_bytes):,} bytes, and there is room for {room_bytes:,}: raise "
                f"later_context_bytes = {self._later_bytes:,} in the limits of the REPL"
            )
        if len(has) + len(sizes_bytes) > MAX_LATER:
            raise ConfigurationError(f"a REPL is given {MAX_LATER} contexts at most while it lives: open another REPL")

    def free(self) -> None:
        """Free all contexts of this REPL, which may store its first one again."""
        own, self._own = self._own, None
        for stored in (own, *self.later.values()):
            if stored is not None:
                stored.close()
        self.later.clear()

    def close(self) -> None:
        """Free all contexts of this REPL, and store no more. Has no effect when repeated."""
        self._is_closed = True
        self.free()
