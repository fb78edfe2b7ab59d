"""What is given to a sandbox and its REPLs, refused in words where it cannot be used."""

import math

from rlm_broker.errors import ConfigurationError
from rlm_broker.limits import ReplLimits


def require_answer(answer: object) -> None:
    """Raises: ConfigurationError."""
    if not callable(answer):
        raise ConfigurationError(
            f"answer is an async function of one query, and not {type(answer).__name__}: "
            "with an LMHandler give answer=handler.answers(...)"
        )


def require_limits(limits: object) -> None:
    """Raises: ConfigurationError."""
    if limits is not None and not isinstance(limits, ReplLimits):
        raise ConfigurationError(f"limits is a ReplLimits or a Limits, and not {type(limits).__name__}")


def require_block(code: object, stdin: object) -> None:
    """Raises: ConfigurationError."""
    if not isinstance(code, str):
        raise ConfigurationError(f"code is text, and not {type(code).__name__}")
    if stdin is not None and not isinstance(stdin, str):
        raise ConfigurationError(f"stdin is text or None, and not {type(stdin).__name__}")


def seconds_or(name: str, given: object, default: float) -> float:
    """Return the seconds that were given for a block, or else the default.

    Raises:
        ConfigurationError: They are no positive number.
    """
    if given is None:
        return default
    if isinstance(given, bool) or not isinstance(given, int | float) or not 0 < given < math.inf:
        raise ConfigurationError(f"{name} = {given!r}: give a positive number of seconds, or None")
    return given
