"""The socket on which init hands descriptors to the REPL: contexts that the REPL is given while it lives."""

import array
import contextlib
import os
import socket

from sandbox_worker.wire.descriptors import receive


class Hands:
    """Both ends: init's, which is never read, and the one that each REPL inherits.

    To be made before init is locked down. All that the REPL can do with its end is to take what is meant for it, and to
    fill the buffer of the other one.
    """

    def __init__(self) -> None:
        self._giving, self._taking = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)

    @property
    def taking_fd(self) -> int:
        """The REPL's end."""
        return self._taking.fileno()

    def hand(self, fd: int) -> bool:
        """Put a descriptor where the REPL takes it, and close it here; return whether there was room for it."""
        try:
            beside = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", [fd]))]
            self._giving.sendmsg([b"."], beside, socket.MSG_DONTWAIT)
        except OSError:  # as many wait as the kernel lets
            return False
        finally:
            os.close(fd)
        return True

    def empty(self) -> None:
        """Take back what a REPL that has ended has left."""
        with contextlib.suppress(BlockingIOError):
            while True:
                _, fds = receive(self._taking, 1, 1, socket.MSG_DONTWAIT)
                for fd in fds:
                    os.close(fd)
