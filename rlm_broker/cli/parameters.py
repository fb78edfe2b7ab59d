"""Kinds of commands, options and values of the command line. `--help` imports this module: it imports `click` alone."""

import gc
import importlib
import os
import sys
from collections.abc import Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any, get_args

import click

from rlm_broker.cli.failures import failures
from rlm_broker.values.extras import require_extra
from sandbox_worker.wire.level import LevelName

FILE = click.Path()
"""A file whose name a shell completes. If it does not exist, the user is told so when it is opened."""
FOLDER = click.Path(file_okay=False)
"""A folder, likewise."""
PATH = click.Path(path_type=Path)
"""The same as a `Path`."""
ISOLATION = click.Choice(("auto", *get_args(LevelName)))
"""Levels, as the setting `isolation` names them. The module of the levels takes longer to import."""
FROM_ENVIRONMENT = "env:"


def exists(path: str | Path) -> bool:
    """Whether a user's text is the path of a file or folder. A paragraph is not; `Path.exists` may raise for it."""
    return os.path.exists(path)  # noqa: PTH110 - before Python 3.14, `Path` raises OSError for a name of 256 bytes


def is_folder(path: str | Path) -> bool:
    """Whether a user's text is the path of a folder, likewise."""
    return os.path.isdir(path)  # noqa: PTH112


class KeyVariable(click.ParamType[str]):
    """The name of a variable holding a key. A key itself is refused: all users see the arguments of a process."""

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


class Option(click.Option):
    """An option of one value. A metavar says what the value is.

    Args:
        names: Its flags, and the name of its parameter if that is another one: `"--json as_json"`.
        metavar: What the help shows for the value.
        help: One sentence.
        multiple: Whether it may be given several times.
    """

    def __init__(
        self,
        names: str,
        metavar: str,
        help: str,
        *,
        type: click.ParamType[Any] | type | None = None,
        default: Any = None,
        multiple: bool = False,
        required: bool = False,
    ) -> None:
        super().__init__(
            names.split(), metavar=metavar, help=help, type=type, default=default, multiple=multiple, required=required
        )


class Flag(click.Option):
    """An option without a value. Flags of one parameter put their own `value` into a tuple."""

    def __init__(
        self, names: str, help: str, *, default: bool | None = False, value: str | None = None, hidden: bool = False
    ) -> None:
        if value is None:
            super().__init__(names.split(), is_flag=True, help=help, default=default, hidden=hidden)
        else:
            super().__init__(names.split(), is_flag=True, help=help, flag_value=value, multiple=True, hidden=hidden)


class LazyCommand(click.Command):
    """A command whose work is a function in a module that is imported only when the command is called.

    The import may take a second, and `--help` need not wait for it. The function gets each parameter by its name. It
    returns the exit code, or None for 0. Errors that the library raises on purpose end the command with one sentence.

    Args:
        name: Its name.
        help: What it does.
        parameters: Its arguments and options, in the order of the help.
        epilog: What the help ends with.
        work: `MODULE` or `MODULE.FUNCTION` in `rlm_broker.cli`; the function is `run` if none is named.
        extra: Extra of the installation with the packages that the module imports.
        context_settings: As `click.Command` has them.
    """

    def __init__(
        self,
        name: str,
        help: str,
        parameters: Sequence[click.Parameter] = (),
        *,
        epilog: str,
        work: str = "",
        extra: str = "",
        context_settings: dict[str, Any] | None = None,
    ) -> None:
        super().__init__(
            name,
            help=help,
            params=list(parameters),
            epilog=epilog,
            callback=self._call,
            context_settings=context_settings,
        )
        self._work = work or name
        self._extra = extra

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Read the arguments. click names no command where the value of an option is missing."""
        try:
            return super().parse_args(ctx, args)
        except click.UsageError as error:
            error.ctx = error.ctx or ctx
            raise

    def _call(self, **parameters: Any) -> None:
        module, _, function = self._work.partition(".")
        as_json, is_debug = parameters.get("as_json", False), parameters.pop("debug", False)
        with failures(module, as_json=as_json, debug=is_debug):
            with require_extra(self._extra, f"`rlm-broker {module}`") if self._extra else nullcontext():
                work = importlib.import_module(f"rlm_broker.cli.{module}")
            if not gc.isenabled():  # `__main__` turns it off for the imports
                gc.freeze()
                gc.enable()
            exit_code = getattr(work, function or "run")(**parameters)
        if exit_code:
            sys.exit(exit_code)


class Group(click.Group):
    """A group that answers a mistyped command by suggesting a similar one."""

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        """Find the command.

        Raises:
            click.UsageError: There is no such command.
        """
        name = args[0]
        if name not in self.list_commands(ctx) and not name.startswith("-"):
            raise click.UsageError(f"No such command {name!r}{self.suggested(ctx, name)}", ctx)
        return super().resolve_command(ctx, args)

    def suggested(self, ctx: click.Context, name: str) -> str:
        """Return what ends the sentence about an unknown command."""
        from rlm_broker.values.validation import suggestion

        return suggestion(name, self.list_commands(ctx))


class TraceGroup(Group):
    """The commands for traces. If a file stands in the place of a command, the error names `trace show`."""

    def suggested(self, ctx: click.Context, name: str) -> str:
        """Return what ends the sentence about an unknown command."""
        return f"; did you mean trace show {name}?" if exists(name) else super().suggested(ctx, name)
