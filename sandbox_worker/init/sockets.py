"""Init's sockets, and its wait for them: control sockets, and those on which REPLs get descriptors while they live."""

import array
import contextlib
import os
import select
import socket
from collections import deque
from collections.abc import Callable, Sequence

from sandbox_worker.wire.control import MAX_PACKET_BYTES, Control, pack
from sandbox_worker.wire.descriptors import A_CONTEXT, receive

MOST_FDS = 4
"""Most descriptors beside one packet: `RunProgram` has four."""
_DONT_WAIT = int(socket.MSG_DONTWAIT)


def send(connected: socket.socket, packet: bytes, fds: Sequence[int]) -> None:
    """Send a packet and descriptors beside it; an OSError if the peer has no room or has ended.

    `socket.send_fds` ignores its `flags` argument, and would block.
    """
    beside = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", fds))] if fds else []
    connected.sendmsg([packet], beside, socket.MSG_DONTWAIT)


class Events:
    """The descriptors that init waits for, and what hears of each.

    Attributes:
        poll: Knows the descriptors.
    """

    def __init__(self) -> None:
        self.poll = select.poll()
        self._hearers: dict[int, Callable[[int, int], object]] = {}

    def listen(self, fd: int, hearer: Callable[[int, int], object]) -> None:
        """Call `hearer` with the descriptor and its events, each time that it can be read or is at its end."""
        self.poll.register(fd, select.POLLIN)
        self._hearers[fd] = hearer

    def forget(self, fd: int) -> None:
        """Hear no more of a descriptor. Harmless if nothing hears of it."""
        if self._hearers.pop(fd, None) is not None:
            self.poll.unregister(fd)

    def close(self, connected: socket.socket) -> None:
        """Hear no more of a socket, and close it."""
        self.forget(connected.fileno())
        connected.close()

    def wait(self, most_ms: int | None) -> None:
        """Wait for events, and have them heard."""
        heard = []
        for fd, events in self.poll.poll(most_ms):
            heard.append((self._hearers[fd], fd, events))
        for hearer, fd, events in heard:
            if self._hearers.get(fd) is hearer:  # else an earlier event has closed it; its number may be used anew
                hearer(fd, events)


class InitSocket:
    """Sends and receives packets. Packets that the orchestrator does not take at once wait in a queue.

    The queue stays small: while it is not empty, init leaves the REPL's output in its pipes.

    Args:
        connected: The socket.
        events: What init waits for.
        obey: Called when there is a packet, or the end.
    """

    def __init__(self, connected: socket.socket, events: Events, obey: Callable[[], object]) -> None:
        self._socket = connected
        self._events = events
        self._obey = obey
        self._queue: deque[tuple[bytes, tuple[int, ...]]] = deque()
        self._waits = False  # for the orchestrator to take packets
        events.listen(connected.fileno(), self._hear)

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
        if self.is_clear == self._waits:
            self._waits = not self._waits
            self._events.poll.modify(self._socket.fileno(), select.POLLIN | (select.POLLOUT if self._waits else 0))

    def _hear(self, _fd: int, events: int) -> None:
        if events & select.POLLOUT:
            self.flush()
        if events & ~select.POLLOUT:
            self._obey()

    def hear(self) -> tuple[bytes, list[int]]:
        """Return the next packet and its descriptors; an empty packet if the orchestrator has hung up.

        Raises:
            BlockingIOError: There is no packet.
        """
        return receive(self._socket, MAX_PACKET_BYTES, MOST_FDS, _DONT_WAIT)

    def close(self) -> None:
        """Close it: there is nothing to hear any more."""
        self._events.close(self._socket)


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
