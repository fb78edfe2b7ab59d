"""Listening sockets, and the connections they accept, a few at a time."""

import asyncio
import errno
import os
import socket
import warnings
from collections.abc import Callable, Sequence

from rlm_broker.concurrency.forks import FORKING, socket_of_parent
from rlm_broker.errors import ConfigurationError, SandboxFailed, is_shortage, refused_by_machine

BACKLOG = 4096
"""Connections that the kernel keeps until they are accepted. It is more than the REPLs of a full machine that connect
at the same time. The kernel caps it at net.core.somaxconn (4,096 since Linux 5.4)."""
ACCEPTS_IN_A_ROW = 4
"""Connections accepted in one turn of the event loop. asyncio's own server accepts as many as its backlog, and goes on
after an error (`BaseSelectorEventLoop._accept_connection`). Thousands of strangers would keep the loop for seconds."""
RETRY_S = 0.1
"""Seconds until the next attempt to accept, after the process or the machine ran out of descriptors or memory."""

_Address = tuple[
    socket.AddressFamily, socket.SocketKind, int, str, tuple[str, int] | tuple[str, int, int, int] | tuple[int, bytes]
]


class Acceptor:
    """Accepts connections on every address of a host.

    Args:
        sockets: Listening sockets, from `bind`. `close` closes them.
        take: Called with each connected socket, which is non-blocking.
        make_room: Called when no descriptor is left. It should give up a connection.
    """

    def __init__(
        self, sockets: list[socket.socket], take: Callable[[socket.socket], object], make_room: Callable[[], object]
    ) -> None:
        self._sockets = sockets
        self._take = take
        self._make_room = make_room
        self._loop = asyncio.get_running_loop()
        self._retries: dict[socket.socket, asyncio.TimerHandle] = {}
        self._has_warned = False
        for listening in sockets:
            self._loop.add_reader(listening.fileno(), self._accept, listening)

    @property
    def address(self) -> tuple[str, int]:
        """Host and port of the first socket."""
        host, port = self._sockets[0].getsockname()[:2]
        return host, port

    def close(self) -> None:
        """Stop listening."""
        for retry in self._retries.values():
            retry.cancel()
        for listening in self._sockets:
            self._loop.remove_reader(listening.fileno())
            listening.close()

    def _accept(self, listening: socket.socket) -> None:
        for accepted in range(ACCEPTS_IN_A_ROW):
            try:
                with FORKING:
                    connected = socket_of_parent(listening.accept()[0])
            except (BlockingIOError, InterruptedError, ConnectionAbortedError):
                return
            except OSError as error:
                if not is_shortage(error):
                    raise
                # The kernel says this also if no connection waits. If one does, then the socket stays readable.
                if not accepted:
                    self._wait(listening, error)
                return
            connected.setblocking(False)
            self._take(connected)

    def _wait(self, listening: socket.socket, error: OSError) -> None:
        """Stop accepting for `RETRY_S`: the socket stays readable, and would be tried in every turn of the loop."""
        self._make_room()
        self._loop.remove_reader(listening.fileno())
        self._retries[listening] = self._loop.call_later(
            RETRY_S, self._loop.add_reader, listening.fileno(), self._accept, listening
        )
        if not self._has_warned:
            self._has_warned = True
            warnings.warn(f"connections wait to be accepted: {error.strerror}", RuntimeWarning, stacklevel=2)


async def bind(host: str, port: int) -> list[socket.socket]:
    """Return sockets that listen on every address of `host`.

    Args:
        host: Name or number of an address; empty for all addresses.
        port: 0 takes a free port of the first address, and of no other.

    Raises:
        ConfigurationError: An address cannot be bound.
        SandboxFailed: This process may make no socket of the address's family, or has no descriptor left.
    """
    bound: list[socket.socket] = []
    try:
        found = await _addresses(host, port)
        for family, kind, protocol, _, address in dict.fromkeys(found):
            if bound and port == 0:  # the kernel would choose another port for each address
                break
            try:
                with FORKING:
                    bound.append(socket_of_parent(socket.socket(family, kind, protocol)))
            except OSError as error:
                if error.errno == errno.EAFNOSUPPORT:  # "localhost" is ::1, too, and the kernel may lack IPv6
                    continue
                raise
            bound[-1].setblocking(False)
            bound[-1].setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            # Inherited by each accepted socket: a reply's last segment shall not wait for the client's acknowledgement.
            bound[-1].setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            if family == socket.AF_INET6:
                bound[-1].setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
            bound[-1].bind(address)
            bound[-1].listen(BACKLOG)  # here: a socket bound to the port and not listening is noticed only now
    except OSError as error:
        for each in bound:
            each.close()
        if is_shortage(error):
            raise refused_by_machine(f"cannot listen on {host}:{port}", error) from None
        number = error.errno or 0
        why = os.strerror(number) if number > 0 else error.strerror  # below 0: an error of the resolver, no errno
        raise ConfigurationError(
            f"cannot listen on {host}:{port}: {why}; choose another port, or 0 for a free one"
        ) from None
    if not bound:
        raise SandboxFailed(
            f"no port can be opened on {host}: this process may make no socket of that address family, as with "
            "RestrictAddressFamilies= of a systemd unit, which must name AF_INET"
        )
    return bound


async def _addresses(host: str, port: int) -> Sequence[_Address]:
    """Return the addresses of `host`.

    A number is read at once. A name is looked up in a thread, which the limit of processes may forbid.

    Raises:
        OSError: The name is not known.
        SandboxFailed: No thread can be started.
    """
    try:
        flags = socket.AI_PASSIVE | socket.AI_NUMERICHOST
        return socket.getaddrinfo(host or None, port, type=socket.SOCK_STREAM, flags=flags)
    except socket.gaierror:
        loop = asyncio.get_running_loop()
        try:
            return await loop.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
        except RuntimeError as error:
            raise SandboxFailed(
                f"{error}: raise the limit of processes (`ulimit -u`, LimitNPROC= or TasksMax= of a unit)"
            ) from None
