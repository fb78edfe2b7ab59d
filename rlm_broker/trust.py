"""What a project's settings may not do unless its user has looked at them: a project may be somebody else's."""

import hashlib
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rlm_broker.errors import ConfigurationError

_HARMLESS_OPTIONS = frozenset(
    {"temperature", "top_p", "top_k", "min_p", "seed", "stop", "max_tokens", "max_completion_tokens"}
    | {"frequency_penalty", "presence_penalty", "repetition_penalty", "reasoning_effort", "verbosity", "n"}
)
"""Of a model: they change what it says. Others may change where a request, and the key with it, is sent."""


def risks(document: Mapping[str, Any]) -> list[str]:
    """What in a project's file could send documents or keys elsewhere, or run code unprotected."""
    found = [name for name in ("base_url", "cache") if document.get(name)]
    if document.get("isolation") == "process":
        found.append("isolation = process")
    models = document.get("models")
    for name, model in models.items() if isinstance(models, dict) else ():
        described = model if isinstance(model, dict) else {}
        options = described.get("options")
        found += [f"models.{name}.{field}" for field in ("base_url", "headers") if described.get(field)]
        found += [
            f"models.{name}.options.{option}"
            for option in (options if isinstance(options, dict) else ())
            if option not in _HARMLESS_OPTIONS
        ]
    return found


def require(path: Path, content: bytes, document: Mapping[str, Any]) -> None:
    """Refuse a project's file that has risks, unless it was trusted as it is now.

    Raises:
        ConfigurationError: It was not.
    """
    found = risks(document)
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


def _trusted() -> list[str]:
    try:
        return _store().read_text().splitlines()
    except OSError:
        return []


def _store() -> Path:
    return Path(os.environ.get("XDG_STATE_HOME") or Path.home() / ".local" / "state") / "rlm-broker" / "trusted"


def _line(path: Path, content: bytes) -> str:
    return hashlib.sha256(os.fsencode(path.resolve()) + b"\0" + content).hexdigest()
