"""`rlm-broker exec FILE ARGS...`: a program runs in a REPL, with its arguments, files and stdin.

A REPL runs blocks, and not programs: `SandboxedRepl.execute_script` makes blocks of it.
"""

import asyncio
import dataclasses
import errno
import json
import os
import signal
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path, PurePath
from typing import TYPE_CHECKING, Any, BinaryIO, Final

import click

from rlm_broker.cli.settings.settings import Settings, assigned
from rlm_broker.cli.sources import STDIN
from rlm_broker.cli.terminal import say, say_if_typed
from rlm_broker.errors import ConfigurationError, FileRefused, RlmBrokerError
from rlm_broker.limits import ReplLimits
from rlm_broker.results import Block
from rlm_broker.sandbox.sandbox import Sandbox
from rlm_broker.values.host_files import refusal_told
from rlm_broker.watch.server import ControlSocket

if TYPE_CHECKING:
    from rlm_broker.broker.transport.session import Stdin
    from rlm_broker.limits import Limits
    from rlm_broker.sandbox.repl import SandboxedRepl

OF_SOURCE = "utf-8-sig"
"""Encoding of a program: UTF-8, with or without the byte order mark that some editors write."""
READ_BYTES = 1 << 16
"""Bytes of stdin read at once."""
OUTPUT_LOST = signal.SIGUSR1
"""Interrupts the main thread when the reader of the output has gone; see `_Echo`."""
OF_LIMITS = {
    "MemoryError": "memory_bytes",
    "RuntimeError: can't start new thread": "max_processes",
    "BlockingIOError: [Errno 11]": "max_processes",
}
"""Beginning of an error of Python -> the limit that most likely caused it."""
OF_SANDBOX = ("isolation", "python", "packages", "allow_exec")
"""Settings of a sandbox. Beside them, `exec` has limits of a REPL alone."""
PICTURES: Final[Mapping[str, str]] = {"image/png": "png", "image/jpeg": "jpg", "image/svg+xml": "svg"}
"""Form of a picture -> the ending of its file."""
ITS_BLOCK = "<block 2>"
"""File name of the program in tracebacks. Its own name is put in its place."""


@dataclasses.dataclass(frozen=True)
class Script:
    """A program to run.

    Attributes:
        code: Its source.
        argv: Its `sys.argv`.
        name: Name of its file in the scratch folder; None if it was read from stdin.
        stdin: Function that reads more of its stdin; None makes each read an EOFError.
    """

    code: str
    argv: Sequence[str]
    name: str | None
    stdin: "Stdin | None"


def run(file: str | None, arguments: Sequence[str], **options: Any) -> int:
    """Run a program, and return the exit code that `python` would give it, or 3 if a limit ended it."""
    block = execute(file, arguments, **options)
    if block.status == "exited":
        return block.exit_code or 0
    if block.status == "ok":
        return 0
    return 3 if block.limit or block.status == "interrupted" else 1


def execute(
    file: str | None,
    arguments: Sequence[str],
    *,
    code: str | None,
    out: Path | None,
    timeout: str | None,
    files: Sequence[str],
    assignments: Sequence[str],
    as_json: bool,
    **flags: str | bool | None,
) -> Block:
    """Run a program, and print its output as it comes or, with `as_json`, all of it as one object at the end.

    Returns:
        The program's block: its source, its whole output and how it ended.

    Raises:
        ConfigurationError: A file or a setting cannot be used.
        SandboxFailed, IsolationUnavailable: There is no sandbox.
        OSError: The output cannot be written.
    """
    settings = Settings(_of_sandbox(assigned(assignments, block_timeout_s=timeout, **flags)))
    if code is not None:
        given = arguments if file is None else [file, *arguments]
        program = Script(code, ["-c", *given], None, more_stdin)
    elif file is None:
        raise click.UsageError("Missing argument 'FILE': name a program, or give one by -c CODE.")
    else:
        program = _program(file, arguments, settings.limits.max_frame_bytes)
    placed = _placed(files, program.name)
    made = Sandbox(
        settings.limits.replace(checkpoint="never", max_replay_s=0),  # a killed program is over: keep what it wrote
        settings["isolation"],
        allow_exec=settings["allow_exec"],
        python=settings["python"],
        packages=settings.packages,
    )
    if out is not None:
        _require_writable(out)
    try:
        with ControlSocket("exec"), made as sandbox, sandbox.repl() as repl:
            repl.kills_when_cancelled = True
            _put(repl, program, placed)
            told = None if as_json else _Echo(program)
            block = repl.execute_script(program.code, program.argv, program.name, stdin=program.stdin, on_output=told)
            block = _at_its_limit(block)
            kept, lost = ([], []) if out is None else _kept(repl, block, out, {*placed, program.name})
            block = dataclasses.replace(block, stderr=_with_its_name(block.stderr, program))
            if as_json:
                shown = block.to_dict() | {"isolation": dataclasses.asdict(repl.isolation)}
                say(json.dumps(shown, ensure_ascii=False))
            else:
                for line in [*_notes(block, settings.limits), *(f"kept {each}" for each in kept)]:
                    say(f"rlm-broker exec: {line}", err=True)
            if lost:
                raise ConfigurationError(f"not kept: {'; '.join(lost)}")
    except _OutputLost as lost:
        raise lost.error from None
    return block


def _of_sandbox(given: dict[str, Any]) -> dict[str, Any]:
    """Return the settings of the command line. Those of models and runs are refused."""
    for name in given.keys() - {*ReplLimits.fields, *OF_SANDBOX}:
        raise ConfigurationError(f"--limit {name} has no effect on exec, which runs a program without any model")
    return given


# -- what goes in ------------------------------------------------------------------------------------------------------


def _program(file: str, arguments: Sequence[str], max_bytes: int) -> Script:
    argv = [file, *arguments]
    if file == STDIN:  # the program is read from there, and gets no stdin itself
        say_if_typed()
        return Script(_source(sys.stdin.buffer, "stdin", max_bytes), argv, None, None)
    with refusal_told(f"cannot read {file}"), open(file, "rb") as opened:
        code = _source(opened, file, max_bytes)
    return Script(code, argv, PurePath(file).name, more_stdin)


async def more_stdin() -> bytes:
    """Return what stdin has, once there is something; nothing at its end. The loop goes on meanwhile."""
    loop, fd, readable = asyncio.get_running_loop(), sys.stdin.fileno(), asyncio.Event()
    while True:
        try:
            loop.add_reader(fd, readable.set)
        except PermissionError:  # a file, which need not be waited for
            return os.read(fd, READ_BYTES)
        try:
            await readable.wait()
            return os.read(fd, READ_BYTES)
        except BlockingIOError:  # another reader of the pipe has taken what there was
            readable.clear()
        finally:
            loop.remove_reader(fd)


def _source(opened: BinaryIO, name: str, max_bytes: int) -> str:
    """Read a program to its end. More than `max_bytes` is refused before it is in memory."""
    data = opened.read(max_bytes + 1)
    if len(data) > max_bytes:
        raise ConfigurationError(f"{name} has more than max_frame_bytes = {max_bytes:,}: raise it by --limit")
    try:
        return data.decode(OF_SOURCE)
    except UnicodeDecodeError as error:
        raise ConfigurationError(f"{name} is not UTF-8 text: byte at offset {error.start}") from None


def _placed(files: Sequence[str], program: str | None) -> dict[str, str]:
    """Return name in the scratch folder -> file of the host, for the values of `--file`."""
    placed: dict[str, str] = {}
    for each in files:
        local, separator, name = each.rpartition("=")
        if not separator:
            local, name = each, PurePath(each).name
        if not local or not name:
            raise ConfigurationError(f"--file {each}: give LOCAL or LOCAL=NAME, for example /srv/table.csv=data.csv")
        name = str(PurePath(name))
        if name in (*placed, program):
            raise ConfigurationError(f"--file {each}: there is a file {name} already: give it a name by LOCAL=NAME")
        placed[name] = local
    return placed


def _put(repl: "SandboxedRepl", program: Script, placed: Mapping[str, str]) -> None:
    """Write the program and its files into the scratch folder, which is its current folder."""
    try:
        for name, local in placed.items():
            repl.files.write(name, Path(local))
        if program.name is not None:
            repl.files.write(program.name, program.code.encode())
    except FileRefused as refused:
        where = "no room in the scratch folder: " if refused.kind == "no_room" else ""
        raise ConfigurationError(f"{where}{refused}") from None


def _require_writable(out: Path) -> None:
    """Make the folder of `--out` before the program runs: what it makes could not be kept after it.

    Raises:
        ConfigurationError: It cannot be written to, or has files: like `ask -o`, the command replaces none.
    """
    with refusal_told(f"cannot write into {out}"):
        out.mkdir(parents=True, exist_ok=True)
        if any(out.iterdir()):
            raise ConfigurationError(f"{out} has files already: name a new folder, or an empty one")
        if not os.access(out, os.W_OK | os.X_OK):
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))


# -- its run -----------------------------------------------------------------------------------------------------------


def _at_its_limit(block: Block) -> Block:
    """Name the limit if the program ended by an exception standing for a refusal of memory or of a process."""
    found = next((limit for error, limit in OF_LIMITS.items() if block.error and block.error.startswith(error)), None)
    return block if block.limit or not found else dataclasses.replace(block, limit=found)


# -- what comes out ----------------------------------------------------------------------------------------------------


def _notes(block: Block, limits: "Limits") -> list[str]:
    """Return notes on what the program's output does not tell: displays, limits, kills."""
    notes = []
    if shown := len(block.displays) + block.displays_omitted:
        notes.append(f"shown beside the output: {shown:,} (see --json)")
    if block.status in ("interrupted", "killed") or (block.status == "error" and not block.stderr):
        notes.append(f"{block.status}: {block.error}")
    elif block.limit:
        notes.append(f"it ended at the limit {block.limit} = {getattr(limits, block.limit):,}: {block.error}")
    return notes


def _kept(repl: "SandboxedRepl", block: Block, out: Path, given: set[str | None]) -> tuple[list[Path], list[str]]:
    """Save files and pictures of the program. Return the paths of those that are saved, and why each other one is not.

    The program chooses the names: hidden files, and names that could steer a terminal, are left. So are folders.
    """
    saves: dict[Path, Callable[[Path], object]] = {}
    for entry in repl.files.list():
        if entry.kind == "file" and entry.name not in given and entry.name.isprintable() and entry.name[:1] != ".":
            saves[out / entry.name] = partial(repl.files.save, entry.name)
    for number, display in enumerate(block.displays, 1):
        for mime, data in display.data.items():
            if ending := PICTURES.get(mime):
                content = data if isinstance(data, bytes) else data.encode(errors="replace")
                saves[out / f"picture-{number}.{ending}"] = partial(Path.write_bytes, data=content)
    kept, lost = [], []
    for path, save in saves.items():
        try:
            save(path)
            kept.append(path)
        except (RlmBrokerError, OSError) as error:
            lost.append(str(error))
    return kept, lost


def _with_its_name(text: str, program: Script) -> str:
    """Return output with the program's file named in tracebacks, as the interpreter names it."""
    file = {STDIN: "<stdin>", "-c": "<string>"}.get(program.argv[0], program.argv[0])
    return text.replace(f'  File "{ITS_BLOCK}", line ', f'  File "{file}", line ')


class _OutputLost(BaseException):
    """An interruption of the main thread, raised when output cannot be written.

    It is no OSError: asyncio passes over an OSError of the write that wakes a loop, and the signal may find the main
    thread in that write. The program would then run on without a reader.
    """

    def __init__(self, error: OSError) -> None:
        super().__init__(error)
        self.error = error


class _Echo:
    """Prints the program's output as it comes, on the event loop's thread, until it cannot be written.

    Then the command ends: a signal interrupts the main thread, which waits for the program. The signal is not SIGPIPE.
    The kernel sends SIGPIPE also for the main thread's own writes, beside their BrokenPipeError: the second of these
    two exceptions would be raised within the handling of the first, and be shown as a traceback.
    """

    def __init__(self, program: Script) -> None:
        self._program = program
        self._lost: OSError | None = None
        signal.signal(OUTPUT_LOST, self._stop)

    def __call__(self, stream: str, text: str) -> None:
        """Print a piece of output; drop it if an earlier piece could not be written."""
        if self._lost is not None:
            return
        try:
            is_error = stream == "stderr"
            say(_with_its_name(text, self._program) if is_error else text, nl=False, err=is_error)
        except OSError as error:
            self._lost = error
            signal.pthread_kill(threading.main_thread().ident or 0, OUTPUT_LOST)

    def _stop(self, *_: object) -> None:
        if self._lost is not None:
            raise _OutputLost(self._lost)
