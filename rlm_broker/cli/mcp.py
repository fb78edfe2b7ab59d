"""The command line of `rlm-broker mcp`. Its work is in `rlm_broker.mcp`, which `--help` does not import."""

import importlib.util
import json
import shutil
import sys
from pathlib import Path
from typing import Any

import click

from rlm_broker.cli.failing import failures
from rlm_broker.cli.parameters import API_KEY, BASE_URL, FILE, FOLDER, is_folder, run_options, sandbox_options
from rlm_broker.cli.terminal import say
from rlm_broker.errors import ConfigurationError

EXIT_CODES = """\b
for Claude Code:
  claude mcp add rlm -- rlm-broker mcp --model openai/gpt-5-mini

\b
exit codes: 0 the client has left, 2 the command line or configuration is wrong,
130, 143, 129 stopped by Ctrl+C, SIGTERM, SIGHUP"""
PATHS = ("--root", "--python", "--tools")
"""Options whose value is a path."""
MISSING = "`rlm-broker mcp` needs packages that are not installed: pip install 'rlm-broker[mcp]'"


@click.command("mcp", epilog=EXIT_CODES)
@click.option("-m", "--model", metavar="NAME", help="The root model of ask_large_context (default offline).")
@click.option("-s", "--sub-model", metavar="NAME", help="The model that code asks; default: the root model.")
@BASE_URL
@API_KEY
@click.option("--root", type=FOLDER, default=".", metavar="DIR", help="Folder whose files may be asked about.")
@click.option("--max-depth", type=int, metavar="N", help="Levels of runs that have a REPL (default 1).")
@sandbox_options
@click.option(
    "--tools",
    type=FILE,
    metavar="FILE",
    help="Python file whose functions and values runs may use. It runs without a sandbox.",
)
@run_options
@click.option("--limit", "assignments", multiple=True, metavar="NAME=VALUE", help="Any other limit: run_timeout_s=10m.")
@click.option("--config", "only_config", is_flag=True, help="Print the JSON that clients want, and exit.")
@click.option("--debug", is_flag=True, help="Show tracebacks of rlm-broker itself.")
def command(root: str, *, assignments: tuple[str, ...], only_config: bool, debug: bool, **options: Any) -> None:
    """Serve a sandbox, and questions about large files, to one client of the Model Context Protocol.

    The client starts this command, and talks with it by stdin and stdout. The command ends when stdin does.
    """
    with failures("mcp", as_json=False, debug=debug):
        if not is_folder(root):
            raise ConfigurationError(f"{root} is not a folder: name one by --root")
        if only_config:
            say(json.dumps(configuration(_own_arguments()), indent=2, ensure_ascii=False))
            return
        if importlib.util.find_spec("mcp") is None:
            raise ConfigurationError(MISSING)
        if sys.stdin.isatty():
            say("rlm-broker mcp: a client starts this command, and talks by stdin; for its JSON see --config", err=True)
        _serve(root, assignments, options)


def configuration(arguments: list[str]) -> dict[str, Any]:
    """Return what clients want in their settings, such as `mcpServers` of Claude Desktop and Cursor.

    Args:
        arguments: Arguments of `rlm-broker mcp`.
    """
    program = shutil.which("rlm-broker") or sys.argv[0]
    return {"mcpServers": {"rlm": {"command": program, "args": ["mcp", *arguments]}}}


def _own_arguments() -> list[str]:
    """Return the arguments of this command without `--config`. Paths are absolute: a client starts it elsewhere."""
    given = sys.argv[sys.argv.index("mcp") + 1 :] if "mcp" in sys.argv else []
    arguments = []
    for before, each in zip(["", *given], given, strict=False):
        option, separator, value = each.partition("=")
        if before in PATHS:
            arguments.append(str(Path(each).resolve()))
        elif separator and option in PATHS:
            arguments.append(f"{option}={Path(value).resolve()}")
        elif each != "--config":
            arguments.append(each)
    return arguments


def _serve(root: str, assignments: tuple[str, ...], options: dict[str, Any]) -> None:
    import gc

    gc.disable()  # the imports make objects that all stay, and a client waits
    from rlm_broker.mcp.stdio import serve_stdio
    from rlm_broker.settings.settings import Settings, assigned

    settings = Settings(assigned(assignments, **options))
    gc.freeze()
    gc.enable()

    def rlm() -> Any:
        from rlm_broker.cli.composing import rlm_of

        return rlm_of(settings)

    def spans() -> Any:
        from rlm_broker.cli.spans import sent_spans

        return sent_spans()

    serve_stdio(rlm, root=root, block_timeout_s=settings.limits.block_timeout_s, spans=spans)
