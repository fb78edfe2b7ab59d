"""What a project's settings may not do unless its user has looked at them: a project may be somebody else's."""

import hashlib
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from rlm_broker.clients.litellm import is_hosted
from rlm_broker.errors import ConfigurationError

_HARMLESS = frozenset(
    {"name", "options", "usd_per_million_tokens", "max_concurrent", "requests_per_minute", "tokens_per_minute"}
    | {"max_retries", "attempt_timeout_s", "fallbacks", "cooldown_s"}
)
"""Of a model: what does not say where a request is sent, nor with which key."""
_HARMLESS_OPTIONS = frozenset(
    {"temperature", "top_p", "top_k", "min_p", "seed", "stop", "max_tokens", "max_completion_tokens"}
    | {"frequency_penalty", "presence_penalty", "repetition_penalty", "reasoning_effort", "verbosity", "n"}
)
"""They change what a model says."""
_MEANS = ("max_budget_usd", "max_tokens", "max_llm_calls")
_LEVELS = {"auto": 1, "strict": 2, "standard": 0, "process": -1}


def risks(document: Mapping[str, Any], users: Mapping[str, Any]) -> Iterator[str]:
    """What in a project's file could send documents or keys elsewhere, run code with less protection, or cost more.

    Args:
        users: The user's own settings, which hold without the project's.
    """
    yield from (name for name in ("base_url", "api_key", "cache") if document.get(name))
    level = document.get("isolation", "auto")
    if _LEVELS.get(str(level), 0) < min(1, _LEVELS.get(str(users.get("isolation", "auto")), 1)):
        yield f"isolation = {level}"
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
    limits = document.get("limits")
    limits = limits if isinstance(limits, dict) else {}
    for name in _MEANS:
        if name in users and name in limits and not _is_less(limits[name], users[name]):
            yield f"limits.{name} = {limits[name]}"


def require(path: Path, content: bytes, document: Mapping[str, Any], users: Mapping[str, Any]) -> None:
    """Refuse a project's file that has risks, unless it was trusted as it is now.

    Raises:
        ConfigurationError: It was not.
    """
    found = list(risks(document, users))
    if found and _line(path, content) not in _trusted():
        raise ConfigurationError(
            f"{path} sets {', '.join(found)}: look at it, and if it is yours run `rlm-broker config trust`"
        )


def trust(path: Path) -> None:
    """Take the file as it is now for the user's own.

    Raises:
        ConfigurationError: It cannot be read, or that cannot be noted.
    """
    try:
        line = _line(path, path.read_bytes())
        _store().parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        with _store().open("a") as store:
            store.write(f"{line}\n")
    except OSError as error:
        raise ConfigurationError(f"cannot trust {path}: {error.strerror}: {error.filename}") from None


def _risks_of(model: Mapping[str, Any], name: str, users: Mapping[str, Any]) -> Iterator[str]:
    yield from (field for field in model if field not in _HARMLESS)
    served = model.get("name", name)
    if "base_url" not in model and not _is_known(served, users):
        yield f"name = {served}"
    options = model.get("options")
    yield from (
        f"options.{each}" for each in (options if isinstance(options, dict) else ()) if each not in _HARMLESS_OPTIONS
    )


def _is_known(name: object, users: Mapping[str, Any]) -> bool:
    """Whether it is a well-known provider's model, ours, or the user's own entry: no name that leads to an address."""
    own = users.get("models")
    return name == "offline" or (isinstance(name, str) and (is_hosted(name) or (isinstance(own, dict) and name in own)))


def _is_less(projects: object, users: object) -> bool:
    try:
        return float(str(projects)) <= float(str(users))
    except ValueError:  # "none"
        return str(users).strip().lower() == "none"


def _trusted() -> list[str]:
    try:
        return _store().read_text().splitlines()
    except OSError:
        return []


def _store() -> Path:
    return Path(os.environ.get("XDG_STATE_HOME") or Path.home() / ".local" / "state") / "rlm-broker" / "trusted"


def _line(path: Path, content: bytes) -> str:
    return hashlib.sha256(os.fsencode(path.resolve()) + b"\0" + content).hexdigest()
