"""From what users call a level of isolation to the levels to try, and what to do where one cannot be had."""

import warnings

from rlm_broker.errors import ConfigurationError, IsolationUnavailable, require_kind
from rlm_broker.sandbox.levels.remedies import remedy
from sandbox_worker.wire.layers import Layer
from sandbox_worker.wire.level import LEVELS, Level, level_named

AUTO = "auto"
"""The strongest security boundary that this machine can give."""
CHOICES: tuple[str, ...] = (AUTO, *(level.name for level in LEVELS))
"""All that a user may ask for."""


class IsolationWarning(UserWarning):
    """Code runs without a security boundary, since the caller asked for such a level by name."""


def candidates(isolation: str, allow_exec: bool | None) -> tuple[Level, ...]:
    """The levels to try, the strongest first. `auto` never means one that is no security boundary.

    Args:
        isolation: One of `CHOICES`.
        allow_exec: True is possible only at levels with `Level.may_exec`; None is wherever it is possible.

    Raises:
        ConfigurationError: There is no such level, or it cannot allow that.
    """
    require_kind("allow_exec", allow_exec, bool, type(None))
    if isolation == AUTO:
        return tuple(level for level in LEVELS if level.is_security_boundary and (level.may_exec or not allow_exec))
    try:
        level = level_named(isolation)
    except LookupError:
        raise ConfigurationError(no_such_level(isolation)) from None
    if allow_exec and not level.may_exec:
        raise ConfigurationError(
            f"isolation level {level.name!r} cannot start programs, since nothing would end them: leave allow_exec "
            "out, or use the level 'strict'"
        )
    return (level,)


def no_such_level(name: object) -> str:
    """Say that there is no such level, and which there are."""
    return f"no isolation level {name!r}; choose one of: {', '.join(CHOICES)}"


def warn_if_unprotected(level: Level) -> None:
    """Say what the level does not do, where that is everything."""
    if not level.is_security_boundary:
        warnings.warn(
            f"isolation level {level.name!r} is no security boundary: code in it can read your files, your keys and "
            "other processes' environments, and use the network",
            IsolationWarning,
            stacklevel=3,
        )


def unavailable(level: Level, layer: Layer, reason: str, code: int = 0) -> IsolationUnavailable:
    """The error for a level that this machine cannot give, with what would give it.

    Args:
        code: The kernel's error number, or 0.
    """
    what_would = remedy(layer, reason, code)
    return IsolationUnavailable(
        f"isolation level {level.name!r} cannot be had here: {reason}. {what_would} "
        "`rlm-broker doctor` shows every layer; `--isolation process` runs without any protection",
        layer=layer,
        reason=reason,
        remedy=what_would,
    )
