"""`rlm-broker mcp`: serves one client by stdin and stdout, or prints the settings that clients need."""

import contextlib
import gc
import json
import shutil
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

from rlm_broker.cli.parameters import is_folder
from rlm_broker.cli.terminal import say
from rlm_broker.errors import ConfigurationError
from rlm_broker.values.extras import require_extra

PATHS = ("--root", "--python", "--tools")
"""Options whose value is a path."""


def run(root: str, *, assignments: tuple[str, ...], only_config: bool, **options: Any) -> None:
    """Serve one client, or print what clients want in their settings."""
    if not is_folder(root):
        raise ConfigurationError(f"{root} is not a folder: name one by --root")
    if only_config:
        say(json.dumps(configuration(_own_arguments()), indent=2, ensure_ascii=False))
        return
    if sys.stdin.isatty():
        say("rlm-broker mcp: a client starts this command, and talks by stdin; for its JSON see --config", err=True)
    with require_extra("mcp", "`rlm-broker mcp`"):
        _serve(root, assignments, options)


def configuration(arguments: list[str]) -> dict[str, Any]:
    """Return what clients want in their settings, for example `mcpServers` of Claude Desktop and Cursor.

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
    gc.disable()  # the imports make objects that all stay, and a client waits
    from rlm_broker.cli.settings.settings import Settings, assigned
    from rlm_broker.cli.spans import sent_spans
    from rlm_broker.serve.mcp.stdio import serve_stdio

    settings = Settings(assigned(assignments, **options))
    if settings["cluster"] is not None:  # refuse it now where it cannot be had, and not at the first call of a tool
        from rlm_broker.cli.composition import sandbox_of

        sandbox_of(settings)
    gc.freeze()
    gc.enable()

    def rlm() -> Any:
        from rlm_broker.cli.composition import rlm_of

        return rlm_of(settings)

    @contextlib.asynccontextmanager
    async def around() -> AsyncIterator[Any]:
        from rlm_broker.watch.server import ControlSocket

        async with contextlib.AsyncExitStack() as stack:
            stack.push_async_callback(ControlSocket("mcp").start().aclose)
            yield stack.enter_context(sent_spans())

    serve_stdio(rlm, root=root, block_timeout_s=settings.limits.block_timeout_s, around=around)
