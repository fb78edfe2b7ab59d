"""Programs that the host runs in a REPL's sandbox, beside its blocks."""

import asyncio
import contextlib
import os
import signal
import time
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import PurePath
from typing import Any, Final, Literal

from rlm_broker.concurrency.deadline import to_its_end
from rlm_broker.context.memfd import new_memfd
from rlm_broker.errors import ConfigurationError, FileRefused, ProgramNotStarted, ReplBusy, SandboxFailed
from rlm_broker.limits import ReplLimits
from rlm_broker.sandbox.arguments import seconds_or
from rlm_broker.sandbox.environment import variables_of
from rlm_broker.sandbox.files import names_of
from rlm_broker.sandbox.program_pipes import ProgramPipes
from rlm_broker.sandbox.repl_worker import ReplWorker
from rlm_broker.sandbox.workers.fork_server import ForkServer
from rlm_broker.sandbox.workers.worker import Worker
from sandbox_worker.wire.control import ProgramEnded
from sandbox_worker.wire.headtail import OutputBounds
from sandbox_worker.wire.program import MAX_ARGUMENT_BYTES, MAX_PROGRAM_BYTES, Program, pack_program

ProgramStatus = Literal["ended", "timeout", "killed"]
"""How a program ended, see `ProgramResult`."""
FEWEST_OUTPUT_BYTES: Final = 100
"""As of `Limits.max_output_bytes`."""
MAX_REASON_CHARS: Final = 1_000
"""Of what init says of a program that cannot be started."""
_ELSEWHERE: Final = "give more as input, or in a file"


@dataclass(frozen=True, slots=True)
class ProgramResult:
    """What came of one program.

    Attributes:
        argv: What was run.
        status: "ended": its first process ended, by itself or by a signal. "timeout": it and all that it started were
            killed at `timeout_s`. "killed": they were killed at a limit, with their REPL, or when that was closed.
        exit_code: Of its first process; None if a signal ended it.
        signal: Number of the signal that ended its first process, or None.
        stdout, stderr: Head and tail of what was written, as UTF-8; other bytes are U+FFFD. A note says what was cut.
        limit: Name of the limit that ended it: "timeout_s", or a field of `Limits`.
        error: Why it was killed, in a sentence; None if it ended by itself.
        execution_time: Seconds.
    """

    argv: tuple[str, ...]
    status: ProgramStatus
    exit_code: int | None = None
    signal: int | None = None
    stdout: str = ""
    stderr: str = ""
    limit: str | None = None
    error: str | None = None
    execution_time: float = 0.0


@dataclass(frozen=True, slots=True)
class Command:
    """What is to be run, checked.

    Attributes:
        packed: Arguments and variables, for init's child.
        given: Bytes of its input.
    """

    argv: tuple[str, ...]
    packed: bytes
    given: bytes
    cwd: str
    names: list[bytes]
    timeout_s: float
    bounds: OutputBounds


class Programs:
    """Those of one REPL.

    Args:
        fork_server: Of the REPL's workers.
        repl: Whose they are.
        worker: Returns the worker that programs run in, also where it has to be started first.
        limits: Of the REPL.
        env: Variables of the REPL.
    """

    def __init__(
        self,
        fork_server: ForkServer,
        repl: ReplWorker,
        worker: Callable[[], Awaitable[Worker]],
        limits: ReplLimits,
        env: Mapping[str, str] | None,
    ) -> None:
        self._fork_server = fork_server
        self._repl = repl
        self._worker = worker
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
        """See `SandboxedRepl.run`."""
        command = self._command(argv, given, cwd, env, timeout_s, max_output_bytes)
        self._require_level()
        if self._running >= self._limits.max_programs:
            raise ReplBusy(f"this REPL runs {self._running} programs already, as many as max_programs allows")
        self._running += 1
        try:
            return await self._run(command, await self._worker())
        finally:
            self._running -= 1

    def _require_level(self) -> None:
        """Raises: ConfigurationError, where code may start no programs, or what they start could not be found."""
        level = self._fork_server.level
        if not level.runs_programs:
            raise ConfigurationError(
                f"no program can be run at isolation level {level.name!r}, since not all that it starts would be found "
                "and ended: that takes 'strict'"
            )
        if not self._fork_server.allow_exec:
            raise ConfigurationError("no program can be run in a sandbox that was made with allow_exec=False")

    def _command(self, argv: object, given: object, cwd: Any, env: Any, timeout_s: object, most: object) -> Command:
        """Return what was given. Raises: ConfigurationError."""
        timeout_s = seconds_or("timeout_s", timeout_s, self._limits.block_timeout_s)
        if most is None:
            most = self._limits.max_output_bytes
        if isinstance(most, bool) or not isinstance(most, int) or most < FEWEST_OUTPUT_BYTES:
            raise ConfigurationError(f"max_output_bytes = {most!r}: give a number of bytes from 100 on, or None")
        texts, encoded = _arguments(argv)
        variables = {name.encode(): text.encode() for name, text in {**self._env, **variables_of(env)}.items()}
        packed = pack_program(Program(encoded, variables))
        if len(packed) > MAX_PROGRAM_BYTES:
            size = f"{len(packed):,} bytes, more than {MAX_PROGRAM_BYTES:,}"
            raise ConfigurationError(f"argv and env have {size}: {_ELSEWHERE}")
        bounds = OutputBounds(max_output_bytes=most, max_output_lines=self._limits.max_output_lines)
        names = names_of(cwd, may_be_empty=True)
        return Command(texts, packed, _input(given), str(cwd), names, timeout_s, bounds)

    async def _run(self, command: Command, worker: Worker) -> ProgramResult:
        started = time.monotonic()
        group_kills = 0 if worker.group is None else worker.group.kills()
        with ProgramPipes(command.given, command.bounds) as pipes:
            with _memfd_of(command.packed) as memfd:
                program = worker.run_program(command.names, memfd, *pipes.theirs)
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
            stdout, stderr = pipes.finish()
        if said is None:
            why = "the REPL was closed" if self._repl.is_closed else "the sandbox's processes were ended from outside"
            outcome: dict[str, Any] = {"status": "killed", "error": why}
        else:
            _require_started(command, said)
            limit = said.limit
            was_killed = said.signal == signal.SIGKILL and not is_late and not said.with_repl
            if was_killed and worker.group is not None and worker.group.kills() > group_kills:
                limit = limit or "memory_bytes"
            outcome = self._outcome(said, limit, command.timeout_s if is_late else None)
        taken_s = time.monotonic() - started
        return ProgramResult(command.argv, **outcome, stdout=stdout, stderr=stderr, execution_time=taken_s)

    def _outcome(self, said: ProgramEnded, limit: str | None, late_s: float | None) -> dict[str, Any]:
        """Return how a program ended, as fields of a result.

        Args:
            late_s: The time that it had, if that was over.
        """
        how: dict[str, Any] = {"status": "killed", "exit_code": said.exit_code, "signal": said.signal, "limit": limit}
        if limit is not None:
            with_repl = " with its REPL" if said.with_repl else ""
            return {**how, "error": f"it was killed{with_repl} at {limit} = {getattr(self._limits, limit):,.10g}"}
        if said.with_repl:
            return {**how, "error": "its REPL was killed, and it with the REPL"}
        if late_s is not None and said.signal == signal.SIGKILL:
            late = f"it ran longer than timeout_s = {late_s:g} s"
            return {**how, "status": "timeout", "limit": "timeout_s", "error": late}
        return {**how, "status": "ended"}


def _require_started(command: Command, said: ProgramEnded) -> None:
    """Raises: FileRefused, ProgramNotStarted."""
    if said.no_folder is not None:
        raise FileRefused(f"cwd = {command.cwd!r} {said.no_folder[:MAX_REASON_CHARS]}")
    if said.not_started is not None:
        raise ProgramNotStarted(f"the program {command.argv[0][:200]!r} {said.not_started[:MAX_REASON_CHARS]}")


def _arguments(argv: object) -> tuple[tuple[str, ...], list[bytes]]:
    """Return the arguments as text and as the program gets them. Raises: ConfigurationError."""
    if not isinstance(argv, Sequence) or isinstance(argv, str | bytes | bytearray | memoryview):
        raise ConfigurationError(f"argv is a list of texts, such as ['ls', '-l'], and not {type(argv).__name__}")
    encoded = []
    for place, text in enumerate(argv):
        if not isinstance(text, str):
            raise ConfigurationError(f"argv[{place}] is text, and not {type(text).__name__}")
        try:
            argument = text.encode("utf-8", "surrogateescape")  # names of files may hold any bytes
        except UnicodeEncodeError:
            raise ConfigurationError(f"argv[{place}] has lone surrogates, which UTF-8 has not") from None
        if b"\0" in argument:
            raise ConfigurationError(f"argv[{place}] has a NUL character, which would end it")
        if len(argument) > MAX_ARGUMENT_BYTES:
            size = f"{len(argument):,} bytes, more than {MAX_ARGUMENT_BYTES:,}"
            raise ConfigurationError(f"argv[{place}] has {size}: {_ELSEWHERE}")
        encoded.append(argument)
    if not encoded or not encoded[0]:
        raise ConfigurationError("argv names no program: its first text is the program's name")
    return tuple(argv), encoded


def _input(given: object) -> bytes:
    """Return what the program reads. Raises: ConfigurationError."""
    if given is None:
        return b""
    if isinstance(given, str):
        try:
            return given.encode()
        except UnicodeEncodeError:
            raise ConfigurationError("input has lone surrogates, which UTF-8 has not: give bytes") from None
    if isinstance(given, bytes | bytearray | memoryview):
        return bytes(given)
    raise ConfigurationError(f"input is bytes, text or None, and not {type(given).__name__}")


@contextlib.contextmanager
def _memfd_of(data: bytes) -> Iterator[int]:
    """Raises: SandboxFailed."""
    try:
        fd = new_memfd("program")
    except OSError as error:
        raise SandboxFailed(f"a program's arguments cannot be passed on: {error.strerror}") from None
    try:
        os.write(fd, data)
        yield fd
    finally:
        os.close(fd)
