"""A sandbox as a machine with a shell, behind one object of a peer's: a backend, a session, an environment.

Theory of operation
-------------------
Agents of peers work by command lines and files, as on a machine of their own. A `Shell` is one REPL whose code is never
used: its scratch folder, with the absolute names `/w` and `/tmp`, is the disk, and each command is a program beside the
REPL. So commands have the isolation and the limits of code, may run at the same time, and leave files but no processes.

- Nothing is opened before the first use. Without a sandbox of the caller's, all objects of a process share one
  (`Sandbox.shared`). The level is `strict`, since no other one runs programs.
- Methods are there for threads and, awaited, for any loop.
- Refusals are errors of rlm-broker: the adapter makes the peer's own of them. `FileRefused.kind` is one word for it.
- What a command may not do ends in its result: a program past a limit is killed, and the files stay.
- A dropped object closes its REPL. A forked process cannot use it.
"""

import posixpath
import signal
import threading
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path as HostPath
from pathlib import PurePath
from typing import Any, Final, TypedDict, Unpack

from rlm_broker.errors import FileRefused
from rlm_broker.integrations.repl_base import ends_with
from rlm_broker.limits import ReplLimits
from rlm_broker.sandbox.files import MAX_READ_BYTES
from rlm_broker.sandbox.programs import ProgramResult
from rlm_broker.sandbox.repl import SandboxedRepl
from rlm_broker.sandbox.sandbox import Sandbox
from rlm_broker.sandbox.workers.levels import IsolationName
from sandbox_worker.wire.control import MAX_ARGUMENT_BYTES

HOME: Final = "/w"
"""Absolute name of the scratch folder, in which commands begin."""
LEVEL: Final[IsolationName] = "strict"
"""Level of a sandbox that is shared: the only one that runs programs."""
LIMITS: Final = ReplLimits(max_programs=64, block_timeout_s=600)
"""Limits of a shell without its own. A command without a time limit of its own has ten minutes."""
TIMED_OUT: Final = 124
"""Exit code of a command whose time was over, as `timeout` of coreutils has it."""
_PART_CHARS: Final = MAX_ARGUMENT_BYTES // 4
"""Characters of a part of a command line: in UTF-8 no more bytes than one argument may have."""

Command = str | Sequence[str]
"""A command line for `/bin/sh`, or the arguments of one program."""
Path = str | PurePath


class CommandOptions(TypedDict, total=False):
    """Options of one command.

    Attributes:
        input: What it reads from descriptor 0.
        cwd: Its current folder, absolute or relative to `HOME`, which is the default.
        env: More variables.
        timeout_s: Seconds; None takes `block_timeout_s` of the limits.
        max_output_bytes: Bytes kept of each stream; None takes `max_output_bytes` of the limits.
        is_mixed: Whether a line writes its errors to stdout, in the order in which both came.
    """

    input: bytes | str | None
    cwd: Path
    env: Mapping[str, str] | None
    timeout_s: float | None
    max_output_bytes: int | None
    is_mixed: bool


class Shell:
    """A machine with a shell and a folder, opened at its first use.

    Example:
        ```python
        with Shell() as shell:
            shell.run("echo $NAME > out.txt", env={"NAME": "lens"})
            shell.write("/w/more/notes.txt", b"new")
            print(shell.read("/w/out.txt"), shell.run("ls", cwd="more").stdout)
        ```

    Args:
        sandbox: An open sandbox of the caller's, at `strict`; None shares one of the process.
        limits: Limits of all commands together; None takes `LIMITS`.
        env: Variables of all commands.

    Attributes:
        limits: Limits of all commands together.
    """

    def __init__(
        self,
        *,
        sandbox: Sandbox | None = None,
        limits: ReplLimits | None = None,
        env: Mapping[str, str] | None = None,
    ) -> None:
        self._sandbox = sandbox
        self.limits = limits or LIMITS
        self._env = env
        self._making = threading.Lock()
        self._repl: SandboxedRepl | None = None

    def __enter__(self) -> "Shell":
        self.open()
        return self

    def __exit__(self, *_error: object) -> None:
        self.close()

    async def __aenter__(self) -> "Shell":
        await self.aopen()
        return self

    async def __aexit__(self, *_error: object) -> None:
        await self.aclose()

    def open(self) -> SandboxedRepl:
        """Open the REPL, unless it is open, and return it.

        Raises:
            IsolationUnavailable: This machine has no `strict`.
            ConfigurationError: An argument cannot be used.
            ReplClosed: It was closed.
        """
        repl = self._repl
        if repl is None or not repl.is_open:
            repl = self._made(self._sandbox or Sandbox.shared(self.limits, LEVEL))
            repl.__enter__()
        return repl

    async def aopen(self) -> SandboxedRepl:
        """Open the REPL as `open` does, awaited."""
        repl = self._repl
        if repl is None or not repl.is_open:
            repl = self._made(self._sandbox or await Sandbox.ashared(self.limits, LEVEL))
            await repl.__aenter__()
        return repl

    def close(self) -> None:
        """End all commands and remove all files. Has no effect when repeated."""
        if self._repl is not None:
            self._repl.close()

    async def aclose(self) -> None:
        """End all commands as `close` does, awaited."""
        if self._repl is not None:
            await self._repl.aclose()

    @property
    def is_open(self) -> bool:
        """Whether it was opened, and not closed since."""
        return self._repl is not None and self._repl.is_open

    @property
    def is_closed(self) -> bool:
        """Whether it was opened and closed."""
        return self._repl is not None and self._repl.is_closed

    def run(self, command: Command, **options: Unpack[CommandOptions]) -> ProgramResult:
        """Run a command to its end.

        Args:
            command: A line for `/bin/sh`, up to 2 MiB; or a program's arguments.
            options: See `CommandOptions`.

        Returns:
            Its outcome. `exit_code_of` makes one number of it.

        Raises:
            ConfigurationError: An argument cannot be used, or the caller's sandbox is not at `strict`.
            FileRefused: There is no folder `cwd`.
            ProgramNotStarted: There is no such program. A line always starts.
            ReplBusy: As many commands run as `max_programs` allows.
            ReplClosed, SandboxFailed: As for `SandboxedRepl.run`.
        """
        argv, given = _arguments(command, options)
        return self.open().run(argv, **given)

    async def arun(self, command: Command, **options: Unpack[CommandOptions]) -> ProgramResult:
        """Run a command as `run` does, awaited. If the caller is cancelled, the command is killed."""
        argv, given = _arguments(command, options)
        return await (await self.aopen()).arun(argv, **given)

    def read(self, path: Path, max_bytes: int = MAX_READ_BYTES) -> bytes:
        """Return the bytes of a file, absolute or relative to `HOME`.

        Raises:
            FileRefused: `kind` says why: "missing", "folder", "permission", "too_large", or "file" for another reason.
        """
        return self.open().files.read(absolute(path), max_bytes)

    async def aread(self, path: Path, max_bytes: int = MAX_READ_BYTES) -> bytes:
        """Return the bytes of a file as `read` does, awaited."""
        return await (await self.aopen()).files.aread(absolute(path), max_bytes)

    async def asave(self, path: Path, to: HostPath) -> None:
        """Copy a file to the host, in pieces. Raises FileRefused as `read` does."""
        await (await self.aopen()).files.asave(absolute(path), to)

    def write(self, path: Path, data: bytes | HostPath) -> None:
        """Write a file below `HOME` or `/tmp`, with its folders, and replace one of that name.

        Args:
            path: Its path there.
            data: Its bytes, or a file of the host.

        Raises:
            FileRefused: `kind` says why: "folder", "permission" for a path elsewhere, "no_room", or "file".
        """
        self.open().files.write(absolute(path), data)

    async def awrite(self, path: Path, data: bytes | HostPath) -> None:
        """Write a file as `write` does, awaited."""
        await (await self.aopen()).files.awrite(absolute(path), data)

    async def apack(self, folder: Path, left_out: Iterable[PurePath] = ()) -> bytes:
        """Return a folder as a tar archive. The sandbox makes it, so its members are what the sandbox wants them to be.

        Args:
            folder: Its path there.
            left_out: Paths in it that are not packed.

        Raises:
            FileRefused: It cannot be read, or the archive is larger than what a folder within the limits needs.
        """
        without = [f"--exclude=./{path.as_posix()}" for path in sorted(left_out)]
        tar = ["tar", "--create", "--hard-dereference", "--anchored", "--no-wildcards", *without, "--file=-", "."]
        most_bytes = 4 * self.limits.scratch_bytes  # an archive is no twice as large, and half is kept of a tail
        packed = await self.arun(tar, cwd=folder, max_output_bytes=most_bytes)
        if problem := problem_of(packed):
            raise FileRefused(f"{folder} cannot be packed: {problem}")
        return packed.stdout_bytes

    async def aunpack(self, archive: bytes, folder: Path) -> None:
        """Unpack a tar archive into a folder, and make that. What a member may do there a command may do, too.

        Raises:
            FileRefused: It is no archive, or the folder cannot be written.
        """
        line = 'mkdir -p -- "$1" && exec tar --extract --no-same-owner --directory="$1" --file=-'
        unpacked = await self.arun(["/bin/sh", "-c", line, "sh", absolute(folder)], input=archive)
        if problem := problem_of(unpacked):
            raise FileRefused(f"{folder} cannot be written: {problem}")

    def _made(self, sandbox: Sandbox) -> SandboxedRepl:
        """Return the one REPL of this object. Entering it twice opens it once."""
        with self._making:
            if self._repl is None:
                self._repl = sandbox.repl(limits=self.limits, env=self._env)
                ends_with(self, self._repl)
            return self._repl


def exit_code_of(result: ProgramResult) -> int:
    """Return the outcome of a command as a shell tells it: 128 and the number of a signal, 124 for its time."""
    if result.status == "timeout":
        return TIMED_OUT
    if result.exit_code is not None:
        return result.exit_code
    return 128 + (result.signal or signal.SIGKILL)


def stderr_of(result: ProgramResult) -> str:
    """Return what a command has written to stderr, and in a further line why it was ended."""
    return f"{result.stderr}\n{result.error}\n" if result.error else result.stderr


def problem_of(result: ProgramResult) -> str | None:
    """Return why a command of an adapter's own has failed, in a few words; None if it has not."""
    if exit_code_of(result) == 0 and not result.is_cut:
        return None
    return result.stderr.strip() or result.error or "it is too large"


def absolute(path: Path, folder: str = HOME) -> str:
    """Return a path without "." and "..", from `folder` if it is relative. It names the same file if no folder on the
    way is a link, and links are not followed anyway."""
    return posixpath.normpath(posixpath.join(folder, str(path)))


def _arguments(command: Command, options: CommandOptions) -> tuple[Sequence[str], dict[str, Any]]:
    """Return the arguments of a command, and those of `SandboxedRepl.run`."""
    given: dict[str, Any] = {**options, "cwd": absolute(options.get("cwd", HOME))}
    is_mixed = given.pop("is_mixed", False)
    return (_argv(f"exec 2>&1\n{command}" if is_mixed else command) if isinstance(command, str) else command), given


def _argv(line: str) -> Sequence[str]:
    """Return the arguments of a shell for a line. A long one becomes several, since one may have 128 KiB."""
    if len(line) <= _PART_CHARS:
        return ["/bin/sh", "-c", line]
    parts = [line[start : start + _PART_CHARS] for start in range(0, len(line), _PART_CHARS)]
    joined = "".join(f"${{{number}}}" for number in range(1, len(parts) + 1))
    return ["/bin/sh", "-c", f'eval "set --\n{joined}"', "sh", *parts]
