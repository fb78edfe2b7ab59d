"""Descriptors: the numbers that those of a worker's processes have, beside 0, 1 and 2, and how they are received."""

import array
import socket

CONTROL_FD = 3
"""Init's control socket to the orchestrator."""
GROUP_FD = 4
"""What puts a process into the REPL's control group. Init has it; `CONNECTION_FD` of the REPL takes the number."""
CONNECTION_FD = 4
"""The REPL's connection to the handler."""
STACK_FD = 5
"""Where the REPL prints the stack of its threads when init asks for it."""
RULESET_FD = 6
"""The Landlock ruleset of the REPL, until it is in force."""
HANDED_FD = 7
"""Where the REPL takes the memfds of contexts that it is given later, if it may be given any."""


def receive(connected: socket.socket, most_bytes: int, most_fds: int, flags: int = 0) -> tuple[bytes, list[int]]:
    """Return the next packet of a Unix socket and the descriptors beside it, which no program inherits.

    `socket.recv_fds` forgets its flags.

    Raises:
        OSError: As of `recvmsg`.
    """
    fds = array.array("i")
    beside = socket.CMSG_LEN(most_fds * fds.itemsize)
    packet, received, _, _ = connected.recvmsg(most_bytes, beside, flags | socket.MSG_CMSG_CLOEXEC)
    for level, kind, data in received:
        if (level, kind) == (socket.SOL_SOCKET, socket.SCM_RIGHTS):
            fds.frombytes(data[: len(data) - len(data) % fds.itemsize])
    return packet, fds.tolist()
