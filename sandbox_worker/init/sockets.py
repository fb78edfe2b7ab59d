"""Init's ends of its sockets: the control socket, and the one on which the REPL gets descriptors while it lives."""

import array
import contextlib
import os
import select
import socket
from collections import deque
from collections.abc import Sequence

from sandbox_worker.wire.control import MAX_PACKET_BYTES, Control, pack
from sandbox_worker.wire.descriptors import A_CONTEXT, receive

MOST_FDS = 4
"""Most descriptors beside one packet: `RunProgram` has four."""


def send(connected: socket.socket, packet: bytes, fds: Sequence[int]) -> None:
    """Send a packet and descriptors beside it; an OSError if the peer has no room or has ended.

    `socket.send_fds` ignores its `flags` argument, and would block.
    """
    beside = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", fds))] if fds else []
    connected.sendmsg([packet], beside, socket.MSG_DONTWAIT)


class InitSocket:
    """Sends and receives packets. Packets that the orchestrator does not take at once wait in a queue.

    The queue stays small: while it is not empty, init leaves the REPL's output in its pipes.
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
        """Whether the orchestrator has taken all packets."""
        return not self._queue

    def say(self, message: Control, *fds: int) -> None:
        """Send a message with descriptors, which are closed here once they are sent."""
        self._queue.append((pack(message), fds))
        if len(self._queue) == 1:
            self.flush()

    def flush(self) -> None:
        """Send as many packets as the orchestrator takes without blocking."""
        while self._queue:
            packet, fds = self._queue[0]
            try:
                send(self._socket, packet, fds)
            except BlockingIOError:
                break
            except OSError:  # the orchestrator is gone: the next read finds the end of the stream
                pass
            self._queue.popleft()
            for fd in fds:
                os.close(fd)
        events = select.POLLIN | (select.POLLOUT if self._queue else 0)
        with contextlib.suppress(FileNotFoundError):
            self._poll.modify(self._socket.fileno(), events)

    def hear(self, flags: int = 0) -> tuple[bytes, list[int]]:
        """Return the next packet and its descriptors; an empty packet if the orchestrator has hung up."""
        return receive(self._socket, MAX_PACKET_BYTES, MOST_FDS, flags)

    def close(self) -> None:
        """Close the descriptor in a child, which is not init."""
        self._socket.close()


class Hands:
    """Both ends of the socket: init's, which init never reads, and the one that each REPL inherits.

    Make it before init is locked down, which denies new sockets. The REPL can receive on its end, or fill the buffer
    of init's end, which harms only itself.
    """

    def __init__(self) -> None:
        self._giving, self._taking = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)

    @property
    def taking_fd(self) -> int:
        """Descriptor of the REPL's end."""
        return self._taking.fileno()

    def hand(self, fd: int, packet: bytes = A_CONTEXT) -> bool:
        """Pass a descriptor to the REPL and close it here. Return whether the socket had room for it."""
        try:
            send(self._giving, packet, (fd,))
        except OSError:  # the kernel's limit of waiting messages (net.unix.max_dgram_qlen) is reached
            return False
        finally:
            os.close(fd)
        return True

    def give_away(self) -> int:
        """Return the REPL's end for the caller to close, once a REPL has inherited or received it."""
        return self._taking.detach()

    def close(self) -> None:
        """Close init's end."""
        self._giving.close()

    def empty(self) -> None:
        """Close the descriptors that an ended REPL has not received."""
        with contextlib.suppress(BlockingIOError):
            while True:
                _, fds = receive(self._taking, 1, 1, socket.MSG_DONTWAIT)
                for fd in fds:
                    os.close(fd)
