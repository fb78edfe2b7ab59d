"""The room that connections take together: the ones whose client lets the server wait are given up first.

Theory of operation
-------------------
A client without a key can open connections, and send half a header on each. A bound on their number alone would let it
lock all others out. So a connection is in one of three states, and a full server gives up the first two, oldest first:

1. Its client owes a header: since the connection was opened, or since the last answer. This lasts `header_s` at most.
2. Its client does not read. It is given up when no byte has left for `unread_s`, which the kernel's queue tells.
3. A request is served. Only these can fill the server, and a further request is then answered with 503.

There is no bound for one address: behind a proxy all clients have one, and so have all programs of this machine.
"""

import asyncio
import resource
from collections import OrderedDict
from typing import Final, Protocol

MOST_CONNECTIONS: Final = 10_000
"""Connections at the same time, where the process may have twice as many descriptors."""
DESCRIPTOR_SHARE: Final = 2
"""Divisor of the process's limit of descriptors. REPLs and files need the rest."""
MOST_HEADER_BYTES: Final = 32 << 20
"""Bytes of all headers that are not whole. Beyond, connections are given up as if the server were full."""
HEADER_S: Final = 15.0
"""Seconds for a whole header, and before it for the handshake of TLS."""
UNREAD_S: Final = 60.0
"""Seconds for which a client may read no byte of its answer."""


class Waiting(Protocol):
    """A connection whose client lets the server wait."""

    def hang_up(self) -> None:
        """Close the connection at once, without what is not sent."""
        ...

    def unsent_bytes(self) -> int:
        """Return the bytes of answers that the client has not taken, in this process and in the kernel."""
        ...


class Room:
    """The connections of one server, and which of them is given up for another.

    Args:
        most: Connections at the same time; None takes half of the process's limit of descriptors, up to
            `MOST_CONNECTIONS`.
        header_s: Seconds for a whole header.
        unread_s: Seconds for which a client may read nothing.

    Attributes:
        most, header_s: As above.
    """

    def __init__(self, most: int | None = None, header_s: float = HEADER_S, unread_s: float = UNREAD_S) -> None:
        self.most = most or _most_of_process()
        self.header_s = header_s
        self._unread_s = unread_s
        self._silent: OrderedDict[Waiting, float] = OrderedDict()
        """Each connection that owes a header → the loop's time at which it is given up. The oldest comes first."""
        self._unread: OrderedDict[Waiting, tuple[float, int]] = OrderedDict()
        """Each connection that does not read → when it is looked at again, and its unsent bytes now."""
        self._header_bytes: dict[Waiting, int] = {}
        self._all_header_bytes = 0
        self._timer: asyncio.TimerHandle | None = None

    def awaits(self, connection: Waiting) -> None:
        """Give up `connection` unless it sends a whole header in time."""
        self.forget(connection)
        self._silent[connection] = asyncio.get_running_loop().time() + self.header_s
        self._arm()

    def stalls(self, connection: Waiting) -> None:
        """Give up `connection` unless its client goes on reading."""
        until = asyncio.get_running_loop().time() + self._unread_s
        self._unread[connection] = until, connection.unsent_bytes()
        self._unread.move_to_end(connection)
        self._arm()

    def flows(self, connection: Waiting) -> None:
        """Note that the client of `connection` reads again."""
        self._unread.pop(connection, None)

    def forget(self, connection: Waiting) -> None:
        """Note that `connection` is served, or is gone."""
        self._silent.pop(connection, None)
        self._unread.pop(connection, None)
        self._all_header_bytes -= self._header_bytes.pop(connection, 0)

    def holds(self, connection: Waiting, header_bytes: int) -> None:
        """Note how many bytes of a header that is not whole `connection` holds, and make room for them."""
        self._all_header_bytes += header_bytes - self._header_bytes.pop(connection, 0)
        if header_bytes:
            self._header_bytes[connection] = header_bytes
        while self._all_header_bytes > MOST_HEADER_BYTES and self.give_up_one():
            pass

    def give_up_one(self) -> bool:
        """Close the connection that owes a header for longest, else the one that has not read for longest.

        Returns:
            Whether there was one.
        """
        for waiting in (self._silent, self._unread):
            if waiting:
                self._give_up(next(iter(waiting)))
                return True
        return False

    def close(self) -> None:
        """Cancel the timer."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _give_up(self, connection: Waiting) -> None:
        self.forget(connection)
        connection.hang_up()

    def _arm(self) -> None:
        """Set the timer, unless it is set to an earlier time already."""
        firsts = [next(iter(self._silent.values()))] if self._silent else []
        firsts += [next(iter(self._unread.values()))[0]] if self._unread else []
        if firsts and (self._timer is None or self._timer.when() > min(firsts)):
            self.close()
            self._timer = asyncio.get_running_loop().call_at(min(firsts), self._look)

    def _look(self) -> None:
        self._timer = None
        now = asyncio.get_running_loop().time()
        while self._silent and next(iter(self._silent.values())) <= now:
            connection = next(iter(self._silent))
            if connection.unsent_bytes():  # a slow client reads the last answer: its time begins later
                del self._silent[connection]
                self.stalls(connection)
            else:
                self._give_up(connection)
        while self._unread and next(iter(self._unread.values()))[0] <= now:
            connection, (_, before) = next(iter(self._unread.items()))
            unsent = connection.unsent_bytes()
            if unsent >= before > 0:
                self._give_up(connection)
            elif unsent:
                self.stalls(connection)
            else:
                self.awaits(connection)
        self._arm()


def _most_of_process() -> int:
    soft = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    return MOST_CONNECTIONS if soft == resource.RLIM_INFINITY else min(MOST_CONNECTIONS, soft // DESCRIPTOR_SHARE)
