"""The socket on which init passes descriptors to the REPL: contexts that are added while the REPL lives."""

import array
import contextlib
import os
import socket

from sandbox_worker.wire.descriptors import receive


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

    def hand(self, fd: int) -> bool:
        """Pass a descriptor to the REPL and close it here. Return whether the socket had room for it."""
        try:
            beside = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", [fd]))]
            self._giving.sendmsg([b"."], beside, socket.MSG_DONTWAIT)
        except OSError:  # the kernel's limit of waiting messages (net.unix.max_dgram_qlen) is reached
            return False
        finally:
            os.close(fd)
        return True

    def empty(self) -> None:
        """Close the descriptors that an ended REPL has not received."""
        with contextlib.suppress(BlockingIOError):
            while True:
                _, fds = receive(self._taking, 1, 1, socket.MSG_DONTWAIT)
                for fd in fds:
                    os.close(fd)
