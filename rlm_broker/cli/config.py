"""`rlm-broker config show`: every setting, its value, where that came from, and what it is."""

import json
import re
from pathlib import Path

import click

from rlm_broker.cli.failing import failures
from rlm_broker.cli.parameters import Group
from rlm_broker.cli.terminal import say

ABOUT = {
    "model": "The root model",
    "sub_model": "The model that code asks; none is the root model",
    "base_url": "Address of an OpenAI-compatible server that has the models",
    "api_key": "Key of the model, as env:NAME of the variable that holds it",
    "cache": "File that keeps replies of providers",
    "isolation": "Level of the sandbox: auto, strict, standard or process",
    "python": "Folder of a virtual environment whose packages code has",
    "packages": "Packages to make such an environment of",
    "allow_exec": "Whether code may start programs; none is wherever the level can end them",
    "tools": "Python file whose functions and values code may use",
    "output_type": "JSON Schema of the answer",
    "model_policy": "Which models code may name: pinned, allow or open",
    "recursion": "Which children get a REPL: always or auto",
    "prompt_profile": "What the model is told to end with: both, final, answer or compact",
}
"""Setting that is not a limit -> its description. A limit has a docstring."""


@click.group("config", cls=Group)
def command() -> None:
    """Settings: flags, then RLM_BROKER_*, ./rlm-broker.toml, and ~/.config/rlm-broker/config.toml."""


@command.command("trust", epilog="exit codes: 0 trusted, 2 there is no such file, or it is wrong")
def trust_project() -> None:
    """Trust ./rlm-broker.toml with its present content. It may then name servers, Python files of tools, which run
    without a sandbox, and isolation 'process'."""
    with failures("config", as_json=False):
        from rlm_broker.settings.settings import (  # imports pydantic, which --help need not wait for
            PROJECT_FILE,
            trust_project,
        )

        risks = trust_project()
        needed = f"which sets {', '.join(risks)}" if risks else "which has no setting that needs trust"
        say(f"trusted {Path(PROJECT_FILE).resolve()}, {needed}")


@command.command("show", epilog="exit codes: 0 shown, 2 a setting is wrong")
@click.option("--limit", "assignments", multiple=True, metavar="NAME=VALUE", help="As it would be given to ask.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
def show(assignments: tuple[str, ...], as_json: bool) -> None:
    """Print each setting with the value that holds, and where it came from.

    A sentence at the end of each line says what the setting is.
    """
    with failures("config", as_json=as_json):
        from rlm_broker.settings.settings import Settings, assigned  # imports pydantic, which --help need not wait for

        found = Settings(assigned(assignments), is_looked_at=True)
        settings = found.all()
        if found.refusal is not None:
            say(f"warning: {found.refusal}", err=True)
        if as_json:
            shown = {
                name: {"value": _shown(each.value), "source": each.source, "about": _about(name)}
                for name, each in settings.items()
            }
            say(json.dumps(shown, ensure_ascii=False))
            return
        width, sources = max(map(len, settings)), max(len(each.source) for each in settings.values())
        for name, setting in settings.items():
            say(f"{name:{width}}  {_short(_shown(setting.value)):>12}  {setting.source:{sources}}  {_about(name)}")


def _about(name: str) -> str:
    """Return the first sentence on a setting; on a limit, that of its docstring."""
    from rlm_broker.limits import Limits

    if name not in Limits.model_fields:
        return ABOUT[name]
    description = " ".join((Limits.model_fields[name].description or "").split())
    return re.split(r"(?<=\.)\s", description)[0].rstrip(".")


def _shown(value: object) -> object:
    """Return a value without the password of an address."""
    from rlm_broker.events.redaction import without_credentials

    return without_credentials(value) if isinstance(value, str) else value


def _short(value: object) -> str:
    """Return a value as it is written in a file of settings: a size in bytes, and `none` without a bound."""
    from rlm_broker.values.text import printable

    return "none" if value is None else printable(str(value))
