"""Keeping the head and the tail of a stream of output, and saying how much is missing between them. No I/O."""

from typing import Generic, TypeVar

Text = TypeVar("Text", str, bytes)


class HeadTail(Generic[Text]):
    """Of everything that is added, the first half of the limit goes through; of the rest the last half is kept.

    Args:
        limit: Characters or bytes kept at most. A note of the cut comes on top.
        empty: `""` or `b""`: which of the two this one is for.
    """

    def __init__(self, limit: int, empty: Text) -> None:
        self._head_left = limit - limit // 2
        self._tail_limit = limit // 2
        self._empty: Text = empty
        self._tail: Text = empty
        self._cut = 0

    def add(self, piece: Text) -> Text:
        """Take `piece`; return the part of it that belongs to the head, to be passed on at once."""
        head = piece[: self._head_left]
        self._head_left -= len(head)
        rest = piece[len(head) :]
        if rest:
            tail = self._tail + rest
            if (
                len(tail) > 2 * self._tail_limit
            ):  # let it grow to twice its size: cutting each time would copy it each time
                tail = self._shortened(tail)
            self._tail = tail
        return head

    def finish(self) -> Text:
        """The note of what was cut, if anything was, and the tail."""
        tail = self._shortened(self._tail)
        self._tail = self._empty
        if not self._cut:
            return tail
        note = f"\n... [{self._cut:,} more cut] ...\n"
        return (note if isinstance(tail, str) else note.encode()) + tail

    def _shortened(self, tail: Text) -> Text:
        excess = len(tail) - self._tail_limit
        if excess <= 0:
            return tail
        self._cut += excess
        return tail[excess:]
