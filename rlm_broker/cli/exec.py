"""`rlm-broker exec FILE`: run Python in a sandbox, without any model."""

import dataclasses
import json
import signal
import sys
import threading
from pathlib import Path
from typing import TYPE_CHECKING

import click

from rlm_broker.cli.failing import failures
from rlm_broker.cli.terminal import say
from rlm_broker.errors import ConfigurationError
from rlm_broker.types import Block

if TYPE_CHECKING:
    from rlm_broker.sandbox.output import OnOutput
    from rlm_broker.sandbox.repl import SandboxedRepl

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
exit codes: 0 it ran through, 1 it raised, crashed or exited with an error, 2 the command line is wrong,
3 a limit interrupted or killed it, 4 the sandbox cannot be had or failed"""


@click.command("exec", epilog=EXIT_CODES)
@click.argument("file")
@click.option("--timeout", type=float, metavar="SECONDS", help="Compute time (default 60).")
@click.option("--isolation", metavar="LEVEL", help="auto (default), strict, standard, or process (unprotected).")
@click.option("--limit", "assignments", multiple=True, metavar="NAME=VALUE", help="Any other limit.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
@click.option("--debug", is_flag=True, help="Show tracebacks of rlm-broker itself.")
def command(
    file: str, timeout: float | None, isolation: str | None, assignments: tuple[str, ...], as_json: bool, debug: bool
) -> None:
    """Run a Python FILE (- is stdin) in a sandbox of its own, without any model."""
    signal.signal(signal.SIGPIPE, _nobody_reads)
    with failures("exec", as_json=as_json, debug=debug):
        from rlm_broker.config import Settings, assigned  # what --help need not pay for
        from rlm_broker.sandbox.sandbox import Sandbox

        code = _read(file)
        settings = Settings(assigned(assignments, block_timeout_s=timeout, isolation=isolation))
        with Sandbox(settings.limits, settings["isolation"]) as sandbox, sandbox.repl() as repl:
            block = _run(repl, code, None if as_json else _echo)
            if as_json:
                shown = dataclasses.asdict(block) | {"isolation": dataclasses.asdict(repl.isolation)}
                click.echo(json.dumps(shown, ensure_ascii=False))
            elif block.status in ("interrupted", "killed"):
                say(f"rlm-broker exec: {block.status}: {block.error}", err=True)
    sys.exit(_exit_code(block))


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
    )


def _read(file: str) -> str:
    try:
        return (sys.stdin.buffer.read() if file == "-" else Path(file).read_bytes()).decode("utf-8-sig")
    except OSError as error:
        raise ConfigurationError(f"cannot read {file}: {error.strerror}") from None
    except UnicodeDecodeError as error:
        name = "stdin" if file == "-" else file
        raise ConfigurationError(f"{name} is not UTF-8 text: byte at offset {error.start}") from None


def _echo(stream: str, text: str) -> None:
    try:
        say(text, nl=False, err=stream == "stderr")
    except BrokenPipeError:
        signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGPIPE)  # nobody needs the rest


def _nobody_reads(*_: object) -> None:
    raise BrokenPipeError


def _exit_code(block: Block) -> int:
    if block.status == "exited":
        return 0 if block.exit_code == 0 else 1
    if block.status == "ok":
        return 0
    return 3 if block.limit else 1
