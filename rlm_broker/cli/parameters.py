"""Kinds of commands, options and values of the command line. `--help` imports this module: it imports `click` alone."""

import functools
import gc
import importlib
import os
import re
import sys
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any, Final, get_args

import click
from click.shell_completion import CompletionItem

from rlm_broker.cli.failures import fail, failures
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
MEANT: Final = {
    "timeout": "--limit run_timeout_s=10m",
    "max-time": "--limit run_timeout_s=10m",
    "budget": "--limit max_budget_usd=1",
    "cost": "--limit max_budget_usd=1",
    "max-cost": "--limit max_budget_usd=1",
    "tokens": "--limit max_tokens=100000",
    "memory": "--limit memory_bytes=512MB",
    "samples": "--best-of 5",
    "turns": "--limit max_iterations=20",
    "depth": "--max-depth",
    "file": "a path behind the question",
    "key": "--api-key env:NAME",
    "output": "-o",
    "schema": "--output-type",
    "system-prompt": "--system",
    "format": "--json",
    "no-sandbox": "--isolation process",
    "unsafe": "--isolation process",
    "config": "--set NAME=VALUE",
    "temperature": "options = {temperature = ...} of a model in rlm-broker.toml",
}
"""Option that people try first → how it is written here. A name of a limit or a setting is found by itself."""
WORDS: Final = {
    "run": "ask or exec",
    "version": "--version",
    "ls": "runs list",
    "list": "runs list",
    "kill": "runs stop",
    "logs": "runs show",
    "python": "exec",
    "shell": "exec",
    "server": "serve",
    "settings": "config show",
    "login": "models default",
    "init": "models default",
}
"""Command that people try first → the command here."""


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
        completed: Returns the values that a shell offers for the beginning of one.
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
        completed: Callable[[str], list[str]] | None = None,
    ) -> None:
        super().__init__(
            names.split(),
            metavar=metavar,
            help=help,
            type=type,
            default=default,
            multiple=multiple,
            shell_complete=None if completed is None else functools.partial(_offered, completed),
        )


def _offered(
    completed: Callable[[str], list[str]], _context: click.Context, _option: click.Parameter, begin: str
) -> list[CompletionItem]:
    return list(map(CompletionItem, completed(begin)))


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
        parameters: Its arguments and options, in the order of the help. A text begins a section of that title.
        epilog: What the help ends with.
        work: `MODULE` or `MODULE.FUNCTION` in `rlm_broker.cli`; the function is `run` if none is named.
        extra: Extra of the installation with the packages that the module imports.
        context_settings: As `click.Command` has them.
        checked: Called with the parameters before the import; it ends the command if they cannot be used.
    """

    def __init__(
        self,
        name: str,
        help: str,
        parameters: Sequence[click.Parameter | str] = (),
        *,
        epilog: str,
        work: str = "",
        extra: str = "",
        context_settings: dict[str, Any] | None = None,
        checked: Callable[[dict[str, Any]], None] | None = None,
    ) -> None:
        self._sections: list[tuple[str, list[click.Parameter]]] = [("Options", [])]
        for each in parameters:
            if isinstance(each, str):
                self._sections.append((each, []))
            else:
                self._sections[-1][1].append(each)
        super().__init__(
            name,
            help=help,
            params=[each for _, members in self._sections for each in members],
            epilog=epilog,
            callback=self._call,
            context_settings=context_settings,
        )
        self._work = work or name
        self._extra = extra
        self._checked = checked

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Read the arguments. An unknown option is answered by how it is written here.

        Raises:
            click.UsageError: An option does not exist, or its value is missing.
        """
        try:
            return super().parse_args(ctx, args)
        except click.NoSuchOption as error:
            name = error.option_name.lstrip("-")
            meant = MEANT.get(name) or _assignment(name.replace("-", "_"))
            option = "" if meant is None else meant.partition(" ")[0]
            if meant is None or (option[:1] == "-" and not any(option in each.opts for each in self.params)):
                raise
            raise click.UsageError(f"No such option '{error.option_name}'; did you mean {meant}?", ctx) from None
        except click.UsageError as error:
            error.ctx = error.ctx or ctx  # click names no command where the value of an option is missing
            raise

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write the sections of options."""
        for title, members in self._sections:
            last = [self.get_help_option(ctx)] if members is self._sections[-1][1] else []
            options = [each for each in (*members, *last) if isinstance(each, click.Option)]
            records = [each.get_help_record(ctx) for each in options]
            if any(records):
                with formatter.section(title):
                    formatter.write_dl([record for record in records if record is not None])

    def _call(self, **parameters: Any) -> None:
        module, _, function = self._work.partition(".")
        name = click.get_current_context().command_path.partition(" ")[2]
        as_json, is_debug = parameters.get("as_json", False), parameters.pop("debug", False)
        if self._checked is not None:
            self._checked(parameters)
        with failures(name, as_json=as_json, debug=is_debug):
            with require_extra(self._extra, f"`rlm-broker {name}`") if self._extra else nullcontext():
                work = importlib.import_module(f"rlm_broker.cli.{module}")
            if not gc.isenabled():  # `__main__` turns it off for the imports
                gc.freeze()
                gc.enable()
            exit_code = getattr(work, function or "run")(**parameters)
        if exit_code:
            sys.exit(exit_code)


class Group(click.Group):
    """A group that answers a mistyped command by suggesting a similar one."""

    def list_commands(self, ctx: click.Context) -> list[str]:  # noqa: ARG002 - click's signature
        """Return the commands in the order of their story."""
        return list(self.commands)

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

        return f"; did you mean {WORDS[name]}?" if name in WORDS else suggestion(name, self.list_commands(ctx))


class RunsGroup(Group):
    """The commands for runs. Without a command they are listed; a file in its place is answered by `runs show`."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Read the arguments; those without a command are of `list`."""
        has_command = args and (not args[0].startswith("-") or args[0] in self.get_help_option_names(ctx))
        return super().parse_args(ctx, args if has_command else ["list", *args])

    def suggested(self, ctx: click.Context, name: str) -> str:
        """Return what ends the sentence about an unknown command."""
        return f"; did you mean runs show {name}?" if exists(name) else super().suggested(ctx, name)


_QUESTION = re.compile(r"(?=\S*\s)[^*?\[]+\??")
"""Several words, and not a pattern of files."""


def require_paths(parameters: dict[str, Any]) -> None:
    """End the command if a path to ask about does not exist. The imports for a run take half a second."""
    question, paths = parameters["question"], parameters["paths"]
    if parameters["resume"]:
        if question is not None and _QUESTION.fullmatch(question) and not exists(question):
            why = "is no file: with --resume the trace has the question, so give the paths alone"
            fail("ask", "context", f"{question} {why}", 2, as_json=parameters["as_json"])
        paths = paths if question is None else (question, *paths)
        parameters |= {"question": "", "paths": paths}
    elif question is None:
        raise click.UsageError("Missing argument 'QUESTION'.")
    elif exists(question):
        return
    for path in paths:
        if re.fullmatch(r"[\w ./+-]*[\w/]", path) and not os.path.lexists(path):  # no pattern, address or odd character
            fail("ask", "context", f"{path} does not exist", 2, as_json=parameters["as_json"])


def completed_assignments(begin: str) -> list[str]:
    """Return the limits and settings whose names begin so, each with its equals sign."""
    return [f"{name}=" for name in _known() if name.startswith(begin)]


def completed_models(begin: str) -> list[str]:
    """Return the beginnings of names of models."""
    from rlm_broker.broker.clients.providers import PROVIDERS

    return [each for each in ("offline", *(f"{name}/" for name in PROVIDERS)) if each.startswith(begin)]


def _assignment(name: str) -> str | None:
    """Return how a limit or a setting is given; None for any other name."""
    from rlm_broker.limits import Limits

    return f"--{'limit' if name in Limits.fields else 'set'} {name}=VALUE" if name in _known() else None


def _known() -> list[str]:
    from rlm_broker.cli.settings.settings import DEFAULTS
    from rlm_broker.limits import Limits

    return sorted([*Limits.fields, *DEFAULTS])
