"""Reads the REPL's output (descriptors 1 and 2) and the stack that the REPL prints before init kills it.

Init reads the pipes. A thread of the REPL could not: C code holding the GIL while it writes more than a pipe holds
would wait for the thread, and the thread for the GIL.
"""

import contextlib
import fcntl
import mmap
import os
import select
import time
from collections.abc import Callable
from typing import NamedTuple

from sandbox_worker.init.sockets import Events
from sandbox_worker.wire.bounds import HeadTail, OutputBounds
from sandbox_worker.wire.control import Written
from sandbox_worker.wire.descriptors import BELL, pending_bytes
from sandbox_worker.wire.messages import Stream

PIPE_BYTES = 1 << 14
"""Capacity of a pipe. At the default of 64 KiB some 1,000 pipes exhaust an ordinary user's allowance
(fs.pipe-user-pages-soft)."""
DRAIN_READS = 8
"""Most reads of a pipe in one `drain`: more than it can hold, and an end if a process keeps writing."""
EXPLAIN_S = 0.25
"""Most seconds that a REPL gets to print its stack before it is killed. A stopped REPL prints none."""
PAUSE_S = 0.01
"""Seconds without a further piece after which the stack counts as complete."""
FLOOD_PAUSE_S = 0.002
"""Seconds between two reads of a pipe whose output is not forwarded any more: 8 MB/s at most."""
STACK_BYTES = 8192
"""Most bytes of a stack. The rest is dropped."""


class WriteEnds(NamedTuple):
    """The REPL's ends of three pipes."""

    stdout: int
    stderr: int
    stack: int


class ReplOutput:
    """Init's ends of the pipes of its REPL, and of each REPL that replaces it.

    Args:
        events: What init waits for.
        bounds: Most output of one block that is forwarded, head and tail. See `HeadTail`.
        say: Called with each piece of output.
        bell: Shared memory of at least 8 bytes, by which the REPL sees that its pipes were read.
    """

    def __init__(self, events: Events, bounds: OutputBounds, say: Callable[[Written], None], bell: mmap.mmap) -> None:
        self._events = events
        self._bounds = bounds
        self._say = say
        self._bell = bell
        self._rung = 0
        self._pipes: dict[int, _Pipe] = {}
        self._stack_fd = -1

    def open(self) -> WriteEnds:
        """Make pipes for a new REPL and return its ends. The caller closes them once the REPL has inherited them."""
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
        """Close the pipes. Harmless if they are closed already."""
        for pipe in self._pipes.values():
            self._listen(pipe, False)
            os.close(pipe.fd)
        self._pipes.clear()
        if self._stack_fd >= 0:
            os.close(self._stack_fd)
            self._stack_fd = -1

    def regulate(self, host_listens: bool) -> float | None:
        """Choose the pipes to wait for.

        A pipe is left out while the orchestrator does not take messages, and for a moment after a flood.

        Args:
            host_listens: Whether the orchestrator has taken all messages so far.

        Returns:
            Seconds until the next call is due, or None.
        """
        now = time.monotonic()
        paused = [pipe.paused_until - now for pipe in self._pipes.values() if pipe.paused_until > now]
        for pipe in self._pipes.values():
            self._listen(pipe, host_listens and not pipe.has_ended and pipe.paused_until <= now)
        return min(paused, default=None)

    def forward(self, fd: int, _events: int = 0) -> bool:
        """Read a pipe and forward the output. Return whether there was any."""
        pipe = self._pipes.get(fd)
        if pipe is None:
            return False
        self._ring()
        try:
            data = os.read(fd, PIPE_BYTES)
        except BlockingIOError:
            return False
        if not data:  # all write ends are closed: poll would report the end of the stream again and again
            pipe.has_ended = True
            return False
        pipe.was_read = True
        if head := pipe.kept.add(data):
            self._say(Written(stream=pipe.stream, data=head))
        if not pipe.kept.head_left:  # the head is full: leave the flood in its pipe, so that its writer waits
            pipe.paused_until = time.monotonic() + FLOOD_PAUSE_S
        return True

    def drain(self) -> None:
        """Forward all output so far. Later output belongs to the next block."""
        for pipe in self._pipes.values():
            for _ in range(DRAIN_READS):
                if not pending_bytes(pipe.fd) or not self.forward(pipe.fd):
                    break
            self._finish(pipe)

    def begin_block(self) -> None:
        """Reset the bounds for a new block: output that came after the last block's end does not count against it.

        The pipes are not read here: the block may be running already, and have written to them.
        """
        for pipe in self._pipes.values():
            self._finish(pipe)

    @property
    def has_stack(self) -> bool:
        """Whether a stack was printed, maybe by a REPL that has crashed."""
        return self._stack_fd >= 0 and pending_bytes(self._stack_fd) > 0

    def read_stack(self, wait_s: float) -> bytes:
        """Return the stack that the REPL was just signalled to print. It comes in pieces.

        Args:
            wait_s: Most seconds to wait. Model code has the descriptor too: it may write its own text to it, or read
                the stack before init does, but it cannot make the wait longer.
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

    def drop_stack(self) -> None:
        """Forget a stack that was printed too late, before another process uses the pipe."""
        with contextlib.suppress(BlockingIOError):
            while os.read(self._stack_fd, STACK_BYTES):
                pass

    def _finish(self, pipe: "_Pipe") -> None:
        if not pipe.was_read:
            return
        tail = pipe.kept.finish()
        for at in range(0, len(tail), PIPE_BYTES):
            self._say(Written(stream=pipe.stream, data=tail[at : at + PIPE_BYTES]))
        pipe.kept = HeadTail(self._bounds, b"")
        pipe.was_read = False
        pipe.paused_until = 0.0

    def _ring(self) -> None:
        """Show the REPL that its pipes are about to be read: output that has left them may still be on its way.

        Init only writes this memory. If model code changes it, only model code's own output comes late.
        """
        self._rung += 1
        BELL.pack_into(self._bell, 0, self._rung)

    def _listen(self, pipe: "_Pipe", wanted: bool) -> None:
        if wanted and not pipe.is_listened_to:
            self._events.listen(pipe.fd, self.forward)
        elif pipe.is_listened_to and not wanted:
            self._events.forget(pipe.fd)
        pipe.is_listened_to = wanted


class _Pipe:
    """The read end of the REPL's descriptor 1 or 2, and what was kept of the current block's bytes."""

    def __init__(self, fd: int, stream: Stream, bounds: OutputBounds) -> None:
        self.fd = fd
        self.stream: Stream = stream
        self.kept: HeadTail[bytes] = HeadTail(bounds, b"")
        self.was_read = False  # since the block began
        self.is_listened_to = False
        self.has_ended = False
        self.paused_until = 0.0
