"""A sandboxed REPL: a worker, its connection, and the clock that ends a block in time."""

import asyncio
import contextlib
import time
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, Final

from rlm_broker.concurrency.deadline import to_its_end
from rlm_broker.concurrency.event_loop import AsyncResource, EventLoopRef
from rlm_broker.errors import ReplBusy, ReplClosed, SandboxFailed, WorkerDied, require_kind
from rlm_broker.limits import ReplLimits
from rlm_broker.plain import require_given, require_variables
from rlm_broker.results import Block, Isolation
from rlm_broker.sandbox import outcome, post_mortem
from rlm_broker.sandbox.arguments import require_answer, require_block, require_limits, seconds_or
from rlm_broker.sandbox.block_run import BlockRun
from rlm_broker.sandbox.environment import environment_of
from rlm_broker.sandbox.files import ReplFiles
from rlm_broker.sandbox.output import BlockOutput, OnOutput
from rlm_broker.sandbox.repl_context import ReplContext
from rlm_broker.sandbox.sent import values_of
from rlm_broker.sandbox.submit_fields import SubmitFields
from rlm_broker.sandbox.workers.source import StartedWorker, Workers
from rlm_broker.sandbox.workers.worker import Worker
from rlm_broker.transport.connection import Connection, QueryHandler, refuse
from rlm_broker.transport.provisions import Provisions
from rlm_broker.transport.session import NOTHING, Wanted
from sandbox_worker.wire.bounds import SCRATCH_LIMITS
from sandbox_worker.wire.control import Exceeded, LastSeen
from sandbox_worker.wire.errors import FrameTooLarge

BY_CALLER: Final = "was interrupted by its caller"


class SandboxedRepl(AsyncResource):
    """Runs blocks of untrusted code one after the other; variables persist from one to the next.

    Made by `Sandbox.repl` and `Template.repl`. Use it as a context manager: its processes are gone when it is left,
    however it is left.

    Args:
        event_loop: Where it lives.
        workers: Give it a worker, and another one if that is lost.
        context: See `Sandbox.repl`, as for those below. `INHERITED`: the one that the fork server has.

    Attributes:
        kills_when_cancelled: A block whose caller is cancelled is killed with its REPL, and not interrupted: set by an
            owner that then closes the REPL, and so need not wait for the block.

    Raises:
        ConfigurationError: One of them cannot be used.
    """

    kills_when_cancelled = False

    def __init__(
        self,
        event_loop: EventLoopRef,
        workers: Workers,
        context: object = None,
        answer: QueryHandler = refuse,
        *,
        tools: Sequence[str] = (),
        values: Mapping[str, Any] | None = None,
        limits: ReplLimits | None = None,
        env: Mapping[str, str] | None = None,
        seed: int | None = None,
    ) -> None:
        require_answer(answer)
        require_given(tools, values or {})
        require_limits(limits)
        self._limits = limits or workers.limits
        self._bounds = self._limits.repl_bounds()
        environment = environment_of(env, seed)
        self._provisions = Provisions.of(values or {}, self._limits.max_frame_bytes, tools or None, environment)
        self._event_loop = event_loop
        self._workers = workers
        self._context = ReplContext(context)
        self._answer = answer
        self._files = ReplFiles(self.bind_loop, self._worker_of_files, self._limits.scratch_bytes)
        self._started: StartedWorker | None = None
        self._connection: Connection | None = None
        self._restarts = 0
        self._opened = False
        self._closed = False
        self._busy = asyncio.Lock()
        self._run: BlockRun | None = None
        self._is_interrupted = False

    @property
    def isolation(self) -> Isolation:
        """What is enforced, as the worker reported it before any model code ran."""
        fork_server = self._workers.fork_server
        layers = self._started.worker.layers if self._started else ()
        return Isolation(fork_server.level.name, (*fork_server.layers, *layers))

    @property
    def files(self) -> ReplFiles:
        """The files in its scratch folder, which is the current folder of its code."""
        return self._files

    def execute(
        self,
        code: str,
        timeout_s: float | None = None,
        on_output: OnOutput | None = None,
        *,
        value: bool = False,
        wall_timeout_s: float | None = None,
        stdin: str | None = None,
        submit: bool | Mapping[str, Any] | None = None,
    ) -> Block:
        """Run one block. When the caller is interrupted (Ctrl+C) or cancelled, so is the block, and variables stay.

        Args:
            code: Python source, up to `Limits.max_frame_bytes`.
            timeout_s: Compute time in seconds; None takes `Limits.block_timeout_s`.
            on_output: Called with each piece of output as it comes.
            value: Whether `Block.value` is to be the value of the last statement, if that is an expression.
            wall_timeout_s: Seconds, waiting for replies included; None takes `Limits.block_wall_timeout_s`.
            stdin: What `input()` and `sys.stdin` give to the block; None, or at its end: `input()` raises EOFError.
            submit: True has the block end where it submits: by `SUBMIT`, `FINAL` or `FINAL_VAR`, past any `except
                Exception`. A dict from field to type (what pydantic can validate, or a JSON Schema) has it submit all
                of these fields, by `SUBMIT(field=value)`; code that gives others gets a TypeError there. They are
                `Block.final_value`. None lets it go on.

        Returns:
            The outcome. A block that raises, times out or is killed is a result with that `status`, not an exception.

        Raises:
            ConfigurationError: The code or `stdin` is no text, a time no positive number, or `submit` cannot be used.
            ReplBusy: The REPL runs another block.
            ReplClosed: The REPL was closed before, or has been restarted too often.
            SandboxFailed: The REPL is not open, or the sandbox itself broke.
        """
        wanted = Wanted(value, stdin=stdin)
        return self.bind_loop().run(self._execute(code, timeout_s, on_output, wall_timeout_s, wanted, submit))

    async def aexecute(
        self,
        code: str,
        timeout_s: float | None = None,
        on_output: OnOutput | None = None,
        *,
        value: bool = False,
        wall_timeout_s: float | None = None,
        stdin: str | None = None,
        submit: bool | Mapping[str, Any] | None = None,
    ) -> Block:
        """`execute`, awaited."""
        wanted = Wanted(value, stdin=stdin)
        return await self.bind_loop().arun(self._execute(code, timeout_s, on_output, wall_timeout_s, wanted, submit))

    def get(self, *names: str) -> Any:
        """Return values of variables: of one its value, of several a tuple. They are the code's own word.

        Raises:
            ConfigurationError: One is no name, or there is none.
            ValueUnavailable: There is no such variable, or its value does not cross.
            ReplClosed, SandboxFailed: As for `execute`.
        """
        return values_of(names, self.bind_loop().run(self._get(names)))

    async def aget(self, *names: str) -> Any:
        """`get`, awaited."""
        block = await self.bind_loop().arun(self._get(names))
        return await asyncio.to_thread(values_of, names, block)  # decoding may take long, or import a package

    def interrupt(self) -> None:
        """Interrupt the block that runs, from any thread, as a limit of time does: variables stay if it reacts.

        It does not wait for the end of the block, whose status is then "interrupted". Harmless when none runs.
        """
        self.bind_loop().call_soon(self._interrupt)

    async def ainterrupt(self) -> None:
        """`interrupt`, awaited."""
        await self.bind_loop().acall(self._interrupt)

    @property
    def is_closed(self) -> bool:
        """Whether the REPL was closed. Then no block runs any more."""
        return self._closed

    def provide(self, values: Mapping[str, Any], *, restore: bool = True) -> None:
        """Give code more values by name. They are there from the next block on, also after a kill.

        Args:
            restore: Whether each later block finds them again as they were given; else they are code's own variables.

        Raises:
            ConfigurationError: One of them does not cross: it would not arrive as it is. Or its name is that of a tool.
                Then none is given.
            ValueTooLarge: One of them is more than a message may hold. Then none is given.
            ReplClosed: The REPL was closed.
        """
        require_kind("restore", restore, bool)
        require_given(self._provisions.tools() or (), values)
        self._provide(Provisions.of(values, self._limits.max_frame_bytes, are_restored=restore))

    def set_tools(self, tools: Sequence[str]) -> None:
        """Have code find the functions of these names, and no others, from the next block on, as with `Sandbox.repl`.

        Raises:
            ConfigurationError: One cannot be a name, or is that of a value. Then nothing changes.
            ReplClosed: The REPL was closed.
        """
        require_given(tools, dict.fromkeys(self._provisions.names()))
        self._provide(Provisions.of({}, self._limits.max_frame_bytes, tools))

    def provide_known(self, values: Mapping[str, Any]) -> None:
        """Do as `provide` with names of our own and values that came out of JSON: checking large ones takes seconds."""
        self._provide(Provisions.of(values, self._limits.max_frame_bytes, are_json=True))

    def _provide(self, more: Provisions) -> None:
        if self._closed:
            raise ReplClosed("this REPL was closed")
        self._provisions.add(more)
        if self._connection is not None:
            self._connection.provide(more)

    def renew(self) -> None:
        """Count restarts from 0 again: another run begins, with as many fresh REPLs as the one before."""
        self._restarts = 0

    # -- its life ----------------------------------------------------------------------------------------------------

    async def _open(self) -> None:
        if self._closed:
            raise ReplClosed("this REPL was closed: make another")
        if self._opened:
            return
        self._opened = True
        try:
            await self._use(await self._workers.start(await self._context.stored(), self._limits))
        except BaseException:
            await self._close()
            raise

    async def _use(self, started: StartedWorker) -> None:
        """Go on with a worker. If the REPL was closed while the worker was started, end the worker.

        Raises:
            ReplClosed: It was closed.
        """
        if self._closed:
            await started.connection.close()
            await to_its_end(started.end)
            raise ReplClosed("this REPL was closed")
        self._started = started
        self._connected(started.connection)

    def _connected(self, connection: Connection) -> None:
        """Go on with a fresh REPL, which gets all that was provided so far with its first block."""
        self._connection = connection
        connection.provide(self._provisions)

    async def _close(self) -> None:
        self._closed = True
        if self._connection is not None:
            await self._connection.close()
        await self._end_worker()
        self._context.close()

    async def _end_worker(self) -> None:
        """End the worker, if there is one. It is kept until it has ended, since this may be cancelled."""
        started = self._started
        if started is not None:
            await started.end()
            if self._started is started:
                self._started = None

    async def _require_repl(self) -> Connection:
        if self._closed:
            raise ReplClosed("this REPL was closed")
        if not self._opened:  # what ends its processes is the end of `with`
            raise SandboxFailed("the REPL is not open: use it as `with sandbox.repl() as repl:`")
        if self._is_lost_unused():
            await self._end_repl()
            await self._end_worker()  # it may be its REPL alone that died
        elif self._connection is None:
            if self._restarts >= self._limits.max_repl_restarts:
                raise ReplClosed(f"this REPL was killed more often than max_repl_restarts = {self._restarts} allows")
            self._restarts += 1
            if self._started is not None:
                try:
                    self._connected(await self._started.restart())
                except WorkerDied:  # its init was ended from outside since the last block, or with the zygote
                    await self._end_worker()
        if self._started is None:
            await self._use(await self._workers.start(await self._context.stored(), self._limits))
        assert self._connection is not None
        return self._connection

    async def _worker_of_files(self) -> Worker:
        """Return the worker, which has the files also while its REPL is dead or runs a block."""
        if self._closed or not self._opened or (self._started is None and not self._busy.locked()):
            async with self._busy:
                await self._require_repl()
        if self._started is None:
            raise SandboxFailed("the REPL is being replaced: try again when its block has begun")
        return self._started.worker

    def _is_lost_unused(self) -> bool:
        """Return whether its processes died before any block ran: there are no variables that code could miss."""
        if self._started is None or self._connection is None or self._connection.block:
            return False
        worker = self._started.worker
        return worker.gone.is_set() or worker.died is not None or not self._connection.is_open

    # -- one block ---------------------------------------------------------------------------------------------------

    async def _get(self, names: tuple[str, ...]) -> Block:
        require_variables(names)
        return await self._execute("", wanted=Wanted(names=names))

    async def _execute(
        self,
        code: str,
        timeout_s: float | None = None,
        on_output: OnOutput | None = None,
        wall_timeout_s: float | None = None,
        wanted: Wanted = NOTHING,
        submit: object = None,
    ) -> Block:
        require_block(code, wanted.stdin)
        fields = SubmitFields.of(submit)
        wanted = wanted if fields is None else wanted._replace(submit=fields.names)
        timeout_s = seconds_or("timeout_s", timeout_s, self._limits.block_timeout_s)
        wall_timeout_s = seconds_or("wall_timeout_s", wall_timeout_s, self._limits.block_wall_timeout_s)
        if self._busy.locked():
            raise ReplBusy("this REPL runs a block already: one at a time")
        async with self._busy:
            self._is_interrupted = False
            connection = await self._require_repl()
            if self._is_interrupted:
                return Block(code, "interrupted", error=f"it {BY_CALLER}")
            started = time.monotonic()
            output = BlockOutput(self._bounds, on_output)
            run = self._run = BlockRun(
                self._worker_alive(), connection, output, self._limits, self._answer, timeout_s, wall_timeout_s, fields
            )
            try:
                result = await run.result(code, wanted)
            except FrameTooLarge as error:
                return Block(code, "error", error=f"the block is too long: {error}")
            except UnicodeEncodeError as error:  # as the compiler would say
                return Block(code, "error", error=f"UnicodeEncodeError: {error}")
            except asyncio.CancelledError:
                await to_its_end(partial(self._end_block, run))
                raise
            except BaseException:  # nobody waits for this block any more
                await self._end_repl()
                raise
            finally:
                self._run = None
            if result is None:
                limit = run.limit  # known only as long as the worker is there
                seen = post_mortem.located(await self._end_repl(explain=True), connection.block)
                why = run.killed_because or "its processes are gone"
                return outcome.killed(code, output, why, seen, limit, time.monotonic() - started)
            return outcome.ended(code, output, result, run.limit, wanted, fields, time.monotonic() - started)

    def _interrupt(self) -> None:
        self._is_interrupted = True
        if self._run is not None:
            self._run.interrupt(BY_CALLER)

    async def _end_block(self, run: BlockRun) -> None:
        """End a block that nobody waits for any more. The REPL goes on with its variables, if the block reacts."""
        goes_on = not self.kills_when_cancelled and await run.end(BY_CALLER)
        if not goes_on and not self._closed:
            await self._end_repl()

    async def _end_repl(self, explain: bool = False) -> LastSeen | None:
        """Kill the REPL, and end the queries that it has open. Its worker stays, with the context in place.

        Returns:
            What the REPL was doing, if `explain` asks for it and it could be seen.
        """
        connection, self._connection = self._connection, None
        worker = self._worker_alive()
        exceeded = worker.died if isinstance(worker.died, Exceeded) else None
        seen = exceeded.post_mortem if exceeded else None
        if not worker.gone.is_set():
            with contextlib.suppress(SandboxFailed):  # then its init was killed, and the REPL with it
                seen = await worker.stop(explain and seen is None) or seen
        # A scratch folder that is too full would end the next REPL, too: that one gets another worker.
        if worker.gone.is_set() or (exceeded is not None and exceeded.limit in SCRATCH_LIMITS):
            await self._end_worker()
        if connection is not None:
            await connection.close()
        return seen

    def _worker_alive(self) -> Worker:
        if self._started is None:
            raise ReplClosed("this REPL was closed")
        return self._started.worker
