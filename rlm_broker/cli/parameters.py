"""Parameters and groups of several commands. `--help` imports this module, so it must not import much."""

import functools
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import click

from sandbox_worker.wire.level import LEVELS

Decorated = Callable[..., Any]

ISOLATION = click.Choice(("auto", *(level.name for level in LEVELS)))
"""Levels, as the setting `isolation` names them. The settings themselves would import pydantic, which takes 0.2 s."""
MODEL_POLICY = click.Choice(("allow", "pinned", "open"))
RECURSION = click.Choice(("always", "auto"))
PROMPT_PROFILE = click.Choice(("both", "final", "answer", "compact"))
FILE = click.Path()
"""A file that a shell completes. Whether it exists is found out, and said, when it is opened."""
FOLDER = click.Path(file_okay=False)
"""A folder, likewise."""
FROM_ENVIRONMENT = "env:"


def exists(path: str | Path) -> bool:
    """Whether a user's text is the path of a file or folder. A paragraph is not, for which `Path.exists` raises."""
    return os.path.exists(path)  # noqa: PTH110 - before Python 3.14, `Path` raises OSError for a name of 256 bytes


def is_folder(path: str | Path) -> bool:
    """Whether a user's text is the path of a folder, likewise."""
    return os.path.isdir(path)  # noqa: PTH112


class _Key(click.ParamType[str]):
    """The name of a variable that holds a key. A key itself is refused: all users see the arguments of a process."""

    name = "key"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> str:
        """Return the text as it is.

        Raises:
            click.BadParameter: It does not begin with `env:`. The message does not repeat it.
        """
        text = str(value)
        if not text.startswith(FROM_ENVIRONMENT):
            self.fail("write env:NAME of the variable that holds the key: other users see this line.", param, ctx)
        return text


KEY = _Key()
API_KEY = click.option("--api-key", type=KEY, metavar="env:NAME", help="Variable that holds the key of the model.")
BASE_URL = click.option("--base-url", metavar="URL", help="Address of an OpenAI-compatible server with the models.")


def sandbox_options(command: Decorated) -> Decorated:
    """Give a command the options of the sandbox in which model code runs."""
    options = (
        click.option(
            "--isolation", type=ISOLATION, help="Level of the sandbox (default auto); process is unprotected."
        ),
        click.option("--python", type=FOLDER, metavar="FOLDER", help="A virtual environment whose packages code has."),
        click.option("--packages", metavar="LIST", help="Packages to make such an environment of: 'numpy>=2 six'."),
        click.option(
            "--allow-exec/--no-allow-exec", default=None, help="Whether code may start programs (default: at strict)."
        ),
    )
    return _with(command, options)


def run_options(command: Decorated) -> Decorated:
    """Give a command the options of how a run goes."""
    options = (
        click.option("--model-policy", type=MODEL_POLICY, help="Which models code may name (default allow)."),
        click.option("--recursion", type=RECURSION, help="Which children get a REPL (default always)."),
        click.option(
            "--prompt-profile", type=PROMPT_PROFILE, help="What the model is told to end with (default both)."
        ),
    )
    return _with(command, options)


def cluster_options(command: Decorated) -> Decorated:
    """Give a command the options of the cluster on which runs take place. It gets all of them as `where`."""
    options = (
        click.option("--nodes", metavar="HOST:PORT", help="Run on nodes that join here, such as 0.0.0.0:7077."),
        click.option("--advertise", metavar="HOST[:PORT]", help="Address that nodes connect to, if it is another one."),
        click.option(
            "--token-file", type=FILE, metavar="FILE", help="File of the nodes' token; it is made if it does not exist."
        ),
        click.option("--plain", is_flag=True, help="Nodes connect in plain text: the network is yours alone."),
        click.option("--cluster", metavar="ADDRESS", help="Run on this Ray cluster, such as auto."),
        click.option("--join-timeout-s", type=float, metavar="S", help="Seconds to wait for a node (default 60)."),
    )

    @functools.wraps(command)
    def collected(*arguments: Any, **given: Any) -> Any:
        names = ("nodes", "advertise", "token_file", "plain", "cluster", "join_timeout_s")
        return command(*arguments, where={name: given.pop(name) for name in names}, **given)

    return _with(collected, options)


def _with(command: Decorated, options: Sequence[Callable[[Decorated], Decorated]]) -> Decorated:
    for option in reversed(options):  # the last decorator that is applied is the first in the help
        command = option(command)
    return command


class Group(click.Group):
    """A group that answers a mistyped command with the one that was meant."""

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        """Find the command.

        Raises:
            click.UsageError: There is no such command.
        """
        name = args[0]
        if name not in self.list_commands(ctx) and not name.startswith("-"):
            raise click.UsageError(f"No such command {name!r}{self.suggested(ctx, name) or '.'}", ctx)
        return super().resolve_command(ctx, args)

    def suggested(self, ctx: click.Context, name: str) -> str:
        """Return what ends the sentence about an unknown command; empty if no command is like it."""
        from rlm_broker.validation import did_you_mean  # imports pydantic, which --help need not wait for

        return did_you_mean(name, self.list_commands(ctx))
