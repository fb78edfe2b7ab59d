"""What `rlm-broker exec` does: a program goes into a REPL with its arguments, its files and its stdin, and is run to
its end."""

import dataclasses
import select
import signal
import sys
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path, PurePath
from typing import TYPE_CHECKING, BinaryIO

from rlm_broker.cli.terminal import say, say_if_typed
from rlm_broker.errors import ConfigurationError, FileRefused
from rlm_broker.results import Block
from rlm_broker.sandbox.sandbox import Sandbox
from rlm_broker.settings.settings import Settings, assigned
from rlm_broker.shown import as_json as to_json
from rlm_broker.shown import jsonable

if TYPE_CHECKING:
    from rlm_broker.limits import Limits
    from rlm_broker.sandbox.blocks.output import OnOutput
    from rlm_broker.sandbox.repl import SandboxedRepl

STDIN = "-"
"""In the place of a program's file: the program is read from there, and has no stdin itself."""
OF_SOURCE = "utf-8-sig"
"""Encoding of a program, which editors of some systems begin with a mark."""
SILENCE_S = 1.0
"""After so long without a byte on stdin the user is told what is waited for."""
OUTPUT_LOST = signal.SIGUSR1
OF_LIMITS = {
    "MemoryError": "memory_bytes",
    "RuntimeError: can't start new thread": "max_processes",
    "BlockingIOError: [Errno 11]": "max_processes",
}
"""Start of an error: the limit that it most likely comes from."""
NO_DISPLAY = "\nNone\n"
"""A file is a program, and not typed at a prompt: the value of its last line is not shown."""
AT_ITS_START = """
__import__("sys").argv[:] = {argv!r}
__import__("sys").path.insert(0, __import__("os").getcwd())
"""
ITS_BLOCK = "<block 2>"
"""What tracebacks call the program: the block that follows `AT_ITS_START`. Its own name is put in its place."""
ITS_FILE = '__file__ = __import__("os").path.abspath({name!r})\n'
"""What the interpreter does before a program begins, but that no name is left in the program's own."""
AT_ITS_END = """
import atexit, threading
for thread in threading.enumerate():
    if thread is not threading.current_thread() and not thread.daemon:
        thread.join()
atexit._run_exitfuncs()
"""
"""What the interpreter does when a program has come to its end."""


@dataclasses.dataclass(frozen=True)
class Program:
    """What is run.

    Attributes:
        code: Its text.
        argv: What it finds in `sys.argv`.
        name: Of its file in the scratch folder; None of one that came by stdin.
        stdin: What it may read; None is nothing.
    """

    code: str
    argv: Sequence[str]
    name: str | None
    stdin: str | None


def execute(
    file: str,
    arguments: Sequence[str],
    *,
    timeout: str | None,
    files: Sequence[str],
    assignments: Sequence[str],
    as_json: bool,
    **flags: str | bool | None,
) -> Block:
    """Run a program and print its output as it comes, or all of it as JSON; return what came of it."""
    settings = Settings(assigned(assignments, block_timeout_s=timeout, **flags))
    program = _program(file, arguments, settings.limits.max_frame_bytes)
    placed = _placed(files, program.name)
    made = Sandbox(
        settings.limits,
        settings["isolation"],
        allow_exec=settings["allow_exec"],
        python=settings["python"],
        packages=settings.packages,
    )
    try:
        with made as sandbox, sandbox.repl() as repl:
            repl.kills_when_cancelled = True
            _put(repl, program, placed)
            block = _at_its_limit(_run(repl, program, None if as_json else _Echo(program)))
            block = dataclasses.replace(block, stderr=_with_its_name(block.stderr, program))
            if as_json:
                say(to_json(jsonable(block) | {"isolation": jsonable(repl.isolation)}))
            else:
                for line in _notes(block, settings.limits):
                    say(f"rlm-broker exec: {line}", err=True)
    except _OutputLost as lost:
        raise lost.error from None
    return block


def exit_code(block: Block) -> int:
    """Return the exit code that a program has by `python`, or 3 where a limit ended it."""
    if block.status == "exited":
        return block.exit_code or 0
    if block.status == "ok":
        return 0
    return 3 if block.limit else 1


# -- what goes in ------------------------------------------------------------------------------------------------------


def _program(file: str, arguments: Sequence[str], max_bytes: int) -> Program:
    argv = [file, *arguments]
    if file == STDIN:
        say_if_typed()
        return Program(_text(sys.stdin.buffer, "stdin", max_bytes, OF_SOURCE), argv, None, None)
    try:
        with open(file, "rb") as opened:
            code = _text(opened, file, max_bytes, OF_SOURCE)
    except (OSError, ValueError) as error:
        raise ConfigurationError(f"cannot read {file}: {getattr(error, 'strerror', None) or error}") from None
    return Program(code, argv, PurePath(file).name, _stdin(max_bytes))


def _stdin(max_bytes: int) -> str | None:
    """Return what there is to read until stdin ends: a REPL has it before its code begins. A terminal is not read."""
    if sys.stdin.isatty():
        return None
    if not select.select([sys.stdin], [], [], SILENCE_S)[0]:
        say("reading stdin to its end; give the program none by </dev/null", err=True)
    return _text(sys.stdin.buffer, "stdin", max_bytes)


def _text(source: BinaryIO, name: str, max_bytes: int, encoding: str = "utf-8") -> str:
    """Read text to its end. More than one message can hold is refused before it is held."""
    data = source.read(max_bytes + 1)
    if len(data) > max_bytes:
        how = "give data as a file, by --file" if name == "stdin" else "raise it by --limit"
        raise ConfigurationError(f"{name} has more than max_frame_bytes = {max_bytes:,}: {how}")
    try:
        return data.decode(encoding)
    except UnicodeDecodeError as error:
        raise ConfigurationError(f"{name} is not UTF-8 text: byte at offset {error.start}") from None


def _placed(files: Sequence[str], program: str | None) -> dict[str, str]:
    """Return name in the scratch folder -> file of the host, of what `--file` was given."""
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


def _put(repl: "SandboxedRepl", program: Program, placed: Mapping[str, str]) -> None:
    """Write the program and its files into the scratch folder, in which it runs."""
    try:
        for name, local in placed.items():
            repl.files.write(name, Path(local))
        if program.name is not None:
            repl.files.write(program.name, program.code.encode())
    except FileRefused as refused:
        raise ConfigurationError(f"no room in the scratch folder: {refused}") from None


# -- its run -----------------------------------------------------------------------------------------------------------


def _run(repl: "SandboxedRepl", program: Program, on_output: "OnOutput | None") -> Block:
    beginning = AT_ITS_START.format(argv=[*program.argv])
    beginning += "" if program.name is None else ITS_FILE.format(name=program.name)
    start = repl.execute(beginning, on_output=on_output)
    if start.status != "ok":
        return start
    block = repl.execute(program.code + NO_DISPLAY, on_output=on_output, stdin=program.stdin)
    if block.status == "killed":
        return block
    end = repl.execute(AT_ITS_END, on_output=on_output)
    return dataclasses.replace(
        block if end.status == "ok" else end,
        code=program.code,
        stdout=block.stdout + end.stdout,
        stderr=block.stderr + end.stderr,
        execution_time=block.execution_time + end.execution_time,
        displays=block.displays + end.displays,
        displays_omitted=block.displays_omitted + end.displays_omitted,
    )


def _at_its_limit(block: Block) -> Block:
    """Name the limit if the program ended by an exception that the kernel's refusal of more becomes in Python."""
    found = next((limit for error, limit in OF_LIMITS.items() if block.error and block.error.startswith(error)), None)
    return block if block.limit or not found else dataclasses.replace(block, limit=found)


# -- what comes out ----------------------------------------------------------------------------------------------------


def _notes(block: Block, limits: "Limits") -> list[str]:
    """Return what the program's output does not tell."""
    notes = []
    if shown := len(block.displays) + block.displays_omitted:
        notes.append(f"shown beside the output: {shown:,} (see --json)")
    if block.status in ("interrupted", "killed") or (block.status == "error" and not block.stderr):
        notes.append(f"{block.status}: {block.error}")
    elif block.limit:
        notes.append(f"it ended at the limit {block.limit} = {getattr(limits, block.limit):,}: {block.error}")
    elif block.error and block.error.startswith("EOFError") and sys.stdin.isatty():
        notes.append("a terminal is not read: give what the program reads by a pipe or a file, such as <answers.txt")
    return notes


def _with_its_name(text: str, program: Program) -> str:
    """Return output with the program's file named in tracebacks, as the interpreter names it."""
    file = "<stdin>" if program.name is None else program.argv[0]
    return text.replace(f'  File "{ITS_BLOCK}", line ', f'  File "{file}", line ')


class _OutputLost(BaseException):
    """What interrupts the main thread when output cannot be written.

    It is no OSError: asyncio passes over an OSError of the write that wakes a loop, in which the signal may find the
    main thread. The program would then run on without a reader.
    """

    def __init__(self, error: OSError) -> None:
        super().__init__(error)
        self.error = error


class _Echo:
    """Prints output of the program as it comes, on the event loop's thread, until it cannot be written.

    That ends the command: a signal interrupts the main thread, which waits for the program. It is not SIGPIPE, which
    the kernel also sends for the main thread's own writes, beside their BrokenPipeError: two exceptions, of which the
    second would leave the handling of the first as a traceback.
    """

    def __init__(self, program: Program) -> None:
        self._program = program
        self._lost: OSError | None = None
        signal.signal(OUTPUT_LOST, self._stop)

    def __call__(self, stream: str, text: str) -> None:
        """Print `text`."""
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
