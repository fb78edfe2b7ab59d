"""Output of Python code: `sys.stdout` and `sys.stderr`, which send it over the connection while the block runs."""

import codecs
import io
import math
import os
import threading
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any

from sandbox_worker.wire.bounds import HeadTail, OutputBounds
from sandbox_worker.wire.messages import Stream

MAX_PIECE_CHARS = 1 << 16
"""Maximum characters of text in one message; longer text is split. As JSON they stay far below any frame limit."""
BURST = 64
"""Number of lines in a row that are each sent at once. Further lines of a fast loop are sent together: otherwise each
line would cost a frame."""
PIECES_PER_S = 500.0
"""Lines per second that are each sent at once, after a burst."""


class _Allowance:
    """Token bucket: permits `BURST` pieces at once, and `PIECES_PER_S` in the long run."""

    def __init__(self) -> None:
        self._tokens = self._counted_at = 0.0
        self.refill()

    def refill(self) -> None:
        self._counted_at = -math.inf

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

    A complete line is sent at once, as long as there are not too many per second. Other text is sent with the next
    line, or at the end of the block. Text beyond the head of the bounds is kept, and its tail is sent at the end.

    Args:
        stream: "stdout" or "stderr".
        bounds: Bounds of the output of one block, see `HeadTail`.
        send: Function called with each piece of text.
        undisturbed: Context manager around each call of `send`, which delays interrupts so that no text is lost.
        helped: Function that calls another one, and gives it memory where it has none.
        push: Function called at a flush. Text that was given to `send` may wait until then.

    Attributes:
        owner: Pid of the REPL. In others, forked by model code, the text goes to a descriptor.
    """

    encoding = "utf-8"
    errors = "backslashreplace"

    def __init__(
        self,
        stream: Stream,
        bounds: OutputBounds,
        send: Callable[[Stream, str], None],
        undisturbed: Callable[[], AbstractContextManager[None]] = nullcontext,
        helped: Callable[[Callable[[], Any]], Any] = lambda work: work(),
        push: Callable[[], object] = lambda: None,
    ) -> None:
        self._stream: Stream = stream
        self._bounds = bounds
        self._send = send
        self._undisturbed = undisturbed
        self._helped = helped
        self._push = push
        self.buffer = _Bytes(self)
        self.owner = os.getpid()
        self._forked = threading.Lock()  # only forked processes take it, so that it is free in each of them
        self._line_of: tuple[int, str] = (0, "")
        self._lock = threading.RLock()
        self._kept: HeadTail[str] = HeadTail(bounds, "")
        self._waiting: list[str] = []
        self._waiting_chars = 0
        self._lines, self._flushes = _Allowance(), _Allowance()
        self._block_runs = False
        self._was_used = False  # since the last block's end

    @property
    def name(self) -> str:
        return f"<{self._stream}>"

    def writable(self) -> bool:
        return True

    def isatty(self) -> bool:
        return False

    def fileno(self) -> int:
        """Return the descriptor that init reads. Output of C code and subprocesses to it is captured as well."""
        return 1 if self._stream == "stdout" else 2

    def write(self, text: str) -> int:
        if not isinstance(text, str):
            raise TypeError(f"write() argument must be str, not {type(text).__name__}")
        if os.getpid() != self.owner:
            self._write_in_fork(text, whole_lines=True)
            return len(text)
        with self._lock:
            self._was_used = True
            head = self._kept.add(text)
            if head:
                self._waiting.append(head)
                self._waiting_chars += len(head)
                if self._waiting_chars >= MAX_PIECE_CHARS or (head[-1] == "\n" and self._lines.take()):
                    self.send_waiting()
        return len(text)

    def flush(self) -> None:
        """Send the waiting text, unless there were too many flushes just before."""
        # Compare before taking the lock: in a forked process, a thread of the parent may have held it at the fork.
        if os.getpid() != self.owner:
            self._write_in_fork("", whole_lines=False)
            return
        with self._lock:
            if self._waiting and self._flushes.take():
                self.send_waiting()
            if self._block_runs:
                self._push()

    def close(self) -> None:
        """Flush, and stay open: otherwise later output of this block, or of the next one, would be lost."""
        self.flush()

    def reconfigure(self, **_options: Any) -> None:
        """Accept and ignore all options. Programs usually ask for UTF-8, which this stream has."""
        self.flush()

    def send_waiting(self) -> None:
        """Send the waiting text if a block runs. Between blocks it waits for the next one."""
        if os.getpid() != self.owner:
            return
        with self._lock, self._undisturbed():
            if not (self._block_runs and self._waiting):
                return
            waiting, self._waiting, self._waiting_chars = self._waiting, [], 0
            text = self._helped(lambda: "".join(waiting))
            for at in range(0, len(text), MAX_PIECE_CHARS):
                self._helped(partial(self._send_piece, text, at))

    def _send_piece(self, text: str, at: int) -> None:
        self._send(self._stream, text[at : at + MAX_PIECE_CHARS])

    def begin_block(self) -> None:
        """Begin a block. Text that threads printed since the last block belongs to this one."""
        with self._lock:
            self._block_runs = True
            self._lines.refill()
            self._flushes.refill()

    def end_block(self) -> None:
        """Send all waiting text with the tail, and end the block. Later text waits for the next block."""
        with self._lock:
            if self._was_used:
                if tail := self._kept.finish():
                    self._waiting.append(tail)
                self.send_waiting()
                self._kept = HeadTail(self._bounds, "")
                self._was_used = False
            self._block_runs = False

    def _write_in_fork(self, text: str, whole_lines: bool) -> None:
        """Write text of a forked process to the descriptor, which init reads: the connection is the REPL's alone."""
        with self._forked:
            pid, before = self._line_of
            text = before + text if pid == os.getpid() else text
            end = text.rfind("\n") + 1 if whole_lines else len(text)
            self._line_of = (os.getpid(), text[end:])
            data = text[:end].encode("utf-8", self.errors)
            while data:
                data = data[os.write(self.fileno(), data) :]


class _Bytes(io.RawIOBase):
    """`sys.stdout.buffer`: bytes that code writes are decoded as UTF-8 and printed as text."""

    def __init__(self, printer: Printer) -> None:
        self._printer = printer
        self._decoder: codecs.IncrementalDecoder | None = None  # made at the first write: most REPLs write no bytes

    def writable(self) -> bool:
        return True

    def fileno(self) -> int:
        return self._printer.fileno()

    def write(self, data: Any) -> int:
        if self._decoder is None:
            # An incremental decoder joins the bytes of one character that come in two writes.
            self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        raw = memoryview(data).tobytes()
        self._printer.write(self._decoder.decode(raw))
        return len(raw)

    def flush(self) -> None:
        self._printer.flush()

    def close(self) -> None:
        """Flush, and stay open: a wrapper such as TextIOWrapper closes its buffer when it is collected."""
        self._printer.flush()
