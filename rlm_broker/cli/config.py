"""`rlm-broker config show`: every setting with its value, its source and a sentence about it."""

import json
import re
from pathlib import Path

from rlm_broker.cli.settings.settings import PROJECT_FILE, Settings, assigned, trust_project
from rlm_broker.cli.terminal import say
from rlm_broker.events.redaction import without_credentials
from rlm_broker.limits import Limits
from rlm_broker.values.text import printable

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
    "cluster": "Ray cluster whose nodes have the REPLs, such as auto; none is this machine",
    "max_nodes": "Nodes of the cluster at most",
    "resources": "Resources of Ray that each node must have, such as rlm=1",
    "tools": "Python file whose functions and values code may use",
    "output_type": "JSON Schema of the answer",
    "encoding": "Encoding of text without a byte order mark, such as cp1252; none is UTF-8",
    "strict_text": "Whether bytes that cannot be decoded are refused; else they are replaced",
    "model_policy": "Which models code may name: pinned, allow or open",
    "recursion": "Which children get a REPL: always or auto",
    "prompt_profile": "What the model is told to end with: both, final, answer or compact",
}
"""Description of each setting that is not a limit. A limit has a docstring."""


def trust() -> None:
    """Trust ./rlm-broker.toml with its present content."""
    risks = trust_project()
    needed = f"which sets {', '.join(risks)}" if risks else "which has no setting that needs trust"
    say(f"trusted {Path(PROJECT_FILE).resolve()}, {needed}")


def show(*, assignments: tuple[str, ...], as_json: bool) -> None:
    """Print each setting with its value, its source, and a sentence about it."""
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
    """Return the first sentence on a setting; on a limit, the first of its docstring."""
    if name not in Limits.fields:
        return ABOUT[name]
    description = " ".join(Limits.descriptions()[name].split())
    return re.split(r"(?<=\.)\s", description)[0].rstrip(".")


def _shown(value: object) -> object:
    """Return a value without the password of an address."""

    return without_credentials(value) if isinstance(value, str) else value


def _short(value: object) -> str:
    """Return a value as it is written in a file of settings: a size in bytes, and `none` without a bound."""

    return "none" if value is None else printable(str(value))
