"""Values that come out of a REPL. None of it is believed: it is bounded and decoded, and whatever is wrong is told."""

import functools
from typing import Any

import msgspec

from rlm_broker.errors import ValueUnavailable
from rlm_broker.results import Block
from sandbox_worker.wire.errors import ValueInvalid
from sandbox_worker.wire.messages import EncodedValue
from sandbox_worker.wire.values import MAX_DECODED_VALUES, decode

MAX_PROBLEM_CHARS = 2_000
"""Of the sentence on why there is no value; the rest of a longer one is cut. An honest REPL sends fewer."""


class SentValue:
    """One value, decoded by the thread that first looks at it: not by the event loop that all REPLs share.

    Args:
        encoded: As it came; empty if there is none.
        problem: Why there is none, in the REPL's words.
    """

    def __init__(self, encoded: bytes, problem: str | None) -> None:
        self._encoded = encoded
        self._problem = problem

    @property
    def value(self) -> Any:
        """The value; None if there is a problem."""
        return self._decoded[0]

    @property
    def problem(self) -> str | None:
        """Why there is no value."""
        return self._decoded[1]

    @functools.cached_property
    def _decoded(self) -> tuple[Any, str | None]:
        if self._problem is not None:
            return None, self._problem[:MAX_PROBLEM_CHARS]
        try:
            return decode(self._encoded, MAX_DECODED_VALUES), None
        except ValueInvalid as invalid:
            return None, f"what the REPL sent is no value: {invalid}"


class Held:
    """A value that was checked already.

    Attributes:
        problem: None, always.
    """

    problem: None = None

    def __init__(self, value: Any) -> None:
        self.value = value


def sent(encoded: EncodedValue, problem: str | None) -> SentValue | None:
    """Return what a result holds; None if it holds nothing."""
    if isinstance(encoded, msgspec.UnsetType):
        return None if problem is None else SentValue(b"", problem)
    return SentValue(bytes(encoded), problem)


def values_of(names: tuple[str, ...], block: Block) -> Any:
    """Return the values of variables that a block was to send: of one name its value, of several a tuple.

    Raises:
        ValueUnavailable: It sent none, or something else.
    """
    which = ", ".join(names)
    if block.status != "ok":
        raise ValueUnavailable(f"{which:.200} cannot be had: {block.error}")
    if block.value_problem is not None:
        raise ValueUnavailable(block.value_problem)
    values = block.value
    if type(values) is not list or len(values) != len(names):
        raise ValueUnavailable(f"{which:.200} cannot be had: what the REPL sent is something else")
    return values[0] if len(values) == 1 else tuple(values)
