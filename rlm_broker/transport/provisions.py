"""What a REPL is given beside its context: names of tools, values, and what its process begins with."""

import contextlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import msgspec

from rlm_broker.errors import ConfigurationError, ValueTooLarge
from sandbox_worker.loading.form import ContextPiece
from sandbox_worker.wire.errors import FrameTooLarge, ValueRefused
from sandbox_worker.wire.frames import PREFIX, encode_frame
from sandbox_worker.wire.messages import Attach, Environment, Provide, encode
from sandbox_worker.wire.values import encode as encode_value
from sandbox_worker.wire.values import encode_json

_PLACE = b"0.0"
"""A number, which no name of a variable holds: the place of a value in its message."""


class Provisions:
    """Names of tools, values by name, each as the frame that gives it to a REPL, and an environment.

    Each holder has one of its own: `add` copies, and what is added to one later changes no other.
    """

    __slots__ = ("_environment", "_frames", "_tools")

    def __init__(self) -> None:
        self._tools: list[str] | None = None
        self._frames: dict[str, bytes] = {}
        self._environment: list[bytes] = []

    @classmethod
    def of(
        cls,
        values: Mapping[str, Any],
        max_frame_bytes: int,
        tools: Iterable[str] | None = None,
        environment: Environment | None = None,
        *,
        are_restored: bool = True,
        are_json: bool = False,
    ) -> "Provisions":
        """Return those of `tools`, `values` and `environment`.

        Args:
            max_frame_bytes: Largest payload of the frame of one value.
            tools: All that code may call from then on; None changes nothing.
            are_restored: Whether each block finds the values again, whatever the block before made of the names.
            are_json: Whether the values came out of JSON, and hold nothing else.

        Raises:
            ConfigurationError: A value does not cross.
            ValueTooLarge: A value, or the environment, is more than a message may hold.
        """
        made = cls()
        made._tools = None if tools is None else [*tools]
        for name, value in values.items():
            try:
                encoded = (encode_json if are_json else encode_value)(value, f"the value {name}")
            except ValueRefused as refused:
                raise ConfigurationError(str(refused)) from None
            with _in_a_frame(f"the value {name}"):
                made._frames[name] = _frame(name, encoded, are_restored, max_frame_bytes)
        if environment is not None:
            with _in_a_frame("env"):
                made._environment.append(encode_frame(encode(environment), max_frame_bytes))
        return made

    @classmethod
    def of_context(cls, name: str, context: Sequence[ContextPiece], max_frame_bytes: int) -> "Provisions":
        """Return what gives a REPL a context, whose memfds init hands to it.

        Raises:
            ValueTooLarge: The names of its pieces are more than a message may hold.
        """
        made = cls()
        with _in_a_frame(f"the context {name}"):
            made._frames[name] = encode_frame(encode(Attach(name, [*context])), max_frame_bytes)
        return made

    def add(self, more: "Provisions") -> None:
        """Take what another one has, too. Its values come in the place of ours of the same names, its tools of all."""
        if more._tools is not None:
            self._tools = more._tools
        self._frames.update(more._frames)
        self._environment.extend(more._environment)

    def tools(self) -> list[str] | None:
        """Return the names of all tools, in their order; None leaves them as they are."""
        return None if self._tools is None else [*self._tools]

    def names(self) -> set[str]:
        """Return the names of the values."""
        return {*self._frames}

    def frames(self) -> list[bytes]:
        """Return the frames that give the REPL an environment and the values, each of them one, with its next block."""
        return [*self._environment, *self._frames.values()]


@contextlib.contextmanager
def _in_a_frame(what: str) -> Iterator[None]:
    try:
        yield
    except FrameTooLarge as error:
        raise ValueTooLarge(f"{what} is too large for a message to a REPL: {error}; raise max_frame_bytes") from None


def _frame(name: str, encoded: bytes, is_restored: bool, max_frame_bytes: int) -> bytes:
    """Return the frame that gives a REPL one value: put together at once, since a large one would be copied thrice."""
    begin, end = encode(Provide(name, msgspec.Raw(_PLACE), is_restored)).split(_PLACE)
    payload_bytes = len(begin) + len(encoded) + len(end)
    if payload_bytes > max_frame_bytes:
        raise FrameTooLarge(payload_bytes, max_frame_bytes)
    return b"".join([PREFIX.pack(payload_bytes), begin, encoded, end])
