"""Trust in projects' files: which settings need the user's consent, and which files have it.

A project may be the work of another person. Its file must not send documents or keys elsewhere, run code or weaken the
isolation until the user has looked at it and run `rlm-broker config trust`. The consent holds for one path and one
content, as a digest in the user's state folder.
"""

import hashlib
import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from rlm_broker.broker.clients.litellm import LiteLLMClient
from rlm_broker.broker.models.model import SAMPLING
from rlm_broker.errors import ConfigurationError
from rlm_broker.values.text import printable

_HARMLESS = frozenset(
    {"name", "options", "usd_per_million_tokens", "max_concurrent", "requests_per_minute", "tokens_per_minute"}
    | {"max_retries", "attempt_timeout_s", "fallbacks", "cooldown_s"}
)
"""Fields of a model that decide neither where a request is sent nor with which key."""
_ALWAYS = ("base_url", "api_key", "cache", "python", "packages", "cluster", "tools", "output_type", "serve")
"""Settings that are a risk with any value."""
_MEANS = ("max_budget_usd", "max_tokens", "max_llm_calls")
"""Limits that are a risk if the project's value is above the user's."""
_FREER: Mapping[str, Sequence[str]] = {
    "isolation": ("strict", "auto", "standard", "process"),
    "model_policy": ("pinned", "allow", "open"),
}
"""Values of a setting, from the strictest to the freest."""


def risks(document: Mapping[str, Any], users: Mapping[str, Any]) -> Iterator[str]:
    """Yield the settings of a project's file that need the user's trust.

    Such a setting could send documents or keys elsewhere, run code on the host, weaken the isolation, or install
    packages. It could also show other files of the user to code or a model, or raise the cost.

    Args:
        document: Settings of the project's file; those of its table `limits` stand beside the others.
        users: Settings of the user's own file, in the same form.
    """
    yield from (name for name in _ALWAYS if document.get(name))
    for setting, default in (("isolation", "auto"), ("model_policy", "allow")):
        if setting in document and _is_freer(setting, document[setting], users.get(setting, default)):
            yield f"{setting} = {_said(document[setting])}"
    if _said(users.get("allow_exec")) == "false" and _said(document.get("allow_exec", False)) != "false":
        yield f"allow_exec = {_said(document['allow_exec'])}"
    models = document.get("models")
    models = models if isinstance(models, dict) else {}
    for setting in ("model", "sub_model"):
        name = document.get(setting)
        if name is not None and name not in models and not _is_known(name, users):
            yield f"{setting} = {name}"
    for name, model in models.items():
        yield from (
            f"models.{name}.{risk}" for risk in _risks_of(model if isinstance(model, dict) else {}, name, users)
        )
    for name in _MEANS:
        if name in users and name in document and not _is_less(document[name], users[name]):
            yield f"limits.{name} = {document[name]}"


def with_tools(project: bytes, tools: bytes) -> bytes:
    """Return the content to trust if a project's file names a file of tools: a change of either needs new trust."""
    return project + b"\0" + hashlib.sha256(tools).digest()  # NUL separates them: no TOML file contains one


def refusal(path: Path, content: bytes, found: Sequence[str]) -> str | None:
    """Return the reason why a project's file with risks is not used, or None if it was trusted with this content."""
    if not found or _line(path, content) in _trusted():
        return None
    return (
        f"{path} sets {', '.join(map(printable, found))}: look at it, and if you trust it run `rlm-broker config trust`"
    )


def trust(path: Path, content: bytes) -> None:
    """Trust the file with this content.

    Raises:
        ConfigurationError: The trust cannot be stored.
    """
    try:
        line = _line(path, content)
        _store().parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        with _store().open("a") as store:
            store.write(f"{line}\n")
    except OSError as error:
        raise ConfigurationError(f"cannot trust {path}: {error.strerror}: {error.filename}") from None
    except RuntimeError:  # raised by `Path.home`
        raise ConfigurationError(f"cannot trust {path}: this user has no home: set HOME or XDG_STATE_HOME") from None


def _risks_of(model: Mapping[str, Any], name: str, users: Mapping[str, Any]) -> Iterator[str]:
    yield from (field for field in model if field not in _HARMLESS)
    served = model.get("name", name)
    if "base_url" not in model and not _is_known(served, users):
        yield f"name = {served}"
    options = model.get("options")
    yield from (f"options.{each}" for each in (options if isinstance(options, dict) else ()) if each not in SAMPLING)


def _is_known(name: object, users: Mapping[str, Any]) -> bool:
    """Whether a name can lead to no address of the project's choice.

    It is then the offline model, a model of a well-known provider, or an entry of the user's own file.
    """
    own = users.get("models")
    return name == "offline" or (
        isinstance(name, str) and (LiteLLMClient.is_hosted(name) or (isinstance(own, dict) and name in own))
    )


def _is_freer(setting: str, projects: object, users: object) -> bool:
    """Whether the project's value lets code do more than the user's. An unknown value counts as yes."""
    order = _FREER[setting]
    given, own = _said(projects), _said(users)
    return given not in order or own not in order or order.index(given) > order.index(own)


def _said(value: object) -> str:
    return str(value).lower()


def _is_less(projects: object, users: object) -> bool:
    try:
        return float(str(projects)) <= float(str(users))
    except ValueError:  # "none"
        return str(users).strip().lower() == "none"


def _trusted() -> list[str]:
    try:
        return _store().read_text().splitlines()
    except (OSError, RuntimeError):
        return []


def _store() -> Path:
    return Path(os.environ.get("XDG_STATE_HOME") or Path.home() / ".local" / "state") / "rlm-broker" / "trusted"


def _line(path: Path, content: bytes) -> str:
    return hashlib.sha256(os.fsencode(path.resolve()) + b"\0" + content).hexdigest()
