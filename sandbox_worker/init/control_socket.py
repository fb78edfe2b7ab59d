"""Init's end of its control socket. Saying something never makes it wait: it is what watches and ends the REPL."""

import array
import contextlib
import os
import select
import socket
from collections import deque

from sandbox_worker.wire.control import MAX_PACKET_BYTES, Control, pack
from sandbox_worker.wire.descriptors import receive

MOST_FDS = 4
"""Descriptors beside one packet: those of `RunProgram`."""


class ControlSocket:
    """Packets out, as far as the orchestrator takes them and then from a queue; packets in.

    The queue is bounded by who fills it: while it is not empty, a REPL's output stays in its pipes.
    """

    def __init__(self, connected: socket.socket, poll: "select.poll") -> None:
        self._socket = connected
        self._poll = poll
        self._queue: deque[tuple[bytes, tuple[int, ...]]] = deque()
        poll.register(connected.fileno(), select.POLLIN)

    def fileno(self) -> int:
        return self._socket.fileno()

    @property
    def is_clear(self) -> bool:
        """Whether everything that was said has been taken."""
        return not self._queue

    def say(self, message: Control, *fds: int) -> None:
        """Send a message, with descriptors that are ours no longer."""
        self._queue.append((pack(message), fds))
        if len(self._queue) == 1:
            self.flush()

    def flush(self) -> None:
        """Send what the orchestrator takes without making us wait."""
        while self._queue:
            packet, fds = self._queue[0]
            try:
                # Not socket.send_fds, which forgets its flags.
                beside = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", fds))] if fds else []
                self._socket.sendmsg([packet], beside, socket.MSG_DONTWAIT)
            except BlockingIOError:
                break
            except OSError:  # the orchestrator is gone, and we are going to read that
                pass
            self._queue.popleft()
            for fd in fds:
                os.close(fd)
        events = select.POLLIN | (select.POLLOUT if self._queue else 0)
        with contextlib.suppress(FileNotFoundError):
            self._poll.modify(self._socket.fileno(), events)

    def hear(self) -> tuple[bytes, list[int]]:
        """The next packet and its descriptors; an empty packet when the orchestrator has hung up."""
        return receive(self._socket, MAX_PACKET_BYTES, MOST_FDS)

    def close(self) -> None:
        """In a process that is not init."""
        self._socket.close()
