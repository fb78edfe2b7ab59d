"""Bounds of one REPL: how init watches them, and how both sides keep the head and the tail of a stream of output."""

from collections import deque
from typing import Annotated, Generic, Literal, NamedTuple, TypeVar

import msgspec

from sandbox_worker.wire.messages import PositiveInt

Text = TypeVar("Text", str, bytes)

PIECE = 1 << 13
"""Characters or bytes up to which small pieces are joined to one. Without this, a million short lines would be kept as
a million objects."""
NOTE_LINES = 2
"""Maximum lines of the note of a cut: an empty line, and its own."""


class OutputBounds(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Bounds of one block's output on one stream. `Limits` has fields of the same names, and describes them.

    Attributes:
        max_output_bytes: Maximum characters or bytes kept, head and tail together. A note of the cut comes on top.
        max_output_lines: Maximum lines kept, head and tail together; None means no bound. A part of a line counts as a
            line.
    """

    max_output_bytes: PositiveInt
    max_output_lines: PositiveInt | None = None

    def both_ways(self) -> "OutputBounds":
        """Return the bounds of both ways of one stream together: Python's text, and bytes of the descriptor.

        Each way has the bounds of its own, and at most one note of a cut.
        """
        lines = None if self.max_output_lines is None else 2 * (self.max_output_lines + NOTE_LINES)
        return OutputBounds(max_output_bytes=2 * self.max_output_bytes, max_output_lines=lines)


class HeadTail(Generic[Text]):
    """Filter of a stream: passes on the head at once, keeps the tail, and counts the part between.

    Head and tail have half of the bounds each. The cost of adding a piece is independent of the kept amount.

    Args:
        bounds: Bounds of head and tail together.
        empty: `""` for a stream of text, `b""` for a stream of bytes.

    Attributes:
        head_left: Characters or bytes of the head still to come.
        is_cut: Whether `finish` has left out a part.
    """

    def __init__(self, bounds: OutputBounds, empty: Text) -> None:
        self._tail_limit = bounds.max_output_bytes // 2
        self.head_left = bounds.max_output_bytes - self._tail_limit
        self.is_cut = False
        self._max_lines = bounds.max_output_lines
        self._head_lines = 0
        self._head_ends_in_line = False
        self._newline: Text = "\n" if isinstance(empty, str) else b"\n"
        self._empty: Text = empty
        self._pieces: deque[Text] = deque()
        self._small: list[Text] = []
        self._small_length = 0
        self._length = 0
        self._cut = self._cut_lines = 0

    def add(self, piece: Text) -> Text:
        """Add `piece`, and return its part of the head, for the caller to pass on at once."""
        head = self._head_of(piece)
        if len(head) == len(piece):
            return piece
        rest = piece[len(head) :]
        if len(rest) > self._tail_limit:
            self._count_cut(rest, len(rest) - self._tail_limit)
            rest = rest[len(rest) - self._tail_limit :]
        self._small.append(rest)
        self._small_length += len(rest)
        self._length += len(rest)
        if self._small_length >= PIECE:
            self._put_together()
        while self._pieces and self._length - len(self._pieces[0]) >= self._tail_limit:
            gone = self._pieces.popleft()
            self._length -= len(gone)
            self._count_cut(gone, len(gone))
        return head

    def finish(self) -> Text:
        """Return the tail, after a note of the cut if there was one, and begin a new tail."""
        if not (self._small or self._pieces or self._cut):
            return self._empty
        self._put_together()
        tail = self._empty.join(self._pieces)
        excess = max(0, len(tail) - self._tail_limit)
        if self._max_lines is not None:
            excess = max(excess, self._excess_of_lines(tail, self._max_lines - self._head_lines, bool(excess)))
        self._count_cut(tail, excess)
        cut, lines, tail = self._cut, self._cut_lines, tail[excess:]
        self._pieces.clear()
        self._length = self._cut = self._cut_lines = 0
        if not cut:
            return tail
        self.is_cut = True
        note = f"\n... [{cut:,} more cut{f', lines: {lines:,}' if lines else ''}] ...\n"
        return (note if isinstance(tail, str) else note.encode()) + tail

    def _head_of(self, piece: Text) -> Text:
        """Return the head's part of `piece`, within both bounds, and count it."""
        head = piece[: self.head_left]
        if self._max_lines is None or not head:
            self.head_left -= len(head)
            return head
        head_lines = self._max_lines - self._max_lines // 2
        head = head[: _end_of_line(head, head_lines - self._head_lines, self._newline)]
        self.head_left -= len(head)
        self._head_lines += head.count(self._newline)
        self._head_ends_in_line = not head.endswith(self._newline)
        if self._head_lines == head_lines:
            self._tail_limit += self.head_left
            self.head_left = 0
        return head

    def _count_cut(self, text: Text, length: int) -> None:
        """Count the first `length` characters of `text` as cut, and their line ends if lines are bounded."""
        self._cut += length
        if self._max_lines is not None:
            self._cut_lines += text.count(self._newline, 0, length)

    def _excess_of_lines(self, tail: Text, left: int, is_cut: bool) -> int:
        """Return the number of characters before the last `left` lines of `tail`."""
        lines = tail.count(self._newline) + (not tail.endswith(self._newline))
        if self._head_ends_in_line and (is_cut or self._cut or lines > left):
            left -= 1  # the head ends inside a cut line: this part counts as one more line
        return _end_of_line(tail, max(0, lines - left), self._newline)

    def _put_together(self) -> None:
        if self._small:
            self._pieces.append(self._empty.join(self._small))
            self._small, self._small_length = [], 0


def _end_of_line(text: Text, number: int, newline: Text) -> int:
    """Return the end of line `number` of `text`, counted from 1; the length of `text` if fewer lines end in it.

    The search halves the text, so it takes log2(length) calls of `count`. A search line by line would take a step in
    Python for each line, and a text may consist of newlines alone.
    """
    if not number or text.count(newline) < number:
        return len(text) if number else 0
    start, end = 0, len(text)
    while end - start > 1:
        middle = (start + end) // 2
        found = text.count(newline, start, middle)
        if found >= number:
            end = middle
        else:
            start, number = middle, number - found
    return end


class ReplBounds(OutputBounds, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Bounds of one REPL together with its child processes. `Limits` has fields of the same names, and describes them.

    A new bound is declared here and in `Limits`; `Limits.repl_bounds` copies it by its name. The bounds of output are
    inherited from `OutputBounds`. Those of the scratch folder are at least 1, because tmpfs takes 0 for "no bound".

    Attributes:
        cpu_s: CPU time of one block in seconds, or None for no bound. Beyond it, init kills the REPL.
        max_frame_bytes: Largest payload of one message in bytes. After a larger one the orchestrator ends the REPL. The
            REPL's own code refuses before that, so that an honest REPL survives.
        later_context_bytes: Address space in bytes for contexts that come while the REPL lives. 0 permits none.
    """

    memory_bytes: PositiveInt
    max_processes: PositiveInt
    max_open_files: PositiveInt
    scratch_bytes: PositiveInt
    max_scratch_files: PositiveInt
    cpu_s: float | None
    max_frame_bytes: PositiveInt
    later_context_bytes: Annotated[int, msgspec.Meta(ge=0)] = 0
    keep_checkpoints: PositiveInt = 1


class Watched(NamedTuple):
    """The way init watches one bound. Beyond the bound, init kills the REPL.

    Attributes:
        usage: Field of init's measured usage compared with the bound.
        divisor: Divisor of bound and usage in messages to users.
        unit: Unit of the divided numbers.
    """

    usage: str
    divisor: int
    unit: str


WatchedLimit = Literal[
    "memory_bytes", "max_processes", "cpu_s", "block_timeout_s", "scratch_bytes", "max_scratch_files"
]
"""Fields of `Limits` with init as their guard: beyond one of them, init kills the REPL."""
SCRATCH_LIMITS: frozenset[WatchedLimit] = frozenset({"scratch_bytes", "max_scratch_files"})
"""Limits of the scratch folder. Its content outlives a REPL, so a new REPL of the same worker would exceed them again;
the worker is replaced."""
WATCHED: dict[WatchedLimit, Watched] = {
    "memory_bytes": Watched("memory_bytes", 1 << 20, "MiB"),
    "max_processes": Watched("threads", 1, "threads and processes"),
    "cpu_s": Watched("cpu_s", 1, "s CPU time"),
    "scratch_bytes": Watched("scratch_bytes", 1 << 20, "MiB of the scratch folder"),
    "max_scratch_files": Watched("scratch_files", 1, "files in the scratch folder"),
}
"""Field of `ReplBounds` → the way init watches it. "block_timeout_s" is missing here: `Begin` gives its CPU time anew
for each block."""
