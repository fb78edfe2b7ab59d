"""The three pipes of a program: its input is written and its output read on the event loop."""

import asyncio
import os
from contextlib import ExitStack
from types import TracebackType
from typing import Final, Self

from rlm_broker.errors import SandboxFailed
from sandbox_worker.wire.headtail import HeadTail, OutputBounds

PIECE_BYTES: Final = 1 << 16
"""Bytes that are read or written in one turn of the loop: what a pipe holds."""
FLOOD_PAUSE_S: Final = 0.001
"""Between two reads of output of which the head is full: at most 64 MB/s of each pipe, at little cost to the loop."""
LAST_READS: Final = 64
"""Reads of a pipe when nothing of its program is left: more than it can hold."""


class ProgramPipes:
    """To be used as a context manager, which closes all ends.

    Attributes:
        theirs: The ends that become the program's descriptors 0, 1 and 2.
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
            raise SandboxFailed(f"there are no pipes for a program: {error.strerror}") from None
        return self

    def __exit__(
        self, _kind: type[BaseException] | None, _error: BaseException | None, _traceback: TracebackType | None
    ) -> None:
        self.started()
        for end in (self._input, self._stdout, self._stderr):
            end.close()

    def started(self) -> None:
        """The program has its ends: close ours of them, which would keep a pipe from ending."""
        theirs, self.theirs = self.theirs, []
        for fd in theirs:
            os.close(fd)

    def finish(self) -> tuple[str, str]:
        """Return all of stdout and of stderr, when nothing of the program is left."""
        return self._stdout.finish(), self._stderr.finish()

    def _pipe(self, opened: ExitStack) -> tuple[int, int]:
        ends = os.pipe()
        for fd in ends:
            opened.callback(os.close, fd)
        return ends


class _End:
    """Our end of a pipe, served when the loop has time and the pipe is ready."""

    def __init__(self, fd: int) -> None:
        self._fd = fd
        self._loop = asyncio.get_running_loop()

    def close(self) -> None:
        """Harmless when repeated."""
        if self._fd >= 0:
            self._stop()
            os.close(self._fd)
            self._fd = -1

    def _stop(self) -> None:
        self._loop.remove_reader(self._fd)
        self._loop.remove_writer(self._fd)


class _Input(_End):
    """What the program reads; then its end. What it does not read stays here."""

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
        except BrokenPipeError:  # it has closed its end
            self._left = self._left[:0]
        if not self._left:
            self.close()


class _Output(_End):
    """What the program writes, head and tail of it. All is read, so that the program goes on."""

    def __init__(self, fd: int, bounds: OutputBounds) -> None:
        super().__init__(fd)
        self._kept: HeadTail[bytes] = HeadTail(bounds, b"")
        self._head: list[bytes] = []
        self._pause: asyncio.TimerHandle | None = None
        self._listen()

    def finish(self) -> str:
        """Return what was kept, with a note of what was cut, as text."""
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
        """Whether there may be more."""
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
