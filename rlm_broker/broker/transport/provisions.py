"""Provisions of a REPL beside its context: names of tools, values, and its environment."""

import contextlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import msgspec

from rlm_broker.errors import ConfigurationError, ValueTooLarge
from sandbox_worker.loading.form import ContextPiece
from sandbox_worker.wire.errors import FrameTooLarge, ValueRefused
from sandbox_worker.wire.frames import PREFIX, encode_frame
from sandbox_worker.wire.messages import MAX_AGAIN_BYTES, Attach, Environment, Provide, encode
from sandbox_worker.wire.values import encode as encode_value
from sandbox_worker.wire.values import encode_json

_PLACE = b"0.0"
"""A stand-in for a value in its message. No name of a variable holds this number, so that it can be searched for."""


class Provisions:
    """Names of tools, values by name, and an environment; values and environment as the frames that carry them.

    Each holder has its own copy: `add` copies, so that a later addition to one changes no other.
    """

    __slots__ = ("_again", "_environment", "_frames", "_texts", "_tools")

    def __init__(self) -> None:
        self._tools: list[str] | None = None
        self._frames: dict[str, bytes] = {}
        self._again: dict[str, bytes] = {}
        self._texts: dict[str, tuple[object, bool]] = {}
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
        earlier: "Provisions | None" = None,
    ) -> "Provisions":
        """Return provisions with these values, tools and environment.

        Args:
            values: Values by the names of their variables.
            max_frame_bytes: Largest payload of the frame of one value.
            tools: Names of all tools that code may call from then on; None leaves them as they are.
            environment: Environment variables and seed of the REPL; None leaves them as they are.
            are_restored: Whether each block finds the values again, also if the block before rebound their names.
            are_json: Whether the values came out of JSON, so that they need no check.
            earlier: All provisions of the REPL so far. A long text or bytes object among them is not sent again.

        Raises:
            ConfigurationError: A value cannot be sent to a REPL.
            ValueTooLarge: A value, or the environment, is longer than a message may be.
        """
        made = cls()
        made._tools = None if tools is None else [*tools]
        for name, value in values.items():
            if type(value) in (str, bytes) and len(value) > MAX_AGAIN_BYTES:
                if earlier is not None and earlier._has(name, value, are_restored):
                    made._again[name] = encode_frame(encode(Provide(name, is_restored=are_restored)), max_frame_bytes)
                    continue
                made._texts[name] = value, are_restored
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
        """Return the provisions that give a REPL a context, whose memfds init hands to it.

        Args:
            name: Variable that will hold the context.
            context: Its pieces, in order.
            max_frame_bytes: Largest payload of a frame.

        Raises:
            ValueTooLarge: The names of its pieces are longer than a message may be.
        """
        made = cls()
        with _in_a_frame(f"the context {name}"):
            made._frames[name] = encode_frame(encode(Attach(name, [*context])), max_frame_bytes)
        return made

    @classmethod
    def of_parts(cls, tools: list[str] | None, frames: Mapping[str, bytes], again: Mapping[str, bytes]) -> "Provisions":
        """Return provisions without an environment, made of `parts`."""
        made = cls()
        made._tools, made._frames, made._again = tools, {**frames}, {**again}
        return made

    def parts(self) -> tuple[list[str] | None, dict[str, bytes], dict[str, bytes]]:
        """Return the names of the tools, and the frames of values by name: new ones, and those given again."""
        return self.tools(), {**self._frames}, {**self._again}

    def add(self, more: "Provisions") -> None:
        """Add all of `more`. Its values replace those of the same names, and its tools, if it has any, all tools."""
        if more._tools is not None:
            self._tools = more._tools
        for name in more._frames:
            self._again.pop(name, None)
            self._texts.pop(name, None)
        self._frames.update(more._frames)
        self._texts.update(more._texts)
        # What is here under such a name has the same value.
        self._again.update((name, frame) for name, frame in more._again.items() if name not in self._frames)
        self._environment.extend(more._environment)

    def copy(self) -> "Provisions":
        """Return another holder's copy."""
        made = Provisions()
        made.add(self)
        return made

    def tools(self) -> list[str] | None:
        """Return the names of all tools, in order; None leaves the REPL's tools as they are."""
        return None if self._tools is None else [*self._tools]

    def names(self) -> set[str]:
        """Return the names of the values."""
        return {*self._frames}

    def frames(self) -> list[bytes]:
        """Return the frames for the REPL's next block: the environment, then one for each value."""
        return [*self._environment, *self._frames.values(), *self._again.values()]

    def _has(self, name: str, value: str | bytes, is_restored: bool) -> bool:
        """Whether this text or bytes object was given last under its name, in the same way. `==` looks at identity
        first, and takes 1 ms for 10 MB that are equal."""
        given, was_restored = self._texts.get(name, (None, False))
        return type(given) is type(value) and was_restored == is_restored and given == value


@contextlib.contextmanager
def _in_a_frame(what: str) -> Iterator[None]:
    try:
        yield
    except FrameTooLarge as error:
        raise ValueTooLarge(f"{what} is too large for a message to a REPL: {error}; raise max_frame_bytes") from None


def _frame(name: str, encoded: bytes, is_restored: bool, max_frame_bytes: int) -> bytes:
    """Return the frame of one value. It is joined once: `encode` and `encode_frame` would copy a large value thrice."""
    begin, end = encode(Provide(name, msgspec.Raw(_PLACE), is_restored)).split(_PLACE)
    payload_bytes = len(begin) + len(encoded) + len(end)
    if payload_bytes > max_frame_bytes:
        raise FrameTooLarge(payload_bytes, max_frame_bytes)
    return b"".join([PREFIX.pack(payload_bytes), begin, encoded, end])
