"""Isolation levels by their names: the levels to try for a name, and the error for a level that is not available."""

import warnings

from rlm_broker.errors import ConfigurationError, IsolationUnavailable, require_kind
from rlm_broker.sandbox.levels.remedies import remedy
from sandbox_worker.wire.level import LEVELS, Layer, Level, level_named

AUTO = "auto"
"""Name for the strongest security boundary that this machine can give."""
CHOICES: tuple[str, ...] = (AUTO, *(level.name for level in LEVELS))
"""All names that a user may give."""


class IsolationWarning(UserWarning):
    """Code runs without a security boundary, since the caller asked for such a level by name."""


def candidates(isolation: str, allow_exec: bool | None) -> tuple[Level, ...]:
    """Return the levels to try, the strongest first. "auto" stands only for levels that are a security boundary.

    Args:
        isolation: One of `CHOICES`.
        allow_exec: Whether code may start programs. True needs a level with `Level.may_exec`; None allows it where the
            level does.

    Raises:
        ConfigurationError: There is no such level, or it cannot allow programs.
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
            f"isolation level {level.name!r} cannot start programs, since they could outlive their REPL: leave "
            "allow_exec out, or use the level 'strict'"
        )
    return (level,)


def no_such_level(name: object) -> str:
    """Return the sentence that `name` is not a level, with the names of all levels."""
    return f"no isolation level {name!r}; choose one of: {', '.join(CHOICES)}"


def warn_if_unprotected(level: Level) -> None:
    """Warn of a level that is not a security boundary."""
    if not level.is_security_boundary:
        warnings.warn(
            f"isolation level {level.name!r} is not a security boundary: code in it can read your files, your keys and "
            "other processes' environments, and use the network",
            IsolationWarning,
            stacklevel=3,
        )


def unavailable(level: Level, layer: Layer, reason: str, code: int = 0) -> IsolationUnavailable:
    """Return the error for a level that this machine cannot give, with the remedy.

    Args:
        level: Level that was tried.
        layer: Layer that failed.
        reason: Operation that failed, with the kernel's error.
        code: The kernel's error number; 0 if there is none.
    """
    what_would = remedy(layer, reason, code)
    return IsolationUnavailable(
        f"isolation level {level.name!r} is not available here: {reason}. {what_would} "
        "`rlm-broker doctor` shows every layer; `--isolation process` runs without any protection",
        layer=layer,
        reason=reason,
        remedy=what_would,
    )
