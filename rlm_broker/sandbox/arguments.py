"""Checks of the arguments of a sandbox and its REPLs."""

import math

from rlm_broker.errors import ConfigurationError
from rlm_broker.limits import ReplLimits


def require_answer(answer: object) -> None:
    """Refuse an `answer` that cannot be called.

    Raises:
        ConfigurationError: It is not a function.
    """
    if not callable(answer):
        raise ConfigurationError(
            f"answer must be an async function of one query, not {type(answer).__name__}: "
            "with an LMHandler give answer=handler.answers(...)"
        )


def require_limits(limits: object) -> None:
    """Refuse `limits` of a wrong type.

    Raises:
        ConfigurationError: They are neither None nor a `ReplLimits`.
    """
    if limits is not None and not isinstance(limits, ReplLimits):
        raise ConfigurationError(f"limits must be a ReplLimits or a Limits, not {type(limits).__name__}")


def require_block(code: object, stdin: object) -> None:
    """Refuse code and input that are not text.

    Raises:
        ConfigurationError: `code` is not text, or `stdin` is neither text nor None.
    """
    if not isinstance(code, str):
        raise ConfigurationError(f"code must be text, not {type(code).__name__}")
    if stdin is not None and not isinstance(stdin, str):
        raise ConfigurationError(f"stdin must be text or None, not {type(stdin).__name__}")


def seconds_or(name: str, given: object, default: float) -> float:
    """Return the seconds that were given for a block, or the default if none were.

    Args:
        name: Name of the argument, for the error.
        given: Seconds, or None.
        default: Seconds to take in place of None.

    Raises:
        ConfigurationError: `given` is not a positive number.
    """
    if given is None:
        return default
    if isinstance(given, bool) or not isinstance(given, int | float) or not 0 < given < math.inf:
        raise ConfigurationError(f"{name} = {given!r}: give a positive number of seconds, or None")
    return given
