"""What a REPL is given beside its context: names of tools, plain values, and what its process begins with."""

from collections.abc import Iterable, Mapping
from typing import Any

from sandbox_worker.wire.frames import encode_frame
from sandbox_worker.wire.messages import Environment, Provide, encode


class Provisions:
    """Names of tools, plain values by name, each as the frame that gives it to a REPL, and an environment.

    Each holder has one of its own: `add` copies, and what is added to one later changes no other.
    """

    __slots__ = ("_environment", "_frames", "_tools")

    def __init__(self) -> None:
        self._tools: list[str] = []
        self._frames: dict[str, bytes] = {}
        self._environment: list[bytes] = []

    @classmethod
    def of(
        cls,
        values: Mapping[str, Any],
        max_frame_bytes: int,
        tools: Iterable[str] = (),
        environment: Environment | None = None,
    ) -> "Provisions":
        """Return those of `tools`, `values` and `environment`.

        Args:
            max_frame_bytes: Largest payload of the frame of one value.

        Raises:
            FrameTooLarge: A value is more than a message may hold.
            UnicodeEncodeError: A value has lone surrogates.
        """
        made = cls()
        made._tools.extend(tools)
        for name, value in values.items():
            made._frames[name] = encode_frame(encode(Provide(name, value)), max_frame_bytes)
        if environment is not None:
            made._environment.append(encode_frame(encode(environment), max_frame_bytes))
        return made

    def add(self, more: "Provisions") -> None:
        """Take what another one has, too. A value takes the place of one of the same name."""
        self._tools.extend(more._tools)
        self._frames.update(more._frames)
        self._environment.extend(more._environment)

    def tools(self) -> list[str]:
        """Return the names of the tools, in the order they were added."""
        return [*self._tools]

    def frames(self) -> list[bytes]:
        """Return the frames that give the REPL an environment and the values, each of them one, with its next block."""
        return [*self._environment, *self._frames.values()]
