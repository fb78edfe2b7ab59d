"""A sandboxed REPL: a worker, its connection, and the clock that ends a block in time."""

import asyncio
import time
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import PurePath
from typing import Any, Final

from rlm_broker.concurrency.deadline import to_its_end
from rlm_broker.concurrency.event_loop import AsyncResource, EventLoopRef
from rlm_broker.errors import ReplBusy, ReplClosed, SandboxFailed, require_kind
from rlm_broker.limits import ReplLimits
from rlm_broker.plain import require_given, require_variables
from rlm_broker.results import Block, Isolation
from rlm_broker.sandbox.arguments import require_answer, require_block, require_limits, seconds_or
from rlm_broker.sandbox.blocks import outcome, post_mortem
from rlm_broker.sandbox.blocks.block_run import BlockRun
from rlm_broker.sandbox.blocks.output import BlockOutput, OnOutput
from rlm_broker.sandbox.blocks.query_contexts import QueryContexts
from rlm_broker.sandbox.blocks.sent import values_of
from rlm_broker.sandbox.blocks.submit_fields import SubmitFields
from rlm_broker.sandbox.environment import environment_of
from rlm_broker.sandbox.files import ReplFiles
from rlm_broker.sandbox.programs import ProgramResult, Programs
from rlm_broker.sandbox.repl_worker import ReplWorker
from rlm_broker.sandbox.workers.source import Workers
from rlm_broker.sandbox.workers.worker import Worker
from rlm_broker.transport.connection import QueryHandler, refuse
from rlm_broker.transport.provisions import Provisions
from rlm_broker.transport.session import NOTHING, Wanted
from sandbox_worker.wire.errors import FrameTooLarge

BY_CALLER: Final = "was interrupted by its caller"


class SandboxedRepl(AsyncResource):
    """Runs blocks of untrusted code one after the other; variables persist from one to the next.

    Made by `Sandbox.repl` and `Template.repl`. Use it as a context manager: its processes are gone when it is left,
    however it is left.

    Args:
        event_loop: Where it lives.
        workers: Give it a worker, and another one if that is lost.
        context: See `Sandbox.repl`, as for those below. `Inherited`: the one that the fork server has.

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
        self._fork_server = workers.fork_server
        self._worker = ReplWorker(workers, context, self._limits, self._provisions)
        self._answer = answer
        self._files = ReplFiles(self.bind_loop, self._worker_beside_blocks, self._limits.scratch_bytes)
        self._contexts = QueryContexts(
            self._worker_beside_blocks, self._worker.context_named, self._limits.scratch_bytes
        )
        self._programs = Programs(self._fork_server, self._worker, self._worker_beside_blocks, self._limits, env)
        self._busy = asyncio.Lock()
        self._run: BlockRun | None = None
        self._is_interrupted = False

    @property
    def isolation(self) -> Isolation:
        """What is enforced, as the worker reported it before any model code ran."""
        layers = self._worker.worker.layers if self._worker.started else ()
        return Isolation(self._fork_server.level.name, (*self._fork_server.layers, *layers))

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
        variables: bool = False,
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
            variables: Whether `Block.variables` is to tell which variables the block has made or changed.

        Returns:
            The outcome. A block that raises, times out or is killed is a result with that `status`, not an exception.

        Raises:
            ConfigurationError: The code or `stdin` is no text, a time no positive number, or `submit` cannot be used.
            ReplBusy: The REPL runs another block.
            ReplClosed: The REPL was closed before, or has been restarted too often.
            SandboxFailed: The REPL is not open, or the sandbox itself broke.
        """
        wanted = Wanted(value, stdin=stdin, variables=variables)
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
        variables: bool = False,
    ) -> Block:
        """`execute`, awaited."""
        wanted = Wanted(value, stdin=stdin, variables=variables)
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

    def run(
        self,
        argv: Sequence[str],
        *,
        input: bytes | str | None = None,
        cwd: str | PurePath = ".",
        env: Mapping[str, str] | None = None,
        timeout_s: float | None = None,
        max_output_bytes: int | None = None,
    ) -> ProgramResult:
        """Run a program in the sandbox, beside a block and up to `Limits.max_programs` others; no shell is between.

        It has the isolation and the limits of the REPL's code. What it leaves running ends with it. When its time is
        over, or the caller is interrupted (Ctrl+C) or cancelled, it and all that it started are killed; the REPL goes
        on. A limit that all processes of the REPL share, such as `memory_bytes`, ends the REPL, too.

        Args:
            argv: Its name and its arguments, up to 128 KiB each. A name without "/" is looked for in PATH.
            input: What it reads from descriptor 0; None is nothing.
            cwd: Its current folder, relative to the scratch folder. No link is followed.
            env: Name → text of variables, beside those that the REPL was given.
            timeout_s: Seconds; None takes `Limits.block_timeout_s`.
            max_output_bytes: Kept of stdout, and of stderr; None takes `Limits.max_output_bytes`.

        Returns:
            The outcome. A program that fails, or is killed, is a result, and not an exception.

        Raises:
            ConfigurationError: An argument cannot be used, or the sandbox runs no programs (isolation, `allow_exec`).
            FileRefused: There is no folder `cwd`.
            ProgramNotStarted: There is no such program, or it cannot be executed.
            ReplBusy: The REPL runs `max_programs` already.
            ReplClosed, SandboxFailed: As for `execute`.
        """
        return self.bind_loop().run(self._programs.run(argv, input, cwd, env, timeout_s, max_output_bytes))

    async def arun(
        self,
        argv: Sequence[str],
        *,
        input: bytes | str | None = None,
        cwd: str | PurePath = ".",
        env: Mapping[str, str] | None = None,
        timeout_s: float | None = None,
        max_output_bytes: int | None = None,
    ) -> ProgramResult:
        """`run`, awaited."""
        return await self.bind_loop().arun(self._programs.run(argv, input, cwd, env, timeout_s, max_output_bytes))

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
        return self._worker.is_closed

    def provide(self, values: Mapping[str, Any], *, restore: bool = True) -> None:
        """Give code more values by name. They are there from the next block on, also after a kill.

        Args:
            restore: Whether each later block finds the same objects again under these names; else they are code's own.

        Raises:
            ConfigurationError: One of them does not cross: it would not arrive as it is. Or its name is that of a tool.
                Then none is given.
            ValueTooLarge: One of them is more than a message may hold. Then none is given.
            ReplClosed: The REPL was closed.
        """
        require_kind("restore", restore, bool)
        require_given(self._provisions.tools() or (), values)
        self._provide(Provisions.of(values, self._limits.max_frame_bytes, are_restored=restore))

    def add_context(self, context: object) -> str:
        """Give code one more context from the next block on, mapped as the first; return the name of its variable.

        The names are `context_1`, `context_2` and so on. Objects (what is not made of texts) are decoded in the REPL,
        and are part of its `memory_bytes`.

        Args:
            context: As for `Sandbox.repl`.

        Raises:
            ConfigurationError: The REPL's `later_context_bytes` have no room for it.
            ContextRefused: It cannot be read.
            ReplClosed, SandboxFailed: As for `execute`.
        """
        return self.bind_loop().run(self._worker.add_context(context))

    async def aadd_context(self, context: object) -> str:
        """`add_context`, awaited."""
        return await self.bind_loop().arun(self._worker.add_context(context))

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
        if self._worker.is_closed:
            raise ReplClosed("this REPL was closed")
        self._provisions.add(more)
        if self._worker.connection is not None:
            self._worker.connection.provide(more)

    def renew(self) -> None:
        """Count restarts from 0 again: another run begins, with as many fresh REPLs as the one before."""
        self._worker.renew()

    # -- its life ----------------------------------------------------------------------------------------------------

    async def _open(self) -> None:
        await self._worker.open()

    async def _close(self) -> None:
        await self._worker.close()

    async def _worker_beside_blocks(self) -> Worker:
        """Return the worker, which has the files and runs programs also while its REPL is dead or runs a block."""
        self._worker.require_open()
        if self._worker.started is None and not self._busy.locked():
            async with self._busy:
                await self._worker.require_repl()
        if self._worker.started is None:
            raise SandboxFailed("the REPL is being replaced: try again when its block has begun")
        return self._worker.worker

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
        require_kind("value", wanted.value, bool)
        require_kind("variables", wanted.variables, bool)
        fields = SubmitFields.of(submit)
        wanted = wanted if fields is None else wanted._replace(submit=fields.names)
        timeout_s = seconds_or("timeout_s", timeout_s, self._limits.block_timeout_s)
        wall_timeout_s = seconds_or("wall_timeout_s", wall_timeout_s, self._limits.block_wall_timeout_s)
        if self._busy.locked():
            raise ReplBusy("this REPL runs a block already: one at a time")
        async with self._busy:
            self._is_interrupted = False
            connection = await self._worker.require_repl()
            if self._is_interrupted:
                return Block(code, "interrupted", error=f"it {BY_CALLER}")
            started = time.monotonic()
            output = BlockOutput(self._bounds, on_output)
            run = self._run = BlockRun(
                self._worker.worker,
                connection,
                output,
                self._limits,
                self._answer,
                timeout_s,
                wall_timeout_s,
                self._contexts,
                fields,
            )
            try:
                result = await run.result(code, wanted)
            except FrameTooLarge as error:
                return Block(
                    code, "error", error=f"code and stdin are too long for a message: {error}; raise max_frame_bytes"
                )
            except UnicodeEncodeError as error:  # as the compiler would say
                return Block(code, "error", error=f"UnicodeEncodeError: {error}")
            except asyncio.CancelledError:
                await to_its_end(partial(self._end_block, run))
                raise
            except BaseException:  # nobody waits for this block any more
                await self._worker.end_repl()
                raise
            finally:
                self._run = None
            if result is None:
                limit = run.limit  # known only as long as the worker is there
                seen = post_mortem.located(await self._worker.end_repl(explain=True), connection.block)
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
        if not goes_on and not self._worker.is_closed:
            await self._worker.end_repl()
