"""Processes held by their pidfds: any one, and the init of a worker, with the control socket to it."""

import asyncio
import contextlib
import errno
import os
import signal
import socket
from collections.abc import Callable, Sequence
from typing import Protocol

from rlm_broker.concurrency.forks import left_to_parent
from rlm_broker.errors import SandboxFailed, WorkerDied
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

KILL_TIMEOUT_S = 60.0
"""Seconds until a killed process counts as not killed, which is an error: a process in a system call may end late."""

FORK_END_S = 20.0
"""Seconds until init has ended a fork. Beyond them, the whole worker is killed. Init itself gives up after 5 s."""

HUNG_UP = (errno.EPIPE, errno.ECONNRESET, errno.EBADF)
"""Error numbers of a send to an ended init, or after `InitProcess.kill`."""

ContextPieces = Sequence[tuple[int, ContextPiece]]


async def ended(pidfd: int) -> None:
    """Wait until the process of a pidfd has ended. Its exit status can still be asked for."""
    loop, has_ended = asyncio.get_running_loop(), asyncio.Event()
    loop.add_reader(pidfd, has_ended.set)
    try:
        await has_ended.wait()
    finally:
        loop.remove_reader(pidfd)


def _ignore() -> None:
    """Ignore the end of a process."""


class HeldProcess:
    """A process held by its pidfd, which this object owns. `on_gone` is called once, when the process has ended."""

    def __init__(self, pidfd: int, on_gone: Callable[[], None]) -> None:
        self._pidfd = pidfd
        self._gone = asyncio.Event()
        self._on_gone = on_gone
        self._loop = asyncio.get_running_loop()
        self._loop.add_reader(pidfd, self._ended)
        left_to_parent(self, HeldProcess._leave)

    @property
    def pid(self) -> int | None:
        """Process id in this PID namespace; None after the process has ended, or if it has none here."""
        try:
            with open(f"/proc/self/fdinfo/{self._pidfd}") as file:
                found = next((int(line.split()[1]) for line in file if line.startswith("Pid:")), -1)
        except OSError:
            return None
        return found if found > 0 else None

    async def kill(self) -> None:
        """Send SIGKILL, and return when the process has ended. Raise SandboxFailed after `KILL_TIMEOUT_S`."""
        if self._pidfd >= 0 and not self._gone.is_set():
            self.send_kill()
            try:
                async with asyncio.timeout(KILL_TIMEOUT_S):
                    await self._gone.wait()
            except TimeoutError:
                raise SandboxFailed(f"a worker's process did not end within {KILL_TIMEOUT_S:g} s") from None
        self.forget()

    def send_kill(self) -> None:
        """Send SIGKILL, without waiting for the end."""
        # ProcessLookupError: the process ended by itself. PermissionError: root without CAP_KILL, or AppArmor. The
        # process then ends with init's control socket, or with init.
        with contextlib.suppress(ProcessLookupError, PermissionError):
            signal.pidfd_send_signal(self._pidfd, signal.SIGKILL)

    def forget(self) -> None:
        """Close the descriptor. Has no effect when repeated."""
        if self._pidfd >= 0:
            self._loop.remove_reader(self._pidfd)
            self._leave()

    def _leave(self) -> None:
        """Close the descriptor, also in a forked process, which shares the loop's epoll with its parent."""
        pidfd, self._pidfd = self._pidfd, -1
        if pidfd >= 0:
            os.close(pidfd)

    def _ended(self) -> None:
        self._loop.remove_reader(self._pidfd)
        self._gone.set()
        on_gone, self._on_gone = self._on_gone, _ignore  # else this process and its holder would keep each other
        on_gone()


class InitListener(Protocol):
    """A receiver of what an init says: a `Worker`, or a relay of its messages."""

    def heard(self, message: FromInit, fds: list[int]) -> None:
        """Take a message of init, and the descriptors beside it."""

    def unheard(self, error: OSError | None) -> None:
        """Learn that a descriptor beside a message was cut off; None: init says no more."""

    def ended(self, why: str | None) -> None:
        """Learn that init has ended. `why` is a reason that it does not know itself, as one clause."""


class _Deaf:
    """The listener of an init that has ended."""

    def heard(self, message: FromInit, fds: list[int]) -> None:
        """Ignore the message."""

    def unheard(self, error: OSError | None) -> None:
        """Ignore the news."""

    def ended(self, why: str | None) -> None:
        """Ignore the news."""


class WorkerInit(Protocol):
    """An init, wherever it is. Its `listener` learns what it says, and of its end, and is set before the event loop
    goes on."""

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


class WorkerSocket:
    """Our end of a control socket of an init on this machine."""

    listener: InitListener

    def __init__(self, control: socket.socket) -> None:
        self._control = control
        self._loop = asyncio.get_running_loop()
        control.setblocking(False)
        self._loop.add_reader(control.fileno(), self._read)  # by number: a socket would be formatted each time

    def say(self, message: Control, *fds: int) -> None:
        """Send a message, or drop it if init has ended: its last message has the reason, and is still to be read."""
        try:
            if fds:
                socket.send_fds(self._control, [pack(message)], fds)
            else:
                self._control.send(pack(message))
        except OSError as error:
            if error.errno not in HUNG_UP:
                raise WorkerDied(f"the worker's init cannot be reached: {error.strerror}") from None

    async def bring(self, context: ContextPieces) -> None:
        """Do nothing: memfds are passed on as they are."""

    async def fetch(self, fd: int) -> None:
        """Do nothing: the descriptor is the file's own."""

    async def store(self, fd: int) -> None:
        """Do nothing: the descriptor is the file's own."""

    def send_kill(self) -> None:
        """End the processes at the other end, without waiting for their end."""
        raise NotImplementedError

    def _hang_up(self) -> None:
        """End the socket. What init has sent can still be read."""
        with contextlib.suppress(OSError):  # closed, or init has ended
            self._control.shutdown(socket.SHUT_WR)

    def _close(self) -> None:
        """Close the socket, and wake the caller of an exchange."""
        if self._control.fileno() >= 0:
            self._loop.remove_reader(self._control.fileno())
            self._control.close()
            self.listener.unheard(None)

    def _read(self) -> None:
        fds: list[int] = []
        try:
            packet, fds = receive(self._control, MAX_PACKET_BYTES, 1)
        except (BlockingIOError, ConnectionResetError):
            # unix(7): if init ends with a message unread, one read fails with ECONNRESET, before the reads of
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
            self._hung_up()
            return
        try:
            message: FromInit = unpack_from_init(packet)
        except MessageInvalid:
            message = Failed(step="speak", reason="its init sent an invalid message")
        self._heard(message, fds)

    def _heard(self, message: FromInit, fds: list[int]) -> None:
        self.listener.heard(message, fds)

    def _hung_up(self) -> None:
        self.listener.unheard(None)


class InitProcess(WorkerSocket):
    """An init on this machine, with its pidfd, which this object owns, and our end of the control socket."""

    def __init__(self, pidfd: int, control: socket.socket) -> None:
        super().__init__(control)
        self._held = HeldProcess(pidfd, lambda: self.listener.ended(None))
        self._repl: HeldProcess | None = None

    @property
    def pid(self) -> int | None:
        """Process id in this PID namespace; None after the process has ended, or if it has none here."""
        return self._held.pid

    def send_kill(self) -> None:
        """Send SIGKILL, without waiting for the end."""
        self._held.send_kill()

    async def kill(self) -> None:
        """Kill init, and return when the whole worker is gone. Raises `SandboxFailed` if a process does not end."""
        self._hang_up()  # init ends with it, also where the kernel or AppArmor forbids signals
        try:
            if self._repl is not None:  # the kernel ends it after init, so that its own pidfd has to be awaited
                await self._repl.kill()
            await self._held.kill()
            if self._repl is not None:  # init told of it meanwhile
                await self._repl.kill()
        finally:
            self._close()
        self.listener = _Deaf()  # it was told all, and the two need not wait for the collector to be freed

    def _heard(self, message: FromInit, fds: list[int]) -> None:
        if isinstance(message, Forked) and fds:
            if self._repl is not None:  # init starts a REPL only when all processes of the last have ended
                self._repl.forget()
            self._repl = HeldProcess(fds[0], _ignore)  # its init reports its end
        else:
            super()._heard(message, fds)


class ForkInit(WorkerSocket):
    """The init of a fork, on the fork's own control socket.

    Args:
        whole: Init's handle on the socket of the worker, which ends all of it.
    """

    def __init__(self, control: socket.socket, whole: WorkerInit) -> None:
        super().__init__(control)
        self._whole = whole
        self._gone = asyncio.Event()

    @property
    def pid(self) -> int | None:
        """Process id of init, as of any `WorkerInit`."""
        return self._whole.pid

    def send_kill(self) -> None:
        """Have init end the fork, without waiting for its end."""
        self._hang_up()

    async def kill(self) -> None:
        """End the fork, and return when its processes are gone. If init does not end it, end the whole worker."""
        self._hang_up()
        try:
            if self._control.fileno() >= 0:
                async with asyncio.timeout(FORK_END_S):
                    await self._gone.wait()
        except TimeoutError:
            await self._whole.kill()
        finally:
            self._close()
        self.listener = _Deaf()

    def _hung_up(self) -> None:
        super()._hung_up()
        self._gone.set()
        self.listener.ended(None)
