"""What a REPL begins with beside its context: variables of its environment, and a seed."""

from collections.abc import Mapping
from typing import Final

from rlm_broker.errors import ConfigurationError
from sandbox_worker.wire.messages import Environment

SEED_BITS: Final = 32
"""Bits of a seed: what PYTHONHASHSEED and numpy take."""
MAX_ENV_BYTES: Final = 64 << 10
"""Bytes of all names and values of variables. With more of them the kernel may start no program; they are refused."""


def environment_of(env: Mapping[str, str] | None, seed: int | None) -> Environment | None:
    """Return what is said to a REPL before its first block; None where there is nothing to say.

    Raises:
        ConfigurationError: A variable or the seed cannot be used.
    """
    require_seed(seed)
    variables = variables_of(env)
    return Environment(variables, seed) if variables or seed is not None else None


def require_seed(seed: object) -> None:
    """Raises: ConfigurationError."""
    if seed is not None and (isinstance(seed, bool) or not isinstance(seed, int) or not 0 <= seed < 1 << SEED_BITS):
        raise ConfigurationError(f"seed must be an integer from 0 to 2**{SEED_BITS} - 1, or None, got {seed!r}")


def variables_of(env: Mapping[str, str] | None) -> dict[str, str]:
    """Return a copy of variables that the kernel takes as they are. Raises: ConfigurationError."""
    if env is None:
        return {}
    if not isinstance(env, Mapping):
        raise ConfigurationError(f"env is a dict from name to text, and not {type(env).__name__}")
    variables: dict[str, str] = {}
    size = 0
    for name, value in env.items():
        if not isinstance(name, str) or not name or "=" in name:
            raise ConfigurationError(f"env: a variable's name is text without '=', and not {name!r}")
        if not isinstance(value, str):
            raise ConfigurationError(f"env: the variable {name} is text, and not {type(value).__name__}")
        try:
            encoded = f"{name}={value}".encode()
        except UnicodeEncodeError:
            raise ConfigurationError(f"env: the variable {name!r} has lone surrogates, which UTF-8 has not") from None
        if b"\0" in encoded:
            raise ConfigurationError(f"env: the variable {name!r} has a NUL character, which would end it")
        size += len(encoded) + 1
        variables[name] = value
    if size > MAX_ENV_BYTES:
        raise ConfigurationError(
            f"env: its variables have {size:,} bytes, more than {MAX_ENV_BYTES:,}: give it in a file"
        )
    return variables
