"""`rlm-broker exec FILE`: run Python in a sandbox, without any model."""

import dataclasses
import json
import sys
from pathlib import Path

import click

from rlm_broker.cli.failing import failures
from rlm_broker.cli.terminal import say
from rlm_broker.errors import ConfigurationError
from rlm_broker.types import Block

NO_DISPLAY = "\nNone\n"
"""A file is a program, and not typed at a prompt: the value of its last line is not shown."""

EXIT_CODES = """\b
exit codes: 0 it ran through, 1 it raised or exited with an error, 2 the command line is wrong,
3 it was interrupted or killed at a limit, 4 the sandbox cannot be had or failed"""


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
    with failures("exec", as_json=as_json, debug=debug):
        from rlm_broker.config import Settings, assigned  # what --help need not pay for
        from rlm_broker.sandbox.sandbox import Sandbox

        code = _read(file)
        named = {"block_timeout_s": timeout, "isolation": isolation}
        given = {name: value for name, value in named.items() if value is not None}
        settings = Settings(assigned(assignments) | given)
        with Sandbox(settings.limits, settings["isolation"]) as sandbox, sandbox.repl() as repl:
            block = repl.execute(code + NO_DISPLAY, on_output=None if as_json else _echo)
            if as_json:
                shown = dataclasses.asdict(block) | {"code": code} | {"isolation": dataclasses.asdict(repl.isolation)}
                click.echo(json.dumps(shown, ensure_ascii=False))
            elif block.status in ("interrupted", "killed"):
                say(f"rlm-broker exec: {block.status}: {block.error}", err=True)
    sys.exit(_exit_code(block))


def _read(file: str) -> str:
    try:
        return (sys.stdin.buffer.read() if file == "-" else Path(file).read_bytes()).decode()
    except OSError as error:
        raise ConfigurationError(f"cannot read {file}: {error.strerror}") from None
    except UnicodeDecodeError as error:
        name = "stdin" if file == "-" else file
        raise ConfigurationError(f"{name} is not UTF-8 text: byte at offset {error.start}") from None


def _echo(stream: str, text: str) -> None:
    say(text, nl=False, err=stream == "stderr")


def _exit_code(block: Block) -> int:
    if block.status == "exited":
        return 0 if block.exit_code == 0 else 1
    return {"ok": 0, "error": 1}.get(block.status, 3)
