"""Arguments of a sandbox and its REPLs: checks, and the variables and seed of a REPL."""

import math
import os
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Final

from rlm_broker.broker.transport.session import Wanted
from rlm_broker.errors import ConfigurationError, require_kind
from rlm_broker.limits import ReplLimits
from sandbox_worker.wire.control import MAX_ARGUMENT_BYTES
from sandbox_worker.wire.messages import Environment

if TYPE_CHECKING:
    from rlm_broker.sandbox.packages import Chosen


def require_answer(answer: object) -> None:
    """Raise ConfigurationError for an `answer` other than a function."""
    if not callable(answer):
        raise ConfigurationError(
            f"answer must be an async function of one query, not {type(answer).__name__}: "
            "with an LMHandler give answer=handler.answers(...)"
        )


def require_limits(limits: object) -> None:
    """Raise ConfigurationError for `limits` that are neither None nor a `ReplLimits`."""
    if limits is not None and not isinstance(limits, ReplLimits):
        raise ConfigurationError(f"limits must be a ReplLimits or a Limits, not {type(limits).__name__}")


def chosen_environment(python: str | os.PathLike[str] | None, packages: Sequence[str] | None) -> "Chosen":
    """Return the environment of REPLs by these arguments of a `Sandbox`, as `chosen_packages` does."""
    if python is None and packages is None:
        return None
    from rlm_broker.sandbox.packages import chosen_packages  # few sandboxes have packages of their own

    return chosen_packages(python, packages)


def require_block(code: object, wanted: Wanted) -> None:
    """Raise ConfigurationError for code and input other than text, and for other flags than True and False."""
    stdin = wanted.stdin
    if not isinstance(code, str):
        raise ConfigurationError(f"code must be text, not {type(code).__name__}")
    if stdin is not None and not isinstance(stdin, str) and not callable(stdin):
        raise ConfigurationError(f"stdin must be text, an async function or None, not {type(stdin).__name__}")
    if {type(wanted.value), type(wanted.variables), type(wanted.echo)} != {bool}:
        for name in ("value", "variables", "echo"):
            require_kind(name, getattr(wanted, name), bool)


def seconds_or(name: str, given: object, default: float) -> float:
    """Return the seconds of the argument `name`, or the default for None. Raise ConfigurationError if they are not
    positive."""
    if given is None:
        return default
    if isinstance(given, bool) or not isinstance(given, int | float) or not 0 < given < math.inf:
        raise ConfigurationError(f"{name} = {given!r}: give a positive number of seconds, or None")
    return given


SEED_BITS: Final = 32
"""Bits of a seed, as PYTHONHASHSEED and numpy take it. A larger seed is refused."""
MAX_ENV_BYTES: Final = 64 << 10
"""Bytes of all names and values of a REPL's variables; more are refused. They share the kernel's room for a program's
arguments (execve(2)), and with more of them the REPL could start no program."""


def environment_of(env: Mapping[str, str] | None, seed: int | None, scaffold: bool = True) -> Environment | None:
    """Return the message to a REPL before its first block; None if it has a scaffold, and neither variables nor a seed.
    Raise ConfigurationError if one of them cannot be used."""
    require_seed(seed)
    require_kind("scaffold", scaffold, bool)
    variables = variables_of(env)
    return Environment(variables, seed, scaffold) if variables or seed is not None or not scaffold else None


def require_seed(seed: object) -> None:
    """Raise ConfigurationError unless the seed is None or an integer of `SEED_BITS` bits."""
    if seed is not None and (isinstance(seed, bool) or not isinstance(seed, int) or not 0 <= seed < 1 << SEED_BITS):
        raise ConfigurationError(f"seed must be an integer from 0 to 2**{SEED_BITS} - 1, or None, got {seed!r}")


def variables_of(env: Mapping[str, str] | None, most_bytes: int = MAX_ENV_BYTES) -> dict[str, str]:
    """Return a copy of the variables, as the kernel takes them. Raise ConfigurationError for others."""
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
        if len(encoded) > MAX_ARGUMENT_BYTES:
            limit = f"{MAX_ARGUMENT_BYTES:,}: give it in a file"
            raise ConfigurationError(f"env: the variable {name[:80]!r} has {len(encoded):,} bytes, more than {limit}")
        size += len(encoded) + 1
        variables[name] = value
    if size > most_bytes:
        raise ConfigurationError(f"env: its variables have {size:,} bytes, more than {most_bytes:,}: give it in a file")
    return variables
