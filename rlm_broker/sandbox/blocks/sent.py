"""Values that a REPL sends. They are untrusted: bounded, decoded, and replaced by a sentence where they are invalid."""

import functools
from typing import Any

import msgspec

from rlm_broker.errors import ValueUnavailable
from rlm_broker.results import Block
from sandbox_worker.wire.errors import ValueInvalid
from sandbox_worker.wire.messages import EncodedValue
from sandbox_worker.wire.values import MAX_DECODED_VALUES, decode

MAX_PROBLEM_CHARS = 2_000
"""Characters of the sentence on why there is no value; a longer one is cut. The REPL's own code sends fewer."""


class SentValue:
    """One value, decoded by the thread that first looks at it, and not by the event loop that all REPLs share.

    Args:
        encoded: Bytes that the REPL sent; empty if there is no value.
        problem: Reason why there is no value, in the REPL's words; None if there is one.
    """

    def __init__(self, encoded: bytes, problem: str | None) -> None:
        self._encoded = encoded
        self._problem = problem

    @property
    def value(self) -> Any:
        """Value as Python has it; None if there is a problem."""
        return self._decoded[0]

    @property
    def problem(self) -> str | None:
        """Reason why there is no value; None if there is one."""
        return self._decoded[1]

    @functools.cached_property
    def _decoded(self) -> tuple[Any, str | None]:
        if self._problem is not None:
            return None, self._problem[:MAX_PROBLEM_CHARS]
        try:
            return decode(self._encoded, MAX_DECODED_VALUES), None
        except ValueInvalid as invalid:
            return None, f"the REPL sent an invalid value: {invalid}"


class Held:
    """A value that the orchestrator has checked already.

    Attributes:
        value: The value.
        problem: Always None.
    """

    problem: None = None

    def __init__(self, value: Any) -> None:
        self.value = value


def sent(encoded: EncodedValue, problem: str | None) -> SentValue | None:
    """Return the value that a result carries; None if it carries none."""
    if isinstance(encoded, msgspec.UnsetType):
        return None if problem is None else SentValue(b"", problem)
    return SentValue(bytes(encoded), problem)


def values_of(names: tuple[str, ...], block: Block) -> Any:
    """Return the values of variables that a block should send: for one name its value, for several a tuple.

    Args:
        names: Variables, in order.
        block: Outcome of the block that was run for them.

    Raises:
        ValueUnavailable: The block failed, or the REPL sent no value, or other values.
    """
    which = ", ".join(names)
    if block.status != "ok":
        raise ValueUnavailable(f"{which:.200} is not available: {block.error}")
    if block.value_problem is not None:
        raise ValueUnavailable(block.value_problem)
    values = block.value
    if type(values) is not list or len(values) != len(names):
        raise ValueUnavailable(f"{which:.200} is not available: the REPL sent other values")
    return values[0] if len(values) == 1 else tuple(values)
