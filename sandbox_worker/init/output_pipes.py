"""What a REPL writes to its descriptors 1 and 2, and the stack that it prints before its end: read by init.

Not by a thread of the REPL: that deadlocks with C code that holds the GIL while it writes more than a pipe holds.
"""

import fcntl
import mmap
import os
import select
import time
from collections.abc import Callable
from typing import NamedTuple

from sandbox_worker.wire.bell import BELL, pending_bytes
from sandbox_worker.wire.control import Written
from sandbox_worker.wire.headtail import HeadTail, OutputBounds
from sandbox_worker.wire.messages import Stream

PIPE_BYTES = 1 << 14
"""With the default of 64 KiB some 1,000 pipes exhaust an ordinary user's allowance (fs.pipe-user-pages-soft)."""
DRAIN_READS = 8
"""Reads of a pipe for one `drain`: more than it can hold, and an end when something writes on and on."""
EXPLAIN_S = 0.25
"""How long a REPL that is to be killed may take to say where it is; one that is stopped says nothing."""
PAUSE_S = 0.01
FLOOD_PAUSE_S = 0.002
"""Between two reads of a pipe whose output is not passed on any more: at most 8 MB/s, at little cost to us."""
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
        bounds: Of what is passed on of one block, head and tail; see `HeadTail`.
        say: Called with each piece.
        bell: Shared memory of at least 8 bytes, which shows the REPL that its pipes were read.
    """

    def __init__(
        self, poll: "select.poll", bounds: OutputBounds, say: Callable[[Written], None], bell: mmap.mmap
    ) -> None:
        self._poll = poll
        self._bounds = bounds
        self._say = say
        self._bell = bell
        self._rung = 0
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
            self._pipes[read_end] = _Pipe(read_end, stream, self._bounds)
            write_ends.append(write_end)
        self._stack_fd, stack_end = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
        stdout, stderr = write_ends
        return WriteEnds(stdout, stderr, stack_end)

    def close(self) -> None:
        """Forget the REPL. Harmless when repeated."""
        for pipe in self._pipes.values():
            self._listen(pipe, False)
            os.close(pipe.fd)
        self._pipes.clear()
        if self._stack_fd >= 0:
            os.close(self._stack_fd)
            self._stack_fd = -1

    def regulate(self, host_listens: bool) -> float | None:
        """Choose the pipes to wait for: none while the orchestrator does not listen, none that flooded us just now.

        Returns:
            Seconds until this is to be called again, or None.
        """
        now = time.monotonic()
        paused = [pipe.paused_until - now for pipe in self._pipes.values() if pipe.paused_until > now]
        for pipe in self._pipes.values():
            self._listen(pipe, host_listens and not pipe.has_ended and pipe.paused_until <= now)
        return min(paused, default=None)

    def forward(self, fd: int) -> bool:
        """Pass on what is in a pipe; whether there was something."""
        pipe = self._pipes.get(fd)
        if pipe is None:
            return False
        self._ring()
        try:
            data = os.read(fd, PIPE_BYTES)
        except BlockingIOError:
            return False
        if not data:  # every write end is closed: nothing can come any more, and poll would report just that for ever
            pipe.has_ended = True
            return False
        if head := pipe.kept.add(data):
            self._say(Written(stream=pipe.stream, data=head))
        if not pipe.kept.head_left:  # nothing of it is going to be passed on soon: let the flood wait in its pipe
            pipe.paused_until = time.monotonic() + FLOOD_PAUSE_S
        return True

    def drain(self) -> None:
        """Pass on all that was written so far; what comes later belongs to the next block."""
        for pipe in self._pipes.values():
            for _ in range(DRAIN_READS):
                if not pending_bytes(pipe.fd) or not self.forward(pipe.fd):
                    break
            self._finish(pipe)

    def begin_block(self) -> None:
        """Give a block that begins all of its bounds: what came after the last one's end uses up none of them.

        The pipes are not read here. The block may be running by now, and have written what is in them.
        """
        for pipe in self._pipes.values():
            self._finish(pipe)

    def read_stack(self, wait_s: float) -> bytes:
        """The stack that the REPL was just asked for: what comes until nothing more comes, it is written in pieces.

        Args:
            wait_s: For all of it. Whatever model code writes there itself, or reads before us, it takes no longer.
        """
        deadline = time.monotonic() + wait_s
        printed = select.poll()
        printed.register(self._stack_fd, select.POLLIN)
        stack = b""
        while len(stack) < STACK_BYTES:
            left_s = deadline - time.monotonic()
            if left_s <= 0 or not printed.poll(1000 * (min(left_s, PAUSE_S) if stack else left_s)):
                break
            try:
                piece = os.read(self._stack_fd, STACK_BYTES)
            except BlockingIOError:
                continue
            if not piece:
                break
            stack += piece
        return stack[:STACK_BYTES]

    def _finish(self, pipe: "_Pipe") -> None:
        tail = pipe.kept.finish()
        for at in range(0, len(tail), PIPE_BYTES):
            self._say(Written(stream=pipe.stream, data=tail[at : at + PIPE_BYTES]))
        pipe.kept = HeadTail(self._bounds, b"")
        pipe.paused_until = 0.0

    def _ring(self) -> None:
        """Let the REPL see that its pipes were read, before they are: what is not in them any more may be on its way.

        Only ever written here. What model code makes of this memory is that its own output comes late.
        """
        self._rung += 1
        BELL.pack_into(self._bell, 0, self._rung)

    def _listen(self, pipe: "_Pipe", wanted: bool) -> None:
        if wanted and not pipe.is_listened_to:
            self._poll.register(pipe.fd, select.POLLIN)
        elif pipe.is_listened_to and not wanted:
            self._poll.unregister(pipe.fd)
        pipe.is_listened_to = wanted


class _Pipe:
    """The read end of the REPL's descriptor 1 or 2, and what was kept of the current block's bytes."""

    def __init__(self, fd: int, stream: Stream, bounds: OutputBounds) -> None:
        self.fd = fd
        self.stream: Stream = stream
        self.kept: HeadTail[bytes] = HeadTail(bounds, b"")
        self.is_listened_to = False
        self.has_ended = False
        self.paused_until = 0.0
