"""What a REPL writes to its descriptors 1 and 2, and the stack that it prints before its end: read by init.

Not by a thread of the REPL: that deadlocks with C code that holds the GIL while it writes more than a pipe holds.
"""

import contextlib
import fcntl
import os
import select
from collections.abc import Callable
from typing import NamedTuple

from sandbox_worker.wire.control import Written
from sandbox_worker.wire.headtail import HeadTail
from sandbox_worker.wire.messages import Stream

PIPE_BYTES = 1 << 14
"""With the default of 64 KiB some 1,000 pipes exhaust an ordinary user's allowance (fs.pipe-user-pages-soft)."""
DRAIN_READS = 8
"""Reads of a pipe for one `drain`: more than it can hold, and an end when something writes on and on."""
EXPLAIN_S = 0.25
"""How long a REPL that is to be killed may take to say where it is; one that is stopped says nothing."""
PAUSE_S = 0.01
STACK_BYTES = 8192


class WriteEnds(NamedTuple):
    """The REPL's ends of three pipes."""

    stdout: int
    stderr: int
    stack: int


class ReplOutput:
    """Init's ends of a REPL's pipes, one REPL after the other.

    Args:
        poll: Told which descriptors to wait for; `forward` is to be called for those that are readable.
        limit: Bytes of each stream passed on of one block, head and tail; see `HeadTail`.
        say: Called with each piece.
    """

    def __init__(self, poll: "select.poll", limit: int, say: Callable[[Written], None]) -> None:
        self._poll = poll
        self._limit = limit
        self._say = say
        self._pipes: dict[int, _Pipe] = {}
        self._stack_fd = -1

    def open(self) -> WriteEnds:
        """Pipes for a fresh REPL; the caller closes these ends when the REPL has them."""
        write_ends = []
        streams: tuple[Stream, ...] = ("stdout", "stderr")
        for stream in streams:
            read_end, write_end = os.pipe2(os.O_CLOEXEC)
            fcntl.fcntl(write_end, fcntl.F_SETPIPE_SZ, PIPE_BYTES)
            os.set_blocking(read_end, False)
            self._pipes[read_end] = _Pipe(read_end, stream, self._limit)
            self._poll.register(read_end, select.POLLIN)
            write_ends.append(write_end)
        self._stack_fd, stack_end = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
        stdout, stderr = write_ends
        return WriteEnds(stdout, stderr, stack_end)

    def close(self) -> None:
        """Forget the REPL. Harmless when repeated."""
        for pipe in self._pipes.values():
            with contextlib.suppress(KeyError):
                self._poll.unregister(pipe.fd)
            os.close(pipe.fd)
        self._pipes.clear()
        if self._stack_fd >= 0:
            os.close(self._stack_fd)
            self._stack_fd = -1

    def forward(self, fd: int) -> bool:
        """Pass on what is in a pipe; whether there was something."""
        pipe = self._pipes.get(fd)
        if pipe is None:
            return False
        try:
            data = os.read(fd, PIPE_BYTES)
        except BlockingIOError:
            return False
        if not data:  # every write end is closed: nothing can come any more, and poll would report just that for ever
            with contextlib.suppress(KeyError):
                self._poll.unregister(fd)
            return False
        if head := pipe.kept.add(data):
            self._say(Written(stream=pipe.stream, data=head))
        return True

    def drain(self) -> None:
        """Pass on all that was written so far; what comes later belongs to the next block."""
        for pipe in self._pipes.values():
            for _ in range(DRAIN_READS):
                if not self.forward(pipe.fd):
                    break
            tail = pipe.kept.finish()
            for at in range(0, len(tail), PIPE_BYTES):
                self._say(Written(stream=pipe.stream, data=tail[at : at + PIPE_BYTES]))
            pipe.kept = HeadTail[bytes](self._limit, b"")

    def read_stack(self, wait_s: float) -> bytes:
        """The stack that the REPL was just asked for: what comes until nothing more comes, it is written in pieces.

        Args:
            wait_s: For the first piece.
        """
        printed = select.poll()
        printed.register(self._stack_fd, select.POLLIN)
        stack = b""
        while len(stack) < STACK_BYTES and printed.poll(wait_s * 1000):
            piece = os.read(self._stack_fd, STACK_BYTES)
            if not piece:
                break
            stack += piece
            wait_s = PAUSE_S
        return stack[:STACK_BYTES]


class _Pipe:
    """The read end of the REPL's descriptor 1 or 2, and what was kept of the current block's bytes."""

    def __init__(self, fd: int, stream: Stream, limit: int) -> None:
        self.fd = fd
        self.stream: Stream = stream
        self.kept = HeadTail[bytes](limit, b"")
