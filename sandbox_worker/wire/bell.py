"""Shared memory in which init tells a REPL two numbers.

The first is a counter, the bell. Init increments it before it reads from the pipes of descriptors 1 and 2. The REPL
compares it before and after a block to learn whether the block wrote to these descriptors. The pipes alone do not say:
once init has read one, it is as empty as a pipe that was never written to. The modification time of a pipe is not
updated on newer kernels, and a question to init would cost a round trip.

The second is the number of the block that init interrupted last. A SIGINT carries no number: a signal that arrives
before the block's code runs looks like one that arrived too late for the block before.
"""

import fcntl
import struct
import termios

BELL = struct.Struct("=Q")
"""Layout of the counter, which lies in the first 8 bytes of the shared memory."""
INTERRUPTED_AT = BELL.size
"""Offset of the number of the block that init interrupted last. It has the layout of the counter."""
BELL_BYTES = 2 * BELL.size
"""Size of the shared memory in bytes."""
_INT = struct.Struct("=i")


def pending_bytes(fd: int) -> int:
    """Return the number of unread bytes in a pipe. `fd` may be either end."""
    (count,) = _INT.unpack(fcntl.ioctl(fd, termios.FIONREAD, bytes(_INT.size)))
    return int(count)
