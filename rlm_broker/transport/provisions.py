"""What a REPL is given beside its context: names of tools, and plain values."""

from collections.abc import Iterable, Mapping
from typing import Any

from rlm_broker.errors import ValueTooLarge
from sandbox_worker.wire.errors import FrameTooLarge
from sandbox_worker.wire.frames import encode_frame
from sandbox_worker.wire.messages import Provide, encode


class Provisions:
    """Names of tools, and plain values by name, each as the frame that gives it to a REPL.

    Each holder has one of its own: `add` copies, and what is added to one later changes no other.
    """

    __slots__ = ("_frames", "_tools")

    def __init__(self) -> None:
        self._tools: list[str] = []
        self._frames: dict[str, bytes] = {}

    @classmethod
    def of(cls, values: Mapping[str, Any], max_frame_bytes: int, tools: Iterable[str] = ()) -> "Provisions":
        """Return those of `tools` and `values`.

        Args:
            max_frame_bytes: Largest payload of the frame of one value.

        Raises:
            ValueTooLarge: A value is more than a message may hold.
            UnicodeEncodeError: A value has lone surrogates.
        """
        made = cls()
        made._tools.extend(tools)
        for name, value in values.items():
            try:
                made._frames[name] = encode_frame(encode(Provide(name, value)), max_frame_bytes)
            except FrameTooLarge as error:
                raise ValueTooLarge(
                    f"the value {name} is too large for a message to a REPL: {error}; raise max_frame_bytes"
                ) from None
        return made

    def add(self, more: "Provisions") -> None:
        """Take what another one has, too. A value takes the place of one of the same name."""
        self._tools.extend(more._tools)
        self._frames.update(more._frames)

    def tools(self) -> list[str]:
        """Return the names of the tools, in the order they were added."""
        return [*self._tools]

    def frames(self) -> list[bytes]:
        """Return the frames of the values, each of which gives the REPL one value with its next block."""
        return [*self._frames.values()]
