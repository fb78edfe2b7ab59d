"""Init as this machine has it: a process held by a pidfd, and the control socket to it."""

import asyncio
import contextlib
import errno
import socket
from collections.abc import Sequence
from typing import Protocol

from rlm_broker.errors import WorkerDied
from rlm_broker.sandbox.workers.held_process import HeldProcess
from sandbox_worker.loading.form import ContextPiece
from sandbox_worker.wire.control import (
    MAX_PACKET_BYTES,
    Control,
    Failed,
    Forked,
    FromInit,
    Opened,
    pack,
    unpack_from_init,
)
from sandbox_worker.wire.descriptors import DescriptorsCut, receive
from sandbox_worker.wire.errors import MessageInvalid

HUNG_UP = (errno.EPIPE, errno.ECONNRESET, errno.EBADF)
"""Error numbers of a send to an init that has ended, or after `InitProcess.kill`."""

ContextPieces = Sequence[tuple[int, ContextPiece]]


class InitListener(Protocol):
    """A receiver of what an init says: a `Worker`, or a relay of its messages."""

    def heard(self, message: FromInit, fds: list[int]) -> None:
        """Take a message of init, and the descriptors beside it."""

    def unheard(self, error: OSError | None) -> None:
        """Learn that a descriptor beside a message was cut off; None: init says no more."""

    def ended(self, why: str | None) -> None:
        """Learn that init has ended. `why` is a reason that it does not know itself, as one clause."""


class WorkerInit(Protocol):
    """An init, wherever it is.

    Attributes:
        listener: Learns what it says, and of its end. Set before the event loop goes on.
    """

    listener: InitListener

    @property
    def pid(self) -> int | None:
        """Process id in this PID namespace; None if it has none here, or has ended."""

    def say(self, message: Control, *fds: int) -> None:
        """Send a message with descriptors beside it, or drop it if init has ended."""

    async def bring(self, context: ContextPieces) -> None:
        """Have the memfds of a context ready where init is, before a message has one of them beside it."""

    async def fetch(self, fd: int) -> None:
        """Wait until all of a file that init has opened is behind its descriptor."""

    async def store(self, fd: int) -> None:
        """Have all that was written to the descriptor of a file behind init's own, too."""

    def send_kill(self) -> None:
        """End it, without waiting for the end."""

    async def kill(self) -> None:
        """End it with all of its processes, and return when they are gone."""


class InitProcess:
    """An init on this machine.

    Args:
        pidfd: Descriptor of the process, which this object owns.
        control: Our end of the control socket.
    """

    listener: InitListener

    def __init__(self, pidfd: int, control: socket.socket) -> None:
        self._control = control
        self._loop = asyncio.get_running_loop()
        control.setblocking(False)
        self._loop.add_reader(control.fileno(), self._read)  # by number: a socket would be formatted each time
        self._held = HeldProcess(pidfd, lambda: self.listener.ended(None))
        self._repl: HeldProcess | None = None

    @property
    def pid(self) -> int | None:
        """Process id in this PID namespace; None after the process has ended, or if it has none here."""
        return self._held.pid

    def say(self, message: Control, *fds: int) -> None:
        """Send a message, or drop it if init has ended: its last message has the reason, and is still to be read."""
        try:
            socket.send_fds(self._control, [pack(message)], fds)
        except OSError as error:
            if error.errno not in HUNG_UP:
                raise WorkerDied(f"the worker's init cannot be reached: {error.strerror}") from None

    async def bring(self, context: ContextPieces) -> None:
        """Do nothing: memfds are passed on as they are."""

    async def fetch(self, fd: int) -> None:
        """Do nothing: the descriptor is that of the file itself."""

    async def store(self, fd: int) -> None:
        """Do nothing: the descriptor is that of the file itself."""

    def send_kill(self) -> None:
        """Send SIGKILL, without waiting for the end."""
        self._held.send_kill()

    async def kill(self) -> None:
        """Kill init, and return when the whole worker is gone. Raises `SandboxFailed` if a process does not end."""
        with contextlib.suppress(OSError):  # closed, or init has ended
            # Init ends with it, also where the kernel or AppArmor forbids signals. What it has sent can still be read.
            self._control.shutdown(socket.SHUT_WR)
        try:
            if self._repl is not None:  # the kernel ends it after init, so that its own pidfd has to be awaited
                await self._repl.kill()
            await self._held.kill()
        finally:
            if self._control.fileno() >= 0:
                self._loop.remove_reader(self._control.fileno())
                self._control.close()
                self.listener.unheard(None)  # wakes a caller that waits for an answer, or has been cancelled already

    def _read(self) -> None:
        fds: list[int] = []
        try:
            packet, fds = receive(self._control, MAX_PACKET_BYTES, 1)
        except (BlockingIOError, ConnectionResetError):
            # unix(7): if init ends with a message unread, one read fails with ECONNRESET, before the reads that return
            # what init sent. The loop calls again.
            return
        except DescriptorsCut as cut:
            self.listener.unheard(cut)
            if not isinstance(unpack_from_init(cut.packet), Opened):  # a REPL without its pidfd may outlive its init
                self.send_kill()
            return
        except OSError:
            packet = b""
        if not packet:
            self._loop.remove_reader(self._control.fileno())
            self.listener.unheard(None)
            return
        try:
            message: FromInit = unpack_from_init(packet)
        except MessageInvalid:
            message = Failed(step="speak", reason="its init sent an invalid message")
        if isinstance(message, Forked) and fds:
            if self._repl is not None:  # init starts a REPL only when all processes of the last have ended
                self._repl.forget()
            self._repl = HeldProcess(fds[0], _ignore)
            return
        self.listener.heard(message, fds)


def _ignore() -> None:
    """Ignore the end of the REPL: its init reports it."""
