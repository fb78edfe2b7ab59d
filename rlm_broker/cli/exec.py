"""The command line of `rlm-broker exec FILE ARGS...`. Its work is in `executing`, which `--help` does not import."""

import sys
from typing import Any

import click

from rlm_broker.cli.failing import failures
from rlm_broker.cli.parameters import FILE, FOLDER, ISOLATION

EXIT_CODES = """\b
exit codes: 0 it ran through, its own if it exited with one, 1 it raised or crashed, 2 the command line is wrong,
3 a limit ended, interrupted or killed it, 4 the sandbox cannot be had or failed,
130, 143, 129 stopped by Ctrl+C, SIGTERM, SIGHUP"""


@click.command("exec", epilog=EXIT_CODES, context_settings={"allow_interspersed_args": False})
@click.argument("file", type=FILE)
@click.argument("arguments", nargs=-1, type=click.UNPROCESSED, metavar="[ARGS]...")
@click.option(
    "--file", "files", multiple=True, metavar="LOCAL[=NAME]", help="A file to put beside the program; repeatable."
)
@click.option("--timeout", metavar="TIME", help="Compute time, such as 90s or 1h30m (default 60 s).")
@click.option("--isolation", type=ISOLATION, help="Level of the sandbox (default auto); process is unprotected.")
@click.option("--python", type=FOLDER, metavar="FOLDER", help="A virtual environment whose packages the code has.")
@click.option("--packages", metavar="LIST", help="Packages to make such an environment of: 'numpy>=2 six'.")
@click.option("--allow-exec/--no-allow-exec", default=None, help="Whether it may start programs (default: at strict).")
@click.option("--limit", "assignments", multiple=True, metavar="NAME=VALUE", help="Any other limit: memory_bytes=64MB.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
@click.option("--debug", is_flag=True, help="Show tracebacks of rlm-broker itself.")
def command(file: str, arguments: tuple[str, ...], *, as_json: bool, debug: bool, **options: Any) -> None:
    """Run a Python FILE in a sandbox of its own, without any model, as `python FILE ARGS...` would.

    All arguments behind FILE are the program's. The program gets the stdin of this command, which is read to its end
    before the program begins; a terminal is not read. If FILE is -, the program itself is read from stdin.
    """
    with failures("exec", as_json=as_json, debug=debug):
        from rlm_broker.cli import executing  # imports pydantic, which --help need not wait for

        block = executing.execute(file, arguments, as_json=as_json, **options)
    sys.exit(executing.exit_code(block))
