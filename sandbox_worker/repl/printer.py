"""What Python code prints: sent over the connection while the block still runs, head and tail of it."""

import codecs
import io
import os
import threading
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

from sandbox_worker.wire.headtail import HeadTail, OutputBounds
from sandbox_worker.wire.messages import Stream

MAX_PIECE_CHARS = 1 << 16
"""Longest text in one message: far below any frame limit, whatever it becomes as JSON."""
BURST = 64
"""So many lines in a row go out at once. A loop that prints more is bundled, or each line would cost a frame."""
PIECES_PER_S = 500.0


class _Allowance:
    """A token bucket: at most `BURST` pieces at once, and `PIECES_PER_S` in the long run."""

    def __init__(self) -> None:
        self._tokens = float(BURST)
        self._counted_at = time.monotonic()

    def take(self) -> bool:
        now = time.monotonic()
        self._tokens = min(BURST, self._tokens + (now - self._counted_at) * PIECES_PER_S)
        self._counted_at = now
        if self._tokens < 1:
            return False
        self._tokens -= 1
        return True


class Printer(io.TextIOBase):
    """`sys.stdout` or `sys.stderr` of the REPL.

    A line goes out when it is complete, as long as there are not too many a second; the rest goes out with the next
    one, or at the end of the block. Text past its bounds is kept as a tail and not sent before the end.

    Args:
        stream: Which of the two.
        bounds: Of what is sent for one block, see `HeadTail`.
        send: Called with each piece of text.
        undisturbed: Entered around each sending, so that an interrupt in between loses nothing of it.
    """

    encoding = "utf-8"
    errors = "backslashreplace"

    def __init__(
        self,
        stream: Stream,
        bounds: OutputBounds,
        send: Callable[[Stream, str], None],
        undisturbed: Callable[[], AbstractContextManager[None]] = nullcontext,
    ) -> None:
        self._stream: Stream = stream
        self._bounds = bounds
        self._send = send
        self._undisturbed = undisturbed
        self.buffer = _Bytes(self)
        self._owner = os.getpid()
        self._forked = threading.Lock()  # never taken here, so that it is free in every forked process
        self._line_of: tuple[int, str] = (0, "")
        self._lock = threading.RLock()
        self._kept: HeadTail[str] = HeadTail(bounds, "")
        self._waiting: list[str] = []
        self._waiting_chars = 0
        self._lines, self._flushes = _Allowance(), _Allowance()
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
        if os.getpid() != self._owner:
            self._write_in_fork(text, whole_lines=True)
            return len(text)
        with self._lock:
            head = self._kept.add(text)
            if head:
                self._waiting.append(head)
                self._waiting_chars += len(head)
                if self._waiting_chars >= MAX_PIECE_CHARS or (head[-1] == "\n" and self._lines.take()):
                    self.send_waiting()
        return len(text)

    def flush(self) -> None:
        """Send what waits, unless it was asked for too often just now."""
        if os.getpid() != self._owner:  # before the lock: another thread of the parent may have held it at the fork
            self._write_in_fork("", whole_lines=False)
            return
        with self._lock:
            if self._waiting and self._flushes.take():
                self.send_waiting()

    def close(self) -> None:
        """Flush, and stay open: what is printed after it, by this block or the next, would be lost."""
        self.flush()

    def reconfigure(self, **_options: Any) -> None:
        """Accept what a program asks of its stdout, usually UTF-8, which it is."""
        self.flush()

    def send_waiting(self) -> None:
        """Send what waits, if there is a block that it belongs to."""
        if os.getpid() != self._owner:
            return
        with self._lock, self._undisturbed():
            if not self._block_runs:
                return
            waiting, self._waiting, self._waiting_chars = self._waiting, [], 0
            text = "".join(waiting)
            for at in range(0, len(text), MAX_PIECE_CHARS):
                self._send(self._stream, text[at : at + MAX_PIECE_CHARS])

    def begin_block(self) -> None:
        """From here on text may be sent; what threads printed meanwhile belongs to this block."""
        with self._lock:
            self._block_runs = True
            self._lines, self._flushes = _Allowance(), _Allowance()

    def end_block(self) -> None:
        """Send everything, tail included. What is written from here on waits for the next block."""
        with self._lock:
            if tail := self._kept.finish():
                self._waiting.append(tail)
            self.send_waiting()
            self._kept = HeadTail(self._bounds, "")
            self._block_runs = False

    def _write_in_fork(self, text: str, whole_lines: bool) -> None:
        """A forked process prints where any other would: to the descriptor, which init reads."""
        with self._forked:
            pid, before = self._line_of
            text = before + text if pid == os.getpid() else text
            end = text.rfind("\n") + 1 if whole_lines else len(text)
            self._line_of = (os.getpid(), text[end:])
            data = text[:end].encode("utf-8", self.errors)
            while data:
                data = data[os.write(self.fileno(), data) :]


class _Bytes(io.RawIOBase):
    """`sys.stdout.buffer`, for code that writes bytes: they become the same text."""

    def __init__(self, printer: Printer) -> None:
        self._printer = printer
        self._decoder: codecs.IncrementalDecoder | None = None  # made when bytes come: most REPLs never write any

    def writable(self) -> bool:
        return True

    def fileno(self) -> int:
        return self._printer.fileno()

    def write(self, data: Any) -> int:
        if self._decoder is None:
            self._decoder = codecs.getincrementaldecoder("utf-8")("replace")  # a character may come in two writes
        raw = memoryview(data).tobytes()
        self._printer.write(self._decoder.decode(raw))
        return len(raw)

    def flush(self) -> None:
        self._printer.flush()

    def close(self) -> None:
        """Flush, and stay open: a wrapper around this one closes it when it is collected."""
        self._printer.flush()
