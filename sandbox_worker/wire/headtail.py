"""Keeping the head and the tail of a stream of output, and saying how much is missing between them. No I/O."""

from collections import deque
from typing import Generic, TypeVar

import msgspec

from sandbox_worker.wire.messages import PositiveInt

Text = TypeVar("Text", str, bytes)

PIECE = 1 << 13
"""Small pieces are put together to this length: of a million lines, a million objects would be kept."""


class OutputBounds(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What is kept of what one block writes to one stream. Each field is a field of `Limits`, which describes it.

    Attributes:
        max_output_bytes: Characters or bytes kept, head and tail together. A note of the cut comes on top.
    """

    max_output_bytes: PositiveInt

    def both_ways(self) -> "OutputBounds":
        """Return what may come of one stream: Python's text and the descriptor's bytes, each within these bounds."""
        return OutputBounds(max_output_bytes=2 * self.max_output_bytes)


class HeadTail(Generic[Text]):
    """Of everything that is added, the first half of what is kept goes through; of the rest the last half is kept.

    The cost of adding a piece does not depend on how much is kept.

    Args:
        bounds: What is kept at most.
        empty: `""` or `b""`: which of the two this one is for.

    Attributes:
        head_left: How much will still go through.
    """

    def __init__(self, bounds: OutputBounds, empty: Text) -> None:
        self._tail_limit = bounds.max_output_bytes // 2
        self.head_left = bounds.max_output_bytes - self._tail_limit
        self._empty: Text = empty
        self._pieces: deque[Text] = deque()
        self._small: list[Text] = []
        self._small_length = 0
        self._length = 0
        self._cut = 0

    def add(self, piece: Text) -> Text:
        """Take `piece`; return the part of it that belongs to the head, to be passed on at once."""
        if len(piece) <= self.head_left:
            self.head_left -= len(piece)
            return piece
        head, rest = piece[: self.head_left], piece[self.head_left :]
        self.head_left = 0
        if len(rest) > self._tail_limit:
            self._cut += len(rest) - self._tail_limit
            rest = rest[len(rest) - self._tail_limit :]
        self._small.append(rest)
        self._small_length += len(rest)
        self._length += len(rest)
        if self._small_length >= PIECE:
            self._put_together()
        while self._pieces and self._length - len(self._pieces[0]) >= self._tail_limit:
            gone = len(self._pieces.popleft())
            self._length -= gone
            self._cut += gone
        return head

    def finish(self) -> Text:
        """The note of what was cut, if anything was, and the tail. From here on everything counts as tail."""
        self._put_together()
        tail = self._empty.join(self._pieces)
        excess = max(0, len(tail) - self._tail_limit)
        cut, tail = self._cut + excess, tail[excess:]
        self._pieces.clear()
        self._length = self._cut = 0
        if not cut:
            return tail
        note = f"\n... [{cut:,} more cut] ...\n"
        return (note if isinstance(tail, str) else note.encode()) + tail

    def _put_together(self) -> None:
        if self._small:
            self._pieces.append(self._empty.join(self._small))
            self._small, self._small_length = [], 0
