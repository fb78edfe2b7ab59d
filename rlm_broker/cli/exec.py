"""`rlm-broker exec FILE`: run Python in a sandbox, without any model."""

import dataclasses
import signal
import sys
import threading
from pathlib import Path
from typing import TYPE_CHECKING

import click

from rlm_broker.cli.failing import failures
from rlm_broker.cli.terminal import say, say_if_typed
from rlm_broker.errors import ConfigurationError
from rlm_broker.results import Block
from rlm_broker.shown import as_json as to_json
from rlm_broker.shown import jsonable

if TYPE_CHECKING:
    from rlm_broker.limits import Limits
    from rlm_broker.sandbox.blocks.output import OnOutput
    from rlm_broker.sandbox.repl import SandboxedRepl

OUTPUT_LOST = signal.SIGUSR1
OF_LIMITS = {
    "MemoryError": "memory_bytes",
    "RuntimeError: can't start new thread": "max_processes",
    "BlockingIOError: [Errno 11]": "max_processes",
}
"""Start of an error: the limit that it most likely comes from."""
NO_DISPLAY = "\nNone\n"
"""A file is a program, and not typed at a prompt: the value of its last line is not shown."""
AT_ITS_END = """
import atexit, threading
for thread in threading.enumerate():
    if thread is not threading.current_thread() and not thread.daemon:
        thread.join()
atexit._run_exitfuncs()
"""
"""What the interpreter does when a program has come to its end."""

EXIT_CODES = """\b
exit codes: 0 it ran through, its own if it exited with one, 1 it raised or crashed, 2 the command line is wrong,
3 a limit ended, interrupted or killed it, 4 the sandbox cannot be had or failed,
130, 143, 129 stopped by Ctrl+C, SIGTERM, SIGHUP"""


@click.command("exec", epilog=EXIT_CODES)
@click.argument("file")
@click.option("--timeout", type=float, metavar="SECONDS", help="Compute time (default 60).")
@click.option("--isolation", metavar="LEVEL", help="auto (default), strict, standard, or process (unprotected).")
@click.option("--python", metavar="FOLDER", help="A virtual environment whose packages the code has.")
@click.option("--packages", metavar="LIST", help="Packages to make one of, such as 'numpy>=2 six'.")
@click.option("--limit", "assignments", multiple=True, metavar="NAME=VALUE", help="Any other limit.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
@click.option("--debug", is_flag=True, help="Show tracebacks of rlm-broker itself.")
def command(
    file: str, timeout: float | None, assignments: tuple[str, ...], as_json: bool, debug: bool, **options: str | None
) -> None:
    """Run a Python FILE (- is stdin) in a sandbox of its own, without any model."""
    with failures("exec", as_json=as_json, debug=debug):
        from rlm_broker.sandbox.sandbox import Sandbox
        from rlm_broker.settings.settings import Settings, assigned  # what --help need not pay for

        code = _read(file)
        settings = Settings(assigned(assignments, block_timeout_s=timeout, **options))
        made = Sandbox(settings.limits, settings["isolation"], python=settings["python"], packages=settings.packages)
        with made as sandbox, sandbox.repl() as repl:
            repl.kills_when_cancelled = True
            block = _at_its_limit(_run(repl, code, None if as_json else _Echo()))
            if as_json:
                click.echo(to_json(jsonable(block) | {"isolation": jsonable(repl.isolation)}))
            else:
                for line in _notes(block, settings.limits):
                    say(f"rlm-broker exec: {line}", err=True)
    sys.exit(_exit_code(block))


def _notes(block: Block, limits: "Limits") -> list[str]:
    """What the program's output does not tell."""
    notes = []
    if shown := len(block.displays) + block.displays_omitted:
        notes.append(f"shown beside the output: {shown:,} (see --json)")
    if block.status in ("interrupted", "killed"):
        notes.append(f"{block.status}: {block.error}")
    elif block.limit:
        notes.append(f"it ended at the limit {block.limit} = {getattr(limits, block.limit):,}: {block.error}")
    return notes


def _run(repl: "SandboxedRepl", code: str, on_output: "OnOutput | None") -> Block:
    block = repl.execute(code + NO_DISPLAY, on_output=on_output)
    if block.status == "killed":
        return block
    end = repl.execute(AT_ITS_END, on_output=on_output)
    return dataclasses.replace(
        block if end.status == "ok" else end,
        code=code,
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


def _read(file: str) -> str:
    if file == "-":
        say_if_typed()
    try:
        return (sys.stdin.buffer.read() if file == "-" else Path(file).read_bytes()).decode("utf-8-sig")
    except OSError as error:
        raise ConfigurationError(f"cannot read {file}: {error.strerror}") from None
    except UnicodeDecodeError as error:
        name = "stdin" if file == "-" else file
        raise ConfigurationError(f"{name} is not UTF-8 text: byte at offset {error.start}") from None


class _Echo:
    """Prints output of the program as it comes, on the event loop's thread, until it cannot be written.

    That ends the command: a signal interrupts the main thread, which waits for the program. It is not SIGPIPE, which
    the kernel also sends for the main thread's own writes, beside their BrokenPipeError: two exceptions, of which the
    second would leave the handling of the first as a traceback.
    """

    def __init__(self) -> None:
        self._lost: OSError | None = None
        signal.signal(OUTPUT_LOST, self._stop)

    def __call__(self, stream: str, text: str) -> None:
        """Print `text`."""
        if self._lost is not None:
            return
        try:
            say(text, nl=False, err=stream == "stderr")
        except OSError as error:
            self._lost = error
            signal.pthread_kill(threading.main_thread().ident or 0, OUTPUT_LOST)

    def _stop(self, *_: object) -> None:
        if self._lost is not None:
            raise self._lost


def _exit_code(block: Block) -> int:
    if block.status == "exited":
        return block.exit_code or 0
    if block.status == "ok":
        return 0
    return 3 if block.limit else 1
