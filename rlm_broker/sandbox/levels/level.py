"""The levels of isolation: what each is called, what it promises, and what to do where it cannot be had."""

import warnings
from typing import Literal

from rlm_broker.errors import ConfigurationError, IsolationUnavailable
from rlm_broker.sandbox.levels.remedies import remedy

Level = Literal["strict", "standard", "process"]
LEVELS: tuple[Level, ...] = ("strict", "standard", "process")


class IsolationWarning(UserWarning):
    """Code runs with less than a security boundary, because somebody asked for that by name."""


def candidates(isolation: str, allow_exec: bool | None) -> tuple[Level, ...]:
    """The levels to try, the strongest first. `auto` never means `process`.

    Args:
        allow_exec: True is possible at `strict` and `process` only: at `standard` nothing would end what was started.

    Raises:
        ConfigurationError: There is no such level, or it cannot allow that.
    """
    if isolation == "auto":
        return ("strict",) if allow_exec else ("strict", "standard")
    if isolation == "standard" and allow_exec:
        raise ConfigurationError(
            "isolation level 'standard' cannot start programs, since nothing would end them: leave allow_exec out, or "
            "use the level 'strict'"
        )
    for level in LEVELS:
        if isolation == level:
            return (level,)
    raise ConfigurationError(f"no isolation level {isolation!r}; choose one of: auto, {', '.join(LEVELS)}")


def warn_if_unprotected(level: Level) -> None:
    """Say what the level does not do, where that is everything."""
    if level == "process":
        warnings.warn(
            "isolation level 'process' is no security boundary: code in it can read your files, your keys and other "
            "processes' environments, and use the network",
            IsolationWarning,
            stacklevel=3,
        )


def unavailable(level: str, layer: str, reason: str, code: int = 0) -> IsolationUnavailable:
    """The error for a level that this machine cannot give, with what would give it.

    Args:
        code: The kernel's error number, or 0.
    """
    what_would = remedy(layer, reason, code)
    return IsolationUnavailable(
        f"isolation level {level!r} cannot be had here: {reason}. {what_would} "
        "`rlm-broker doctor` shows every layer; `--isolation process` runs without any protection",
        layer=layer,
        reason=reason,
        remedy=what_would,
    )
