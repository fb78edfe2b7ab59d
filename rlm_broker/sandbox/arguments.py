"""Arguments of a sandbox and its REPLs: checks, and the variables and seed that a REPL begins with."""

import math
from collections.abc import Mapping
from typing import Final

from rlm_broker.errors import ConfigurationError
from rlm_broker.limits import ReplLimits
from sandbox_worker.wire.messages import Environment


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
    """Return the seconds given for a block, or the default if none were.

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


SEED_BITS: Final = 32
"""Bits of a seed, as PYTHONHASHSEED and numpy take it. A larger seed is refused."""
MAX_ENV_BYTES: Final = 64 << 10
"""Bytes of all names and values of variables; more are refused. They share the kernel's room for a program's arguments
(execve(2)), and with more of them the REPL could start no program."""


def environment_of(env: Mapping[str, str] | None, seed: int | None) -> Environment | None:
    """Return the message that a REPL gets before its first block; None if there are neither variables nor a seed.

    Raises:
        ConfigurationError: A variable or the seed cannot be used.
    """
    require_seed(seed)
    variables = variables_of(env)
    return Environment(variables, seed) if variables or seed is not None else None


def require_seed(seed: object) -> None:
    """Refuse a seed out of range.

    Raises:
        ConfigurationError: It is neither None nor an integer of `SEED_BITS` bits.
    """
    if seed is not None and (isinstance(seed, bool) or not isinstance(seed, int) or not 0 <= seed < 1 << SEED_BITS):
        raise ConfigurationError(f"seed must be an integer from 0 to 2**{SEED_BITS} - 1, or None, got {seed!r}")


def variables_of(env: Mapping[str, str] | None) -> dict[str, str]:
    """Return a copy of the variables, in a form that the kernel takes as it is.

    Raises:
        ConfigurationError: A name or value cannot be a variable's.
    """
    if env is None:
        return {}
    if not isinstance(env, Mapping):
        raise ConfigurationError(f"env must be a dict from name to text, not {type(env).__name__}")
    variables: dict[str, str] = {}
    size = 0
    for name, value in env.items():
        if not isinstance(name, str) or not name or "=" in name:
            raise ConfigurationError(f"env: a variable's name must be text without '=', not {name!r}")
        if not isinstance(value, str):
            raise ConfigurationError(f"env: the variable {name} must be text, not {type(value).__name__}")
        try:
            encoded = f"{name}={value}".encode()
        except UnicodeEncodeError:
            raise ConfigurationError(f"env: {name!r} has lone surrogates, which UTF-8 cannot encode") from None
        if b"\0" in encoded:
            raise ConfigurationError(f"env: the variable {name!r} has a NUL character, which would end it")
        size += len(encoded) + 1
        variables[name] = value
    if size > MAX_ENV_BYTES:
        raise ConfigurationError(
            f"env: its variables have {size:,} bytes, more than {MAX_ENV_BYTES:,}: give it in a file"
        )
    return variables
