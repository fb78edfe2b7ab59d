"""How a REPL learns that its descriptors 1 and 2 were written to: by what is in the pipes, and by a counter of init's.

Init counts in shared memory before it reads a pipe, since after that the pipe is as empty as one that was not written
to. A pipe's time of change does not move on newer kernels, and asking init would cost a round trip.
"""

import fcntl
import struct
import termios

BELL = struct.Struct("=Q")
"""The counter, in the first bytes of the shared memory."""
_INT = struct.Struct("=i")


def pending_bytes(fd: int) -> int:
    """Return the number of bytes in a pipe, asked at either end."""
    (count,) = _INT.unpack(fcntl.ioctl(fd, termios.FIONREAD, bytes(_INT.size)))
    return int(count)
