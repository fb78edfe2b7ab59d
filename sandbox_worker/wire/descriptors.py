"""Descriptors and shared memory of a worker's processes.

Descriptor numbers are fixed, beside 0, 1 and 2. In shared memory init writes two numbers for a REPL:

- A counter, the bell. Init increments it before it reads from the pipes of descriptors 1 and 2. The REPL compares it
  before and after a block to learn whether the block wrote to these descriptors. The pipes alone do not say: once init
  has read one, it is as empty as an unused pipe. The modification time of a pipe is not updated on newer kernels, and a
  question to init would cost a round trip.
- The number of the last interrupted block. A SIGINT carries no number: a signal before the block's code runs looks
  like one too late for the block before.
"""

import array
import errno
import fcntl
import os
import socket
import struct
import termios

CONTROL_FD = 3
"""Control socket between init and the orchestrator."""
GROUP_FD = 4
"""File `cgroup.procs` of the REPL's control group: to join the group, a process writes 0 to it. Only init keeps it; in
the REPL, `CONNECTION_FD` replaces it."""
CONNECTION_FD = 4
"""Connection of the REPL to the handler."""
STACK_FD = 5
"""Pipe to init: the REPL prints the stacks of its threads to it when init asks for them."""
RULESET_FD = 6
"""Landlock ruleset of the REPL. The REPL closes it once the ruleset is in force."""
HANDED_FD = 7
"""Socket from init, on which a REPL gets descriptors while it lives. It exists only if the REPL may be given later
contexts, or may make checkpoints."""
A_CONTEXT, A_CHECKPOINT, A_HUB = b".", b"c", b"h"
"""Packets on that socket, each with one descriptor: a memfd of a later context; the socket of the checkpoint that is
made next; that of a hub."""
CHECKPOINT_MADE = struct.Struct("=qd")
"""Layout of what a checkpoint says to init: its pid, and the seconds that its forks took."""
GO_ON = b"!"
"""Packet by which init has a checkpoint go on, with its connection. At the end of the socket the checkpoint ends."""
GOES_ON, A_FORK = b"o", b"f"
"""Packets to a hub: fork the REPL that goes on with its connection, or a further one. The keeper's socket and the
Landlock ruleset travel beside both. For a further one, these follow: its connection, its ends of three pipes, its end
of the socket on which it is handed descriptors, and its bell."""
FORKED = struct.Struct("=iqq")
"""Layout of the first packet on a keeper's socket: an error number, or 0; the pid of the keeper; that of its REPL."""
KILL = b"k"
"""Packet by which init has a keeper kill its REPL and all that this has started. The keeper repeats it at the end."""
REPL_ENDED = struct.Struct("=i")
"""Layout of a keeper's report that its REPL has ended: the wait status."""


_INT = struct.Struct("=i")
_FD_BYTES = _INT.size
_CLOSE_ON_EXEC, _CUT = int(socket.MSG_CMSG_CLOEXEC), int(socket.MSG_CTRUNC)
"""The flags as integers: `|` and `&` of an enum member run five functions of `enum`."""


class DescriptorsCut(OSError):
    """The kernel has cut off descriptors beside a packet, since this process has too few free numbers for them.

    Attributes:
        packet: The packet itself.
    """

    def __init__(self, packet: bytes) -> None:
        super().__init__(errno.EMFILE, os.strerror(errno.EMFILE))
        self.packet = packet


def receive(connected: socket.socket, most_bytes: int, most_fds: int, flags: int = 0) -> tuple[bytes, list[int]]:
    """Return the next packet of a Unix socket and the descriptors beside it, set to close-on-exec.

    `socket.recv_fds` cannot do this: it does not pass its flags on to `recvmsg`, so MSG_CMSG_CLOEXEC would be lost.

    Args:
        connected: A connected SOCK_SEQPACKET socket.
        most_bytes: Size of the buffer for the packet; the kernel discards the rest.
        most_fds: Maximum number of descriptors.
        flags: Further flags of `recvmsg`.

    Raises:
        DescriptorsCut: Not all of the descriptors could be received. The received ones are closed.
        OSError: `recvmsg` failed.
    """
    fds = array.array("i")
    beside = socket.CMSG_LEN(most_fds * _FD_BYTES)
    packet, received, told, _ = connected.recvmsg(most_bytes, beside, flags | _CLOSE_ON_EXEC)
    for level, kind, data in received:
        if (level, kind) == (socket.SOL_SOCKET, socket.SCM_RIGHTS):
            fds.frombytes(data[: len(data) - len(data) % _FD_BYTES])
    if told & _CUT:
        for fd in fds:
            os.close(fd)
        raise DescriptorsCut(packet)
    return packet, fds.tolist()


BELL = struct.Struct("=Q")
"""Layout of the counter, in the first 8 bytes of the shared memory."""
INTERRUPTED_AT = BELL.size
"""Offset of the number of the last interrupted block. It has the layout of the counter."""
BELL_BYTES = 2 * BELL.size
"""Size of the shared memory in bytes."""


def pending_bytes(fd: int) -> int:
    """Return the number of unread bytes in a pipe. `fd` may be either end."""
    (count,) = _INT.unpack(fcntl.ioctl(fd, termios.FIONREAD, bytes(_INT.size)))
    return int(count)
