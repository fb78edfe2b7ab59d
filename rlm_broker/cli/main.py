"""`rlm-broker`: finds the command, and ends the process with the right exit code."""

import contextlib
import errno
import io
import os
import sys
from typing import NoReturn

import click

from rlm_broker.cli import signals
from rlm_broker.cli.commands import COMMANDS, RENAMED
from rlm_broker.cli.failures import fail
from rlm_broker.cli.parameters import Group

EXIT_CODES = """\b
exit codes:
  0  answered (NOT FOUND is an answer); exec: the file ran through
  1  failed; exec: it raised or crashed, and if it exited with a code, that one
  2  the command line or configuration is wrong
  3  a limit ended it; ask prints the partial answer
  4  the isolation asked for cannot be had, or the sandbox failed
  5  the model provider failed
  130, 143, 129  stopped by Ctrl+C, SIGTERM, SIGHUP

\b
completion of commands, options and files in bash, zsh or fish, by a line in ~/.bashrc or its like:
  eval "$(_RLM_BROKER_COMPLETE=bash_source rlm-broker)"
  eval "$(_RLM_BROKER_COMPLETE=zsh_source rlm-broker)"
  _RLM_BROKER_COMPLETE=fish_source rlm-broker | source"""


class _Commands(Group):
    """All commands, in the order of `COMMANDS`, and `help COMMAND` beside `COMMAND --help`."""

    def list_commands(self, ctx: click.Context) -> list[str]:  # noqa: ARG002 - click's signature
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:  # noqa: ARG002
        return COMMANDS[cmd_name][1] if cmd_name in COMMANDS else None

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        if args[0] == "help":
            if len(args) == 1:
                click.echo(ctx.get_help())
                ctx.exit()
            args = [*args[1:], "--help"]
        if args[0] in RENAMED:
            now = RENAMED[args[0]]
            click.echo(f"rlm-broker: `{args[0]}` is `{now}` now; the old word goes with the next release", err=True)
            args = [*now.split(), *args[1:]]
        return super().resolve_command(ctx, args)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:  # noqa: ARG002
        with formatter.section("Commands"):
            formatter.write_dl([(name, about) for name, (about, _) in COMMANDS.items()])


@click.command(cls=_Commands, epilog=EXIT_CODES, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(None, "-V", "--version", package_name="rlm-broker", prog_name="rlm-broker")
def cli() -> None:
    """Ask models about texts of any size: they write code, and a sandbox runs it."""


def main() -> None:
    """Run the console script."""
    if not sys.platform.startswith("linux"):
        click.echo("rlm-broker runs on Linux only: its sandbox is made of Linux kernel features", err=True)
        sys.exit(2)
    try:
        _prepare_streams()
        signals.listen()
        cli(prog_name="rlm-broker", standalone_mode=False)
        sys.stdout.flush()
    except click.exceptions.NoArgsIsHelpError as help_wanted:
        help_wanted.show()
        sys.exit(2)
    except click.ClickException as error:
        command = error.ctx.command_path if isinstance(error, click.UsageError) and error.ctx else "rlm-broker"
        message = error.format_message()
        stop = "" if message.endswith((".", "?", "?)")) else "."
        sentence = f"{message}{stop} See `{command} --help`."
        fail(command.partition(" ")[2], "usage", sentence, 2, as_json="--json" in sys.argv)
    except (click.Abort, KeyboardInterrupt):
        _leave_at_once(signals.exit_code())
    except SystemExit as end:
        if end.code != signals.exit_code():
            raise
        # No orderly end: it waits for an import in the background, and a second Ctrl+C would hit that.
        _leave_at_once(end.code)
    except OSError as error:
        _leave_without_output(error)


def _prepare_streams() -> None:
    """Open those of the three streams that the parent process has closed, and make them take any text.

    Python sets a closed stream to None. Lone surrogates have no bytes in any encoding, and are written as escapes. Such
    escapes are valid in JSON, too.
    """
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.devnull, mode))  # noqa: SIM115 - it lives as long as the process
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")


def _leave_without_output(error: OSError) -> NoReturn:
    """End the process if `error` says that output cannot be written; raise any other error again."""
    if isinstance(error, BrokenPipeError):
        _leave_at_once(1)
    if error.errno == errno.ENOSPC:
        _leave_at_once(1, "the output cannot be written: no space is left")
    if error.errno == errno.EIO:  # the terminal was closed
        _leave_at_once(signals.exit_code() if signals.has_come() else 1)
    raise error


def _leave_at_once(exit_code: int, why: str = "") -> NoReturn:
    """End the process without the interpreter's own end, which waits for imports on background threads.

    Sandboxes are closed by then, or end because their sockets do.
    """
    with contextlib.suppress(OSError, ValueError):
        if why:
            click.echo(f"rlm-broker: {why}", err=True)
        sys.stdout.flush()
        sys.stderr.flush()
    os._exit(exit_code)
