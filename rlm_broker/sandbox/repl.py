"""A sandboxed REPL, as its users see it: its blocks, values, contexts, tools, files, programs and forks."""

import asyncio
import contextvars
import copy
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import PurePath
from typing import Any, Self

from rlm_broker.broker.transport.connection import QueryHandler, refuse
from rlm_broker.broker.transport.provisions import Provisions
from rlm_broker.broker.transport.session import NOTHING, Stdin, Wanted
from rlm_broker.concurrency.event_loop import EventLoopRef
from rlm_broker.concurrency.threads import in_thread
from rlm_broker.errors import ConfigurationError, require_kind
from rlm_broker.events.observers import OBSERVERS, ReplState
from rlm_broker.limits import ReplLimits
from rlm_broker.results import Block, Isolation
from rlm_broker.sandbox.arguments import environment_of, require_answer, require_block, require_limits, seconds_or
from rlm_broker.sandbox.blocks import block_result
from rlm_broker.sandbox.blocks.block_result import BlockOutput, BlockSpec, OnDisplay, OnOutput, SubmitFields
from rlm_broker.sandbox.blocks.query_contexts import QueryContexts
from rlm_broker.sandbox.blocks.record import Replayed, ReplRecord, ReplRecorder
from rlm_broker.sandbox.files import ReplFiles
from rlm_broker.sandbox.programs import ProgramResult, ReplPrograms, run_script
from rlm_broker.sandbox.repl_blocks import ReplBlocks
from rlm_broker.sandbox.repl_process import ReplContext, ReplWorker
from rlm_broker.sandbox.supplies import SuppliedRepl
from rlm_broker.sandbox.tools import Tools
from rlm_broker.sandbox.workers.source import Workers
from rlm_broker.values.names import require_given, require_variables
from sandbox_worker.wire.errors import FrameTooLarge


class SandboxedRepl(SuppliedRepl):
    """Runs blocks of untrusted code, one after the other. Variables persist from one block to the next.

    Example:
        ```python
        with Sandbox() as sandbox, sandbox.repl("some text") as repl:
            repl.execute("n = len(context)")
            print(repl.get("n"))  # 9
        ```

    Made by `Sandbox.repl` and `Template.repl`. Use it as a context manager (`with` or `async with`): all processes of
    the REPL have ended when it is left. Call methods from any thread; async code has awaited twins, such as `aexecute`.

    Args:
        event_loop: Loop of the REPL.
        workers: Source of its worker, and of another one after a loss.
        context: As all arguments below, see `Sandbox.repl`. `Inherited` stands for the context of the fork server.

    Attributes:
        kills_when_cancelled: Whether a cancelled caller's block is killed with its REPL, and not interrupted. Set by an
            owner if it closes the REPL then, and need not wait for the block.
        is_listed: Whether `ps` lists the REPL, and `stop` ends it, while it is open.
        answer: Answers the queries of the next blocks.
        tree: Id of the run tree with the REPL, as in `Run.id`; None for a REPL of its own.

    Raises:
        ConfigurationError: An argument cannot be used.
    """

    kills_when_cancelled = False
    is_listed = True
    tree: str | None = None

    def __init__(
        self,
        event_loop: EventLoopRef,
        workers: Workers,
        context: object = None,
        answer: QueryHandler = refuse,
        *,
        tools: Sequence[str] | Mapping[str, Any] | Tools = (),
        values: Mapping[str, Any] | None = None,
        limits: ReplLimits | None = None,
        env: Mapping[str, str] | None = None,
        seed: int | None = None,
        scaffold: bool = True,
        record: ReplRecord | None = None,
    ) -> None:
        require_answer(answer)
        require_kind("record", record, ReplRecord, type(None))
        require_limits(limits)
        self._scaffold = scaffold
        self._tools: Tools | None = None
        names = self._take_tools(tools)
        require_given(names, values or {}, scaffold)
        self._limits = limits or workers.limits
        self._bounds = self._limits.repl_bounds()
        self._event_loop = event_loop
        self._fork_server = workers.fork_server
        self.answer = answer
        self._env = env
        self._to_replay = record
        seed = record.seed if seed is None and record is not None else seed
        environment = environment_of(env, seed, scaffold)
        provisions = Provisions.of(values or {}, self._limits.max_frame_bytes, names or None, environment)
        later_bytes, is_recorded = self._limits.later_context_bytes, self._limits.max_replay_s > 0
        recorder = ReplRecorder(provisions.copy(), seed, is_on=is_recorded)
        self._use(ReplWorker(workers, ReplContext(context, later_bytes), self._limits, provisions, recorder))

    def _use(self, worker: ReplWorker) -> None:
        """Run blocks in this worker from now on."""
        self._worker = worker
        # These know the worker and not this object, which has them: without cycles, no REPL waits for the collector.
        limits = self._limits
        self._files = ReplFiles(self.bind_loop(), worker.beside_blocks, limits.scratch_bytes, worker.recorder.file)
        contexts = QueryContexts(worker.beside_blocks, worker.context_named, limits.scratch_bytes)
        self._blocks = ReplBlocks(worker, contexts, limits, self._files.put)
        self._programs = ReplPrograms(self._fork_server, worker, limits, self._env)
        self._forks: list[Self] = []

    @property
    def is_closed(self) -> bool:
        """Whether the REPL was closed, and so runs no block any more."""
        return self._worker.is_closed

    @property
    def pid(self) -> int | None:
        """Process id of its init, which all its other processes are below; None while it has no process."""
        return None if self._worker.started is None else self._worker.started.worker.init.pid

    @property
    def isolation(self) -> Isolation:
        """Level and layers that are enforced, as the worker reported them before any model code ran."""
        layers = self._worker.worker.layers if self._worker.started else ()
        return Isolation(self._fork_server.level.name, (*self._fork_server.layers, *layers))

    @property
    def files(self) -> ReplFiles:
        """Files in the REPL's scratch folder, which is the current folder of its code."""
        return self._files

    @property
    def replayed(self) -> Replayed:
        """Outcome of the last replay: after a kill, or of the `record` that the REPL was opened with."""
        return self._blocks.replayed

    @property
    def record(self) -> ReplRecord:
        """Blocks of the REPL so far, with all that another REPL needs to run them again."""
        return self._worker.recorder.record()

    def execute(
        self,
        code: str,
        timeout_s: float | None = None,
        on_output: OnOutput | None = None,
        *,
        value: bool = False,
        wall_timeout_s: float | None = None,
        stdin: Stdin | None = None,
        submit: bool | Mapping[str, Any] | None = None,
        variables: bool = False,
        echo: bool = True,
        on_display: OnDisplay | None = None,
    ) -> Block:
        """Run one block. If the caller is interrupted (Ctrl+C) or cancelled, the block is, too, and variables stay.

        Example:
            ```python
            repl.execute("n = len(context)\\nn * 2", value=True).value  # 18
            ```

        Args:
            code: Python source, up to `Limits.max_frame_bytes`.
            timeout_s: Compute time in seconds; None takes `Limits.block_timeout_s`.
            on_output: Called with each piece of output as it comes.
            value: Whether `Block.value` has the value of the last statement, if it is an expression.
            wall_timeout_s: Seconds, waiting for replies included; None takes `Limits.block_wall_timeout_s`.
            stdin: Text for `input()` and `sys.stdin`; or an async function, called when code needs more, that returns
                the next text or bytes. With None, or at the end, `input()` raises EOFError.
            submit: True ends the block where it submits, by `SUBMIT`, `FINAL` or `FINAL_VAR`, past any `except
                Exception`. With a dict from field to type (for pydantic, or a JSON Schema), code submits all these
                fields by `SUBMIT(field=value)`, or one dict of all of them; other fields or types raise a TypeError
                there. `Block.final_value` has the submission. None lets the block go on after one.
            variables: Whether `Block.variables` names the variables made or changed by the block.
            echo: Whether the last expression and a traceback are printed, as at a prompt. If not, `Block.result` and
                `Block.traceback` have them.
            on_display: Called with each display as it comes.

        Returns:
            The outcome. If a block raises, times out or is killed, its `status` says so; there is no exception.

        Raises:
            ConfigurationError: `code` or `stdin` has another type, a time is not positive, or `submit` cannot be used.
            ReplBusy: The REPL runs another block.
            ReplClosed: The REPL was closed before, or has been restarted too often.
            SandboxFailed: The REPL is not open, or the sandbox itself broke.
        """
        wanted = Wanted(value, stdin=stdin, variables=variables, echo=echo)
        hear = (on_output, on_display)
        return self.bind_loop().run(self._execute(code, timeout_s, hear, wall_timeout_s, wanted, submit))

    async def aexecute(
        self,
        code: str,
        timeout_s: float | None = None,
        on_output: OnOutput | None = None,
        *,
        value: bool = False,
        wall_timeout_s: float | None = None,
        stdin: Stdin | None = None,
        submit: bool | Mapping[str, Any] | None = None,
        variables: bool = False,
        echo: bool = True,
        on_display: OnDisplay | None = None,
    ) -> Block:
        """Run one block as `execute` does, awaited."""
        wanted = Wanted(value, stdin=stdin, variables=variables, echo=echo)
        hear = (on_output, on_display)
        return await self.bind_loop().arun(self._execute(code, timeout_s, hear, wall_timeout_s, wanted, submit))

    def execute_script(
        self,
        code: str,
        argv: Sequence[str] = ("main.py",),
        file: str | None = None,
        *,
        stdin: Stdin | None = None,
        timeout_s: float | None = None,
        on_output: OnOutput | None = None,
    ) -> Block:
        """Run a Python program as `python FILE ARGS...` would: with its arguments, threads and functions of `atexit`.

        Its names are variables of the REPL. For a program of its own, in a process of its own, see `run`.

        Example:
            ```python
            repl.execute_script("import sys\\nprint(sys.argv[1])", ["main.py", "a"]).stdout  # 'a\\n'
            ```

        Args:
            code: Source of the program.
            argv: Its `sys.argv`.
            file: Its file in the scratch folder, for `__file__`; None if it has none.
            stdin: Text that it reads, as for `execute`.
            timeout_s: Seconds of all of it, waiting included; None takes the limits of the REPL.
            on_output: Called with each piece of output as it comes.

        Raises:
            ConfigurationError, ReplBusy, ReplClosed, SandboxFailed: As for `execute`.
        """
        execute = partial(self.aexecute, on_output=on_output)
        return self.bind_loop().run(run_script(execute, code, argv, file, stdin, timeout_s))

    async def aexecute_script(
        self,
        code: str,
        argv: Sequence[str] = ("main.py",),
        file: str | None = None,
        *,
        stdin: Stdin | None = None,
        timeout_s: float | None = None,
        on_output: OnOutput | None = None,
    ) -> Block:
        """Run a Python program as `execute_script` does, awaited."""
        return await run_script(partial(self.aexecute, on_output=on_output), code, argv, file, stdin, timeout_s)

    def get(self, *names: str) -> Any:
        """Return values of variables: for one name its value, for several a tuple. Model code decides what they are.

        Example:
            ```python
            repl.execute("low, high = 1, 9")
            repl.get("low", "high")  # (1, 9)
            ```

        Args:
            names: Variables, at least one.

        Raises:
            ConfigurationError: A name is not an identifier, or no name is given.
            ValueUnavailable: There is no such variable, or its value cannot be sent as it is.
            ReplClosed, SandboxFailed: As for `execute`.
        """
        require_variables(names)
        return block_result.values_of(names, self.bind_loop().run(self._read(names)))

    async def aget(self, *names: str) -> Any:
        """Return values of variables as `get` does, awaited."""
        require_variables(names)
        block = await self.bind_loop().arun(self._read(names))
        # In a thread: decoding may take long, or import a package.
        return await in_thread(lambda _: block_result.values_of(names, block))

    def variables(self, *names: str) -> dict[str, Any]:
        """Return values of variables by name. One without a value does not fail the others. Model code decides all.

        A tool may call this for the block that waits for the tool: an async one its twin, any other one this.

        Example:
            ```python
            repl.execute("low, file = 1, open('data', 'w')")
            repl.variables()  # {'file': ValueUnavailable('file is a TextIOWrapper, ...'), 'low': 1}
            ```

        Args:
            names: Variables; without names, all whose names begin with no "_" and that code has made or rebound.

        Returns:
            Name → value, or the `ValueUnavailable` that says why there is none. All together have up to 16 MiB and
            1,048,576 values inside; variables beyond have such an error, too.

        Raises:
            ConfigurationError: A name is not an identifier.
            ValueUnavailable: No variable can be read, for example since the block of the tool has ended.
            ReplBusy: The REPL runs a block that does not wait.
            ReplClosed, SandboxFailed: As for `execute`.
        """
        return block_result.variables_of(names, self.bind_loop().run(self._read(names)))

    async def avariables(self, *names: str) -> dict[str, Any]:
        """Return values of variables by name as `variables` does, awaited."""
        block = await self.bind_loop().arun(self._read(names))
        return await in_thread(lambda _: block_result.variables_of(names, block))

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
        """Run a program in the sandbox, without a shell, beside a block and up to `Limits.max_programs` - 1 others.

        It has the isolation and the limits of the REPL's code. Processes it leaves end with it. If its time is
        over, or the caller is interrupted or cancelled, it is killed with all its processes, and the REPL goes on. A
        limit of all processes together, for example `memory_bytes`, ends the REPL, too.

        Example:
            ```python
            repl.run(["sort"], input="b\\na\\n", timeout_s=5).stdout.split()  # ['a', 'b']
            ```

        Args:
            argv: Name and arguments, up to 128 KiB each, and 2 MiB with all variables. A name without "/" is looked for
                in PATH.
            input: Bytes or text it reads from descriptor 0; None gives it no input.
            cwd: Its current folder: a path as in `files`.
            env: Name → text of variables, added to the REPL's own.
            timeout_s: Wall time in seconds; None takes `Limits.block_timeout_s`.
            max_output_bytes: Bytes kept of stdout, and of stderr; None takes `Limits.max_output_bytes`.

        Returns:
            The outcome, also of a failed or killed program.

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
        """Run a program as `run` does, awaited."""
        return await self.bind_loop().arun(self._programs.run(argv, input, cwd, env, timeout_s, max_output_bytes))

    def interrupt(self) -> None:
        """Interrupt the block that runs, from any thread, as a time limit does: variables stay if it reacts.

        Does not wait for the block's end; its status is then "interrupted". Has no effect if no block runs.

        Example:
            ```python
            repl.execute("while True: print()", on_output=lambda *_: repl.interrupt()).status  # 'interrupted'
            ```
        """
        self.bind_loop().call_soon(self._blocks.interrupt)

    async def ainterrupt(self) -> None:
        """Interrupt the block that runs as `interrupt` does, awaited."""
        await self.bind_loop().acall(self._blocks.interrupt)

    def fork(self, answer: QueryHandler | None = None, *, detached: bool = False) -> Self:
        """Return a second live REPL with the same variables. From then on, each is independent of the other.

        The fork is open: close it, or use it as a context manager. Memory is shared until one of the two writes to it.
        They share the scratch folder, the files and pipes that code has open, `memory_bytes` and `max_processes`, of
        which each fork takes two. They make no checkpoints. A killed one goes on in a worker of its own with an empty
        scratch folder, where its blocks run again, those before the fork included; see `ReplLimits.max_replay_s`.

        Example:
            ```python
            repl.execute("chosen = []")
            with repl.fork() as fork:
                fork.execute("chosen.append(1)")
                print(fork.get("chosen"), repl.get("chosen"))  # [1] []
            ```

        Args:
            answer: Answers the queries of the fork, as for `Sandbox.repl`; None takes this REPL's.
            detached: Whether the fork stays open when this REPL is closed.

        Raises:
            ConfigurationError: `answer` cannot be called.
            ForkRefused: It is not at isolation level "strict", or on a node; or code has left threads or processes
                running, or `max_processes` leaves no room. The message says which.
            ReplBusy: The REPL runs a block.
            ReplClosed, SandboxFailed: As for `execute`.
        """
        return self.bind_loop().run(self._fork(answer, detached))

    async def afork(self, answer: QueryHandler | None = None, *, detached: bool = False) -> Self:
        """Return a fork as `fork` does, awaited."""
        return await self.bind_loop().arun(self._fork(answer, detached))

    def rollback(self, k: int = 1) -> int:
        """Go back to before one of the last blocks: all variables are as they were. Return the number of undone blocks.

        The REPL goes on from a checkpoint, see `ReplLimits.checkpoint` and `ReplLimits.keep_checkpoints`. Values given
        since are given again. Files stay as they are. Programs beside the code end.

        Example:
            ```python
            with sandbox.repl(limits=ReplLimits(checkpoint="each", keep_checkpoints=3)) as repl:
                for code in ("n = 1", "n = 2", "n = 3"):
                    repl.execute(code)
                print(repl.rollback(2), repl.get("n"))  # 2 1
            ```

        Args:
            k: Number of checkpoints to go back. With `checkpoint="each"` each block has one.

        Raises:
            ConfigurationError: There are not so many checkpoints. The REPL is as it was.
            ReplBusy: The REPL runs a block.
            ReplClosed, SandboxFailed: As for `execute`.
        """
        return self.bind_loop().run(self._blocks.roll_back(k))

    async def arollback(self, k: int = 1) -> int:
        """Go back to before one of the last blocks as `rollback` does, awaited."""
        return await self.bind_loop().arun(self._blocks.roll_back(k))

    async def end_children(self) -> None:
        """End the children that code has started in the background, and wait until they have ended."""
        if self._worker.connection is not None:
            await self._worker.connection.end_background()

    def renew(self) -> None:
        """Count restarts from 0 again: the next run of the same REPL may have as many restarts as the first."""
        self._worker.renew()

    # -- opening and end ---------------------------------------------------------------------------------------------

    async def _fork(self, answer: QueryHandler | None, detached: bool) -> Self:
        answer = self.answer if answer is None else answer
        require_answer(answer)
        require_kind("detached", detached, bool)
        worker = await self._blocks.fork()
        fork = copy.copy(self)
        fork._turn = fork._opener = None
        fork.answer = answer
        fork._use(worker)
        fork._opens()
        fork._became("idle")
        if not detached:
            self._forks = [*(each for each in self._forks if not each._worker.is_closed), fork]
        return fork

    def _opens(self) -> None:
        if self.is_listed:
            for observer in OBSERVERS:
                observer.repl_opens(self)

    async def _open(self) -> None:
        self._opens()
        await self._worker.open()
        if self._to_replay is not None:
            async with self._worker.busy:
                await self._blocks.opened(self._to_replay)
        self._became("idle")

    async def _close(self) -> None:
        try:
            forks, self._forks = self._forks, []
            await asyncio.gather(*(fork.aclose() for fork in forks))
            await self._worker.close()
        finally:
            if self._worker.is_closed:
                self._tools = None  # so that their threads end now: a function that reads variables knows this REPL
            for observer in OBSERVERS:
                observer.repl_closed(self)

    def _became(self, state: ReplState) -> None:
        for observer in OBSERVERS:
            observer.repl_became(self, state)

    # -- one block ---------------------------------------------------------------------------------------------------

    async def _read(self, names: tuple[str, ...]) -> Block:
        if names:
            require_variables(names)
        connection = self._worker.connection
        if self._blocks.run is None or connection is None or not connection.waits:
            return await self._execute("", wanted=Wanted(names=names))
        try:
            return block_result.read_block(await connection.read(names))
        except FrameTooLarge as error:
            raise ConfigurationError(f"the names are too long for a message: {error}") from None

    async def _execute(
        self,
        code: str,
        timeout_s: float | None = None,
        hear: tuple[OnOutput | None, OnDisplay | None] = (None, None),
        wall_timeout_s: float | None = None,
        wanted: Wanted = NOTHING,
        submit: object = None,
    ) -> Block:
        require_block(code, wanted)
        fields = SubmitFields.of(submit)
        wanted = wanted if fields is None else wanted._replace(submit=fields.names)
        timeout_s = seconds_or("timeout_s", timeout_s, self._limits.block_timeout_s)
        wall_timeout_s = seconds_or("wall_timeout_s", wall_timeout_s, self._limits.block_wall_timeout_s)
        output, tools = BlockOutput(self._bounds, *hear), self._tools
        answer = self.answer if tools is None else partial(self._answered, tools, contextvars.copy_context())
        spec = BlockSpec(code, wanted, output, answer, timeout_s, wall_timeout_s, fields)
        async with self._blocks.turn(" already: one at a time"):
            self._became("busy")
            try:
                return await self._blocks.execute(spec, self.kills_when_cancelled)
            finally:
                self._became("idle")
