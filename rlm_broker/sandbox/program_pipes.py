"""The three pipes of a program. The event loop writes its input and reads its output."""

import asyncio
import os
from contextlib import ExitStack
from types import TracebackType
from typing import Final, Self

from rlm_broker.concurrency.forking import left_to_parent
from rlm_broker.errors import refused_by_machine
from sandbox_worker.wire.bounds import HeadTail, OutputBounds

PIECE_BYTES: Final = 1 << 16
"""Bytes that are read or written in one turn of the loop: the capacity of a pipe (pipe(7))."""
FLOOD_PAUSE_S: Final = 0.001
"""Seconds between two reads of an output whose head is full. So each pipe passes 64 MB/s at little cost."""
LAST_READS: Final = 64
"""Reads of a pipe at most once the program has ended: 4 MB, more than a pipe can hold."""


class ProgramPipes:
    """The pipes of one program: a context manager that closes all ends.

    Args:
        given: Bytes that the program reads from descriptor 0.
        bounds: Bounds on what is kept of each output.

    Attributes:
        theirs: Descriptors that become the program's 0, 1 and 2.
    """

    def __init__(self, given: bytes, bounds: OutputBounds) -> None:
        self.theirs: list[int] = []
        self._given = given
        self._bounds = bounds
        self._opened = ExitStack()

    def __enter__(self) -> Self:
        try:
            with ExitStack() as opened:
                input_end, input_fd = self._pipe(opened)
                stdout_fd, stdout_end = self._pipe(opened)
                stderr_fd, stderr_end = self._pipe(opened)
                self.theirs = [input_end, stdout_end, stderr_end]
                for fd in (input_fd, stdout_fd, stderr_fd):
                    os.set_blocking(fd, False)
                self._input = _Input(input_fd, self._given)
                self._stdout = _Output(stdout_fd, self._bounds)
                self._stderr = _Output(stderr_fd, self._bounds)
                opened.pop_all()
        except OSError as error:
            raise refused_by_machine("there are no pipes for a program", error) from None
        return self

    def __exit__(
        self, _kind: type[BaseException] | None, _error: BaseException | None, _traceback: TracebackType | None
    ) -> None:
        self.started()
        for end in (self._input, self._stdout, self._stderr):
            end.close()

    def started(self) -> None:
        """Close our copies of the program's ends once it has them: a pipe ends when all copies are closed."""
        theirs, self.theirs = self.theirs, []
        for fd in theirs:
            os.close(fd)

    def finish(self) -> tuple[str, str]:
        """Return all of stdout and of stderr, once all processes of the program have ended."""
        return self._stdout.finish(), self._stderr.finish()

    def _pipe(self, opened: ExitStack) -> tuple[int, int]:
        ends = os.pipe()
        for fd in ends:
            opened.callback(os.close, fd)
        return ends


class _End:
    """Our end of a pipe. The loop serves it when the pipe is ready."""

    def __init__(self, fd: int) -> None:
        self._fd = fd
        self._loop = asyncio.get_running_loop()
        left_to_parent(self, _End._leave)

    def close(self) -> None:
        """Close the end. Has no effect when repeated."""
        if self._fd >= 0:
            self._stop()
            self._leave()

    def _leave(self) -> None:
        fd, self._fd = self._fd, -1
        if fd >= 0:
            os.close(fd)

    def _stop(self) -> None:
        self._loop.remove_reader(self._fd)
        self._loop.remove_writer(self._fd)


class _Input(_End):
    """The program's input. The pipe ends after its last byte. Input that the program does not read is dropped."""

    def __init__(self, fd: int, given: bytes) -> None:
        super().__init__(fd)
        self._left = memoryview(given)
        self._loop.add_writer(fd, self._write)

    def _write(self) -> None:
        try:
            if self._left:
                self._left = self._left[os.write(self._fd, self._left[:PIECE_BYTES]) :]
        except BlockingIOError:
            return
        except BrokenPipeError:  # the program has closed its end
            self._left = self._left[:0]
        if not self._left:
            self.close()


class _Output(_End):
    """The program's output, of which head and tail are kept. All is read, so that the program never waits for us."""

    def __init__(self, fd: int, bounds: OutputBounds) -> None:
        super().__init__(fd)
        self._kept: HeadTail[bytes] = HeadTail(bounds, b"")
        self._head: list[bytes] = []
        self._pause: asyncio.TimerHandle | None = None
        self._listen()

    def finish(self) -> str:
        """Return the output that was kept as text, with a note of what was cut."""
        for _ in range(LAST_READS):
            if self._fd < 0 or not self._read():
                break
        self.close()
        return b"".join([*self._head, self._kept.finish()]).decode("utf-8", "replace")

    def _listen(self) -> None:
        self._pause = None
        self._loop.add_reader(self._fd, self._take)

    def _take(self) -> None:
        if self._read() and not self._kept.head_left:
            self._loop.remove_reader(self._fd)
            self._pause = self._loop.call_later(FLOOD_PAUSE_S, self._listen)

    def _read(self) -> bool:
        """Read once, and return whether there may be more."""
        try:
            data = os.read(self._fd, PIECE_BYTES)
        except BlockingIOError:
            return False
        if not data:
            self.close()
            return False
        if head := self._kept.add(data):
            self._head.append(head)
        return True

    def _stop(self) -> None:
        super()._stop()
        if self._pause is not None:
            self._pause.cancel()
            self._pause = None
