"""Programs in a REPL's sandbox, started by the orchestrator beside its blocks."""

import asyncio
import contextlib
import dataclasses
import os
import signal
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from io import FileIO
from pathlib import PurePath
from typing import Any, Final, Literal, NamedTuple

from rlm_broker.broker.transport.session import Stdin, Wanted
from rlm_broker.concurrency.deadline import to_its_end
from rlm_broker.concurrency.forks import left_to_parent
from rlm_broker.context.memfd import new_memfd
from rlm_broker.errors import (
    ConfigurationError,
    FileRefused,
    ProgramNotStarted,
    ReplBusy,
    SandboxFailed,
    refused_by_machine,
)
from rlm_broker.limits import ReplLimits
from rlm_broker.results import Block
from rlm_broker.sandbox.arguments import require_block, seconds_or, variables_of
from rlm_broker.sandbox.files import names_of
from rlm_broker.sandbox.repl_process import ReplWorker
from rlm_broker.sandbox.workers.fork_server import Forker
from rlm_broker.sandbox.workers.worker import Worker
from sandbox_worker.wire.bounds import HeadTail, OutputBounds
from sandbox_worker.wire.control import MAX_ARGUMENT_BYTES, MAX_PROGRAM_BYTES, Program, ProgramEnded, pack

PIECE_BYTES: Final = 1 << 16
"""Bytes read or written in one turn of the loop: the capacity of a pipe (pipe(7))."""
FLOOD_PAUSE_S: Final = 0.001
"""Seconds between two reads of an output with a full head. So each pipe passes 64 MB/s at little cost."""
LAST_READS: Final = 64
"""Reads of a pipe at most once the program has ended: 4 MB, more than a pipe can hold."""


class ProgramPipes:
    """The pipes of one program. `theirs` are the program's 0, 1 and 2."""

    def __init__(self, given: bytes, bounds: OutputBounds) -> None:
        opened: list[int] = []
        try:
            for _ in range(3):
                opened += os.pipe()
            input_end, input_fd, stdout_fd, stdout_end, stderr_fd, stderr_end = opened
            for fd in (input_fd, stdout_fd, stderr_fd):
                os.set_blocking(fd, False)
            self._stdout = _Output(stdout_fd, bounds)
            self._stderr = _Output(stderr_fd, bounds)
            self._input = _Input(input_fd, given)
        except OSError as error:
            for fd in opened:
                os.close(fd)
            raise refused_by_machine("there are no pipes for a program", error) from None
        self.theirs = [input_end, stdout_end, stderr_end]

    def close(self) -> None:
        """Close all ends."""
        self.started()
        for end in (self._input, self._stdout, self._stderr):
            end.close()

    def started(self) -> None:
        """Close our copies of the program's ends once it has them: a pipe ends when all copies are closed."""
        theirs, self.theirs = self.theirs, []
        for fd in theirs:
            os.close(fd)

    def finish(self) -> dict[str, Any]:
        """Return all of stdout and of stderr, as fields of a result, once all processes of the program have ended."""
        stdout, stderr = self._stdout.finish(), self._stderr.finish()
        return {"stdout_bytes": stdout, "stderr_bytes": stderr, "is_cut": self._stdout.is_cut or self._stderr.is_cut}


class _End:
    """Our end of a pipe. The loop serves it when the pipe is ready."""

    def __init__(self, fd: int) -> None:
        self._fd = fd
        self._loop = asyncio.get_running_loop()
        left_to_parent(self, _End._leave)

    def close(self) -> None:
        """Close the end. Has no effect when repeated."""
        if self._fd >= 0:
            self._stop()
            self._leave()

    def _leave(self) -> None:
        fd, self._fd = self._fd, -1
        if fd >= 0:
            os.close(fd)

    def _stop(self) -> None:
        """Have the loop serve the end no more."""


class _Input(_End):
    """The program's input. The pipe ends after its last byte. Input that the program does not read is dropped.

    What fits into the pipe is written at once, so that the loop need not serve it.
    """

    def __init__(self, fd: int, given: bytes) -> None:
        super().__init__(fd)
        self._left = memoryview(given)
        self._write()
        if self._left:
            self._loop.add_writer(fd, self._write)

    def _write(self) -> None:
        try:
            if self._left:
                self._left = self._left[os.write(self._fd, self._left[:PIECE_BYTES]) :]
        except BlockingIOError:
            return
        except BrokenPipeError:  # the program has closed its end
            self._left = self._left[:0]
        if not self._left:
            self.close()

    def _stop(self) -> None:
        self._loop.remove_writer(self._fd)  # which has no effect if the loop does not serve it


class _Output(_End):
    """The program's output. Its head and tail are kept. All is read, so that the program never waits for us."""

    def __init__(self, fd: int, bounds: OutputBounds) -> None:
        super().__init__(fd)
        self._kept: HeadTail[bytes] = HeadTail(bounds, b"")
        self._head: list[bytes] = []
        self._pause: asyncio.TimerHandle | None = None
        self._listen()

    def finish(self) -> bytes:
        """Return the output that was kept, with a note of what was cut."""
        for _ in range(LAST_READS):
            if self._fd < 0 or not self._read():
                break
        self.close()
        return b"".join([*self._head, self._kept.finish()])

    @property
    def is_cut(self) -> bool:
        """Whether `finish` has left out a part."""
        return self._kept.is_cut

    def _listen(self) -> None:
        self._pause = None
        self._loop.add_reader(self._fd, self._take)

    def _take(self) -> None:
        if self._read() and not self._kept.head_left:
            self._loop.remove_reader(self._fd)
            self._pause = self._loop.call_later(FLOOD_PAUSE_S, self._listen)

    def _read(self) -> bool:
        """Read once, and return whether there may be more."""
        try:
            data = os.read(self._fd, PIECE_BYTES)
        except BlockingIOError:
            return False
        if not data:
            self.close()
            return False
        if head := self._kept.add(data):
            self._head.append(head)
        return True

    def _stop(self) -> None:
        self._loop.remove_reader(self._fd)
        if self._pause is not None:
            self._pause.cancel()
            self._pause = None


ProgramStatus = Literal["ended", "timeout", "killed"]
"""End of a program, see `ProgramResult`."""
FEWEST_OUTPUT_BYTES: Final = 100
"""Smallest `max_output_bytes`, the same as in `Limits`. A smaller one is refused."""
MAX_REASON_CHARS: Final = 1_000
"""Characters of init's reason why a program cannot be started; a longer one is cut."""
_ELSEWHERE: Final = "give more as input, or in a file"


@dataclass(frozen=True, slots=True)
class ProgramResult:
    """Outcome of one program.

    Example:
        ```python
        result = repl.run(["sh", "-c", "echo done; exit 3"])
        print(result.exit_code, result.stdout)  # 3 done
        ```

    Attributes:
        argv: Name and arguments of the program.
        status: "ended": its first process ended, by itself or by a signal. "timeout": it was killed at `timeout_s`,
            with its whole session. "killed": the same at a limit, with its REPL, or at the REPL's end.
        exit_code: Exit code of its first process; None if a signal ended it.
        signal: Number of the signal, if one ended its first process; else None.
        stdout_bytes: Head and tail of what was written to descriptor 1, with a note of the cut.
        stderr_bytes: The same for descriptor 2.
        is_cut: Whether one of them was cut, at `max_output_bytes` or `Limits.max_output_lines`.
        limit: Name of the limit that ended it: "timeout_s", or a field of `Limits`; else None.
        error: Reason of the kill, as a sentence; None if it ended by itself.
        execution_time: Wall time in seconds.
    """

    argv: tuple[str, ...]
    status: ProgramStatus
    exit_code: int | None = None
    signal: int | None = None
    stdout_bytes: bytes = b""
    stderr_bytes: bytes = b""
    is_cut: bool = False
    limit: str | None = None
    error: str | None = None
    execution_time: float = 0.0

    @property
    def stdout(self) -> str:
        """`stdout_bytes` as text. Bytes that are not UTF-8 are U+FFFD."""
        return self.stdout_bytes.decode("utf-8", "replace")

    @property
    def stderr(self) -> str:
        """`stderr_bytes` as text. Bytes that are not UTF-8 are U+FFFD."""
        return self.stderr_bytes.decode("utf-8", "replace")


class Command(NamedTuple):
    """A checked request to run a program. `packed` has arguments and variables for init's child, `names` the parts of
    `cwd`."""

    argv: tuple[str, ...]
    packed: bytes
    given: bytes
    cwd: str
    names: list[bytes]
    timeout_s: float
    bounds: OutputBounds


class ReplPrograms:
    """The programs of one REPL."""

    def __init__(
        self,
        fork_server: Forker,
        repl: ReplWorker,
        limits: ReplLimits,
        env: Mapping[str, str] | None,
    ) -> None:
        self._fork_server = fork_server
        self._repl = repl
        self._limits = limits
        self._env = variables_of(env)
        self._running = 0

    async def run(
        self,
        argv: Sequence[str],
        given: bytes | str | None,
        cwd: str | PurePath,
        env: Mapping[str, str] | None,
        timeout_s: float | None,
        max_output_bytes: int | None,
    ) -> ProgramResult:
        """Run a program, see `SandboxedRepl.run`."""
        command = self._command(argv, given, cwd, env, timeout_s, max_output_bytes)
        self._require_level()
        if self._running >= self._limits.max_programs:
            raise ReplBusy(f"this REPL runs {self._running} programs already, as many as max_programs allows")
        self._running += 1
        try:
            worker = await self._repl.beside_blocks()
            self._repl.recorder.gap("a program of `run` may have changed its files")
            return await self._run(command, worker)
        finally:
            self._running -= 1

    def _require_level(self) -> None:
        """Raise ConfigurationError at a level, or in a sandbox, that cannot end all that a program starts."""
        level = self._fork_server.level
        if not level.runs_programs:
            raise ConfigurationError(
                f"no program can be run at isolation level {level.name!r}, which cannot find and end all that it "
                "starts: use 'strict'"
            )
        if not self._fork_server.allow_exec:
            raise ConfigurationError("no program can be run in a sandbox that was made with allow_exec=False")

    def _command(self, argv: object, given: object, cwd: Any, env: Any, timeout_s: object, most: object) -> Command:
        """Return the arguments of `run`. Raise ConfigurationError if one cannot be used."""
        timeout_s = seconds_or("timeout_s", timeout_s, self._limits.block_timeout_s)
        if most is None:
            most = self._limits.max_output_bytes
        if isinstance(most, bool) or not isinstance(most, int) or most < FEWEST_OUTPUT_BYTES:
            raise ConfigurationError(f"max_output_bytes = {most!r}: give a number of bytes from 100 on, or None")
        texts, encoded = _arguments(argv)
        more = variables_of(env, MAX_PROGRAM_BYTES)
        variables = {name.encode(): text.encode() for name, text in {**self._env, **more}.items()}
        packed = pack(Program(encoded, variables))
        if len(packed) > MAX_PROGRAM_BYTES:
            size = f"{len(packed):,} bytes, more than {MAX_PROGRAM_BYTES:,}"
            raise ConfigurationError(f"argv and env have {size}: {_ELSEWHERE}")
        bounds = OutputBounds(max_output_bytes=most, max_output_lines=self._limits.max_output_lines)
        names = names_of(cwd, may_be_empty=True)
        return Command(texts, packed, _input(given), str(cwd), names, timeout_s, bounds)

    async def _run(self, command: Command, worker: Worker) -> ProgramResult:
        started = time.monotonic()
        group_kills = 0 if worker.group is None else worker.group.kills()
        with contextlib.closing(ProgramPipes(command.given, command.bounds)) as pipes:
            with _memfd_of(command.packed) as memfd:
                program = worker.run_program(command.names, memfd.fileno(), *pipes.theirs)
            pipes.started()
            try:
                await asyncio.wait({program.ended}, timeout=command.timeout_s)
            except asyncio.CancelledError:
                with contextlib.suppress(SandboxFailed):
                    await to_its_end(partial(worker.end_program, program))
                raise
            is_late = not program.ended.done()
            if is_late:
                await to_its_end(partial(worker.end_program, program))
            said = program.ended.result()
            output = pipes.finish()
        if said is None:
            why = "the REPL was closed" if self._repl.is_closed else worker.why_gone
            outcome: dict[str, Any] = {"status": "killed", "error": why}
        else:
            _require_started(command, said)
            limit = said.limit
            was_killed = said.signal == signal.SIGKILL and not is_late and not said.with_repl
            if was_killed and worker.group is not None and worker.group.kills() > group_kills:
                limit = limit or "memory_bytes"
            outcome = self._outcome(said, limit, command.timeout_s if is_late else None)
        taken_s = time.monotonic() - started
        return ProgramResult(command.argv, **outcome, **output, execution_time=taken_s)

    def _outcome(self, said: ProgramEnded, limit: str | None, late_s: float | None) -> dict[str, Any]:
        """Return the end of a program, as fields of a result. `limit` names the limit that was reached, or is None.
        `late_s` is the time in seconds that the program had, if it was over."""
        how: dict[str, Any] = {"status": "killed", "exit_code": said.exit_code, "signal": said.signal, "limit": limit}
        if limit is not None:
            with_repl = " with its REPL" if said.with_repl else ""
            return {**how, "error": f"it was killed{with_repl} at {limit} = {getattr(self._limits, limit):,.10g}"}
        if said.with_repl:
            return {**how, "error": "it was killed with its REPL"}
        if late_s is not None and said.signal == signal.SIGKILL:
            late = f"it ran longer than timeout_s = {late_s:g} s"
            return {**how, "status": "timeout", "limit": "timeout_s", "error": late}
        return {**how, "status": "ended"}


def _require_started(command: Command, said: ProgramEnded) -> None:
    """Raise FileRefused if the current folder of a program cannot be entered, ProgramNotStarted if it cannot be
    executed."""
    if said.no_folder is not None:
        raise FileRefused(f"cwd = {command.cwd!r} {said.no_folder.reason[:MAX_REASON_CHARS]}", said.no_folder.kind)
    if said.not_started is not None:
        raise ProgramNotStarted(f"the program {command.argv[0][:200]!r} {said.not_started[:MAX_REASON_CHARS]}")


def _texts(argv: object, example: str) -> tuple[str, ...]:
    """Return the arguments. Raise ConfigurationError if they are no list of texts."""
    if not isinstance(argv, Sequence) or isinstance(argv, str | bytes | bytearray | memoryview):
        raise ConfigurationError(f"argv must be a list of texts, such as {example}, not {type(argv).__name__}")
    for place, text in enumerate(argv):
        if not isinstance(text, str):
            raise ConfigurationError(f"argv[{place}] must be text, not {type(text).__name__}")
    return tuple(argv)


def _arguments(argv: object) -> tuple[tuple[str, ...], list[bytes]]:
    """Return the arguments as text, and as the program gets them. Raise ConfigurationError if one cannot be used."""
    texts, encoded = _texts(argv, "['ls', '-l']"), []
    for place, text in enumerate(texts):
        try:
            argument = text.encode("utf-8", "surrogateescape")  # file names may hold any bytes
        except UnicodeEncodeError:
            raise ConfigurationError(f"argv[{place}] has lone surrogates, which UTF-8 cannot encode") from None
        if b"\0" in argument:
            raise ConfigurationError(f"argv[{place}] has a NUL character, which would end it")
        if len(argument) > MAX_ARGUMENT_BYTES:
            size = f"{len(argument):,} bytes, more than {MAX_ARGUMENT_BYTES:,}"
            raise ConfigurationError(f"argv[{place}] has {size}: {_ELSEWHERE}")
        encoded.append(argument)
    if not encoded or not encoded[0]:
        raise ConfigurationError("argv names no program: its first text is the program's name")
    return texts, encoded


def _input(given: object) -> bytes:
    """Return the program's input as bytes. Raise ConfigurationError if it is of a wrong type or cannot be encoded."""
    if given is None:
        return b""
    if isinstance(given, str):
        try:
            return given.encode()
        except UnicodeEncodeError:
            raise ConfigurationError("input has lone surrogates, which UTF-8 cannot encode: give bytes") from None
    if isinstance(given, bytes | bytearray | memoryview):
        return bytes(given)
    raise ConfigurationError(f"input must be bytes, text or None, not {type(given).__name__}")


def _memfd_of(data: bytes) -> FileIO:
    """Return a memfd with the data: a packet to init has no room for it. Raise SandboxFailed without memory or a
    descriptor."""
    try:
        memfd = FileIO(new_memfd("program"), "r+")
    except OSError as error:
        raise SandboxFailed(f"a program's arguments cannot be passed on: {error.strerror}") from None
    memfd.write(data)
    return memfd


_AT_ITS_START: Final = """
__import__("sys").argv[:] = {argv!r}
__import__("sys").path.insert(0, __import__("os").getcwd())
"""
_ITS_FILE: Final = '__file__ = __import__("os").path.abspath({file!r})\n'
_NO_DISPLAY: Final = "\nNone\n"
"""Last line of a program's block. A REPL shows the value of a last expression, and `python FILE` does not."""
_AT_ITS_END: Final = """
import atexit, threading
for thread in threading.enumerate():
    if thread is not threading.current_thread() and not thread.daemon:
        thread.join()
atexit._run_exitfuncs()
"""


async def run_script(
    execute: Callable[..., Awaitable[Block]],
    code: str,
    argv: Sequence[str],
    file: str | None,
    stdin: Stdin | None,
    timeout_s: float | None,
) -> Block:
    """Run a Python program in three blocks, which do what the interpreter does.

    The first sets `sys.argv` and the path; it binds no name in the program's namespace but `__file__`, if the program
    has a file. The second is the program. The third waits for its threads and calls its functions of `atexit`.

    Args:
        execute: Runs one block.
        timeout_s: Seconds of all blocks, waiting included; None: each has the limits of the REPL.
    """
    require_block(code, Wanted(stdin=stdin))
    texts = _texts(argv, "['main.py', 'a']")
    start = _AT_ITS_START.format(argv=[*texts]) + ("" if file is None else _ITS_FILE.format(file=file))
    if (block := await execute(start)).status != "ok":
        return dataclasses.replace(block, code=code)
    block = await execute(code + _NO_DISPLAY, timeout_s, wall_timeout_s=timeout_s, stdin=stdin)
    block = dataclasses.replace(block, code=code)
    if block.status == "killed" or (timeout_s is not None and block.status == "interrupted"):
        return block
    left_s = None if timeout_s is None else max(0.001, timeout_s - block.execution_time)
    end = await execute(_AT_ITS_END, left_s, wall_timeout_s=left_s)
    return dataclasses.replace(
        block if end.status == "ok" else end,
        code=code,
        stdout=block.stdout + end.stdout,
        stderr=block.stderr + end.stderr,
        execution_time=block.execution_time + end.execution_time,
        displays=block.displays + end.displays,
        displays_omitted=block.displays_omitted + end.displays_omitted,
    )
