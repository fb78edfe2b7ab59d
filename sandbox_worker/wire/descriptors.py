"""Fixed descriptor numbers of a worker's processes, beside 0, 1 and 2, and the reception of descriptors."""

import array
import errno
import os
import socket

CONTROL_FD = 3
"""Control socket between init and the orchestrator."""
GROUP_FD = 4
"""File `cgroup.procs` of the REPL's control group: a process that writes 0 to it joins the group. Only init keeps it;
in the REPL, `CONNECTION_FD` replaces it."""
CONNECTION_FD = 4
"""Connection of the REPL to the handler."""
STACK_FD = 5
"""Pipe to init, to which the REPL prints the stacks of its threads when init asks for them."""
RULESET_FD = 6
"""Landlock ruleset of the REPL. The REPL closes it once the ruleset is in force."""
HANDED_FD = 7
"""Socket from init with the memfds of later contexts. It exists only if the REPL may be given such contexts."""


class DescriptorsCut(OSError):
    """The kernel has cut off descriptors beside a packet, since this process has too few free numbers for them.

    Attributes:
        packet: The packet itself.
    """

    def __init__(self, packet: bytes) -> None:
        super().__init__(errno.EMFILE, os.strerror(errno.EMFILE))
        self.packet = packet


def receive(connected: socket.socket, most_bytes: int, most_fds: int, flags: int = 0) -> tuple[bytes, list[int]]:
    """Return the next packet of a Unix socket and the descriptors beside it, which are close-on-exec.

    `socket.recv_fds` cannot do this: it does not pass its flags on to `recvmsg`, so MSG_CMSG_CLOEXEC would be lost.

    Args:
        connected: A connected SOCK_SEQPACKET socket.
        most_bytes: Size of the buffer for the packet; the kernel discards what lies beyond it.
        most_fds: Number of descriptors that fit.
        flags: Further flags of `recvmsg`.

    Raises:
        DescriptorsCut: Not all of the descriptors could be received. Those that could are closed.
        OSError: `recvmsg` failed.
    """
    fds = array.array("i")
    beside = socket.CMSG_LEN(most_fds * fds.itemsize)
    packet, received, told, _ = connected.recvmsg(most_bytes, beside, flags | socket.MSG_CMSG_CLOEXEC)
    for level, kind, data in received:
        if (level, kind) == (socket.SOL_SOCKET, socket.SCM_RIGHTS):
            fds.frombytes(data[: len(data) - len(data) % fds.itemsize])
    if told & socket.MSG_CTRUNC:
        for fd in fds:
            os.close(fd)
        raise DescriptorsCut(packet)
    return packet, fds.tolist()
