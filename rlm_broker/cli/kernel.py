"""`rlm-broker kernel`: install and uninstall the kernel for Jupyter. Jupyter starts it by `main`.

`main` opens the sandbox first, and imports the packages of Jupyter meanwhile. So functions here import what they use.
"""

import json
import re
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from rlm_broker.errors import ConfigurationError
from rlm_broker.integrations.jupyter_repl import KernelRepl
from rlm_broker.limits import ReplLimits
from rlm_broker.sandbox.sandbox import Sandbox

if TYPE_CHECKING:
    from rlm_broker.cli.settings.settings import Settings

A_DAY: Final = {"block_timeout_s": 86_400.0, "block_wall_timeout_s": 86_400.0}
"""Limits of a kernel where none are given: a cell may compute, or wait, for a day."""
STARTS: Final = ("-P", "-m", "rlm_broker.cli.kernel")
"""Arguments of Python that start the kernel. With -P the folder of a notebook is not searched for modules."""


def install(
    *,
    where: Sequence[str],
    prefix: str | None,
    name: str,
    display_name: str | None,
    assignments: Sequence[str],
    **flags: str | bool | None,
) -> None:
    """Write a kernelspec, once a sandbox with these settings was opened here.

    Raises:
        ConfigurationError: A setting cannot be used, or the folder cannot be written.
        SandboxFailed, IsolationUnavailable: There is no sandbox.
    """
    from jupyter_client.kernelspec import KernelSpecManager

    from rlm_broker.cli.settings.settings import Settings, assigned
    from rlm_broker.cli.terminal import say

    if len(where) + bool(prefix) > 1:
        raise ConfigurationError("--user, --sys-prefix and --prefix exclude each other: give one of them")
    if not re.fullmatch(r"[A-Za-z0-9._-]+", name):
        raise ConfigurationError(f"--name {name}: Jupyter wants letters, digits, '.', '_' and '-'")
    options = _options(Settings(assigned(assignments, **flags)))
    with _sandbox(options) as sandbox:  # makes the environment of its packages, which may take minutes
        level = sandbox.level
    spec = {
        "argv": [sys.executable, *STARTS, "{connection_file}", json.dumps(options)],
        "display_name": display_name or ("Python (sandbox)" if name == "rlm-broker" else f"Python (sandbox, {name})"),
        "language": "python",
        "metadata": {"debugger": False},
    }
    chosen = sys.prefix if "sys-prefix" in where else prefix
    try:
        with tempfile.TemporaryDirectory() as folder:
            Path(folder, "kernel.json").write_text(json.dumps(spec, indent=1))
            made = KernelSpecManager().install_kernel_spec(folder, name, user=chosen is None, prefix=chosen)
    except OSError as error:
        raise ConfigurationError(f"the kernel cannot be installed: {error}") from None
    say(f"installed {name} in {made}; its sandbox has isolation level {level}")


def uninstall(*, name: str) -> None:
    """Remove a kernelspec of ours.

    Raises:
        ConfigurationError: There is none of that name, or it is another kernel's.
    """
    from jupyter_client.kernelspec import KernelSpecManager, NoSuchKernel

    from rlm_broker.cli.terminal import say

    manager = KernelSpecManager()
    try:
        is_ours = manager.get_kernel_spec(name).argv[1:4] == [*STARTS]
    except NoSuchKernel:
        raise ConfigurationError(f"there is no kernel {name!r}: `jupyter kernelspec list` shows all") from None
    if not is_ours:
        raise ConfigurationError(f"the kernel {name!r} is not one of rlm-broker's")
    say(f"removed {manager.remove_kernel_spec(name)}")


def _options(settings: "Settings") -> dict[str, Any]:
    """Return the options of a kernel, as JSON has them. Limits of runs are none of them."""
    given = {name: getattr(settings.limits, name) for name in settings.limits.given if name in ReplLimits.fields}
    return {
        "limits": {**A_DAY, **given},
        "isolation": settings["isolation"],
        "allow_exec": settings["allow_exec"],
        "python": None if settings["python"] is None else str(Path(settings["python"]).absolute()),
        "packages": settings.packages,
    }


def _sandbox(options: dict[str, Any]) -> Sandbox:
    """Return a sandbox that is not open yet, with the options of a kernelspec."""
    return Sandbox(warm=0, **{**options, "limits": ReplLimits.from_dict(options["limits"])})


def main() -> None:
    """Serve front ends until one of them shuts the kernel down."""
    if len(sys.argv) != 3:
        raise SystemExit("Jupyter starts this module: see `rlm-broker kernel install`")
    try:
        repl = KernelRepl(_sandbox(json.loads(sys.argv[2])))
        from rlm_broker.integrations.jupyter import serve

        serve(sys.argv[1], repl)
    except (ConfigurationError, ValueError) as error:
        raise SystemExit(str(error)) from None


if __name__ == "__main__":
    main()
