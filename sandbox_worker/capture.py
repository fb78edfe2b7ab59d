"""What Python code prints: sent over the door while the block still runs, head and tail of it."""

import io
import os
import threading
import time
from collections.abc import Callable
from typing import Any

from sandbox_worker.wire.headtail import HeadTail
from sandbox_worker.wire.messages import Stream

MAX_PIECE_CHARS = 1 << 16
"""Longest text in one message: far below any frame limit, whatever it becomes as JSON."""
BURST = 64
"""So many lines in a row go out at once. A loop that prints more is bundled, or each line would cost a frame."""
LINES_PER_S = 500.0


class Printer(io.TextIOBase):
    """`sys.stdout` or `sys.stderr` of the REPL.

    A line goes out when it is complete, as long as there are not too many a second; the rest goes out with the next
    one, or at the end of the block. Text past the limit is kept as a tail and not sent before the end.

    Args:
        stream: Which of the two.
        limit: Characters sent for one block at most, see `HeadTail`.
        send: Called with each piece of text.
    """

    encoding = "utf-8"
    errors = "replace"

    def __init__(self, stream: Stream, limit: int, send: Callable[[Stream, str], None]) -> None:
        self._stream: Stream = stream
        self._limit = limit
        self._send = send
        self._owner = os.getpid()
        self._lock = threading.RLock()
        self._kept = HeadTail[str](limit, "")
        self._waiting: list[str] = []
        self._waiting_chars = 0
        self._allowance = float(BURST)
        self._counted_at = time.monotonic()
        self._block_runs = False

    @property
    def name(self) -> str:
        return f"<{self._stream}>"

    def writable(self) -> bool:
        return True

    def isatty(self) -> bool:
        return False

    def fileno(self) -> int:
        """The descriptor that init reads: what C code and subprocesses write there is captured too."""
        return 1 if self._stream == "stdout" else 2

    def write(self, text: str) -> int:
        if not isinstance(text, str):
            raise TypeError(f"write() argument must be str, not {type(text).__name__}")
        if os.getpid() != self._owner:  # a forked process prints where any other process would
            os.write(self.fileno(), text.encode("utf-8", "replace"))
            return len(text)
        with self._lock:
            head = self._kept.add(text)
            if head:
                self._waiting.append(head)
                self._waiting_chars += len(head)
                if self._waiting_chars >= MAX_PIECE_CHARS or (head[-1] == "\n" and self._may_send()):
                    self.flush()
        return len(text)

    def flush(self) -> None:
        """Send what waits, if there is a block that it belongs to."""
        with self._lock:
            if not self._waiting or not self._block_runs or os.getpid() != self._owner:
                return
            text = "".join(self._waiting)
            self._waiting, self._waiting_chars = [], 0
            for at in range(0, len(text), MAX_PIECE_CHARS):
                self._send(self._stream, text[at : at + MAX_PIECE_CHARS])

    def begin_block(self) -> None:
        """From here on text may be sent; what threads printed meanwhile belongs to this block."""
        with self._lock:
            self._block_runs = True

    def end_block(self) -> None:
        """Send everything, tail included. What is written from here on waits for the next block."""
        with self._lock:
            if tail := self._kept.finish():
                self._waiting.append(tail)
            self.flush()
            self._kept = HeadTail[str](self._limit, "")
            self._block_runs = False

    def _may_send(self) -> bool:
        now = time.monotonic()
        self._allowance = min(BURST, self._allowance + (now - self._counted_at) * LINES_PER_S)
        self._counted_at = now
        if self._allowance < 1:
            return False
        self._allowance -= 1
        return True

    def __getattr__(self, name: str) -> Any:
        if name == "buffer":  # for code that writes bytes: the same text, decoded
            return _Bytes(self)
        raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")


class _Bytes(io.RawIOBase):
    """`sys.stdout.buffer`."""

    def __init__(self, printer: Printer) -> None:
        self._printer = printer

    def writable(self) -> bool:
        return True

    def write(self, data: Any) -> int:
        self._printer.write(bytes(data).decode("utf-8", "replace"))
        return len(data)

    def flush(self) -> None:
        self._printer.flush()
