"""What init tells a REPL in shared memory: that its descriptors 1 and 2 were written to, and which block to interrupt.

Init counts before it reads a pipe, since after that the pipe is as empty as one that was not written to. A pipe's time
of change does not move on newer kernels, and asking init would cost a round trip.

A signal alone cannot say which block it is for: one that comes before the block's code runs looks like one that came
too late for the block before.
"""

import fcntl
import struct
import termios

BELL = struct.Struct("=Q")
"""The counter, in the first bytes of the shared memory."""
INTERRUPTED_AT = BELL.size
"""Where the number of the block that was interrupted last begins. It has the form of the counter."""
BELL_BYTES = 2 * BELL.size
_INT = struct.Struct("=i")


def pending_bytes(fd: int) -> int:
    """Return the number of bytes in a pipe, asked at either end."""
    (count,) = _INT.unpack(fcntl.ioctl(fd, termios.FIONREAD, bytes(_INT.size)))
    return int(count)
