"""`rlm-broker exec FILE ARGS...`: its options. What it does is in `executing`, imported when it is done."""

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
@click.option("--file", "files", multiple=True, metavar="LOCAL[=NAME]", help="A file to put beside it; repeatable.")
@click.option("--timeout", metavar="TIME", help="Compute time (default 60 s).")
@click.option("--isolation", type=ISOLATION, help="Level of the sandbox (default auto); process is unprotected.")
@click.option("--python", type=FOLDER, metavar="FOLDER", help="A virtual environment whose packages the code has.")
@click.option("--packages", metavar="LIST", help="Packages to make one of, such as 'numpy>=2 six'.")
@click.option("--allow-exec/--no-allow-exec", default=None, help="May it start programs? Default: at strict.")
@click.option("--limit", "assignments", multiple=True, metavar="NAME=VALUE", help="Any other limit: memory_bytes=64MB.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
@click.option("--debug", is_flag=True, help="Show tracebacks of rlm-broker itself.")
def command(file: str, arguments: tuple[str, ...], *, as_json: bool, debug: bool, **options: Any) -> None:
    """Run a Python FILE in a sandbox of its own, without any model, as `python FILE ARGS...` would.

    What stands behind FILE is the program's. It reads the stdin of this command, which is read to its end before it
    begins; a terminal is not read. With - in the place of FILE the program itself is read from stdin.
    """
    with failures("exec", as_json=as_json, debug=debug):
        from rlm_broker.cli import executing  # what --help need not pay for

        block = executing.execute(file, arguments, as_json=as_json, **options)
    sys.exit(executing.exit_code(block))
