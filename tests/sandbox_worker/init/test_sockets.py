import os
import select
import socket
from collections.abc import Iterator

import pytest

from sandbox_worker.init.sockets import Events, InitSocket
from sandbox_worker.wire.control import Drained, Forked, Written, pack, unpack_from_init

PIECE = Written(stream="stdout", data=bytes(1 << 14))


@pytest.fixture
def ends() -> Iterator[tuple[InitSocket, socket.socket]]:
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with ours, theirs:
        theirs.settimeout(60)
        yield InitSocket(ours, Events(), list), theirs


def test_packets_not_taken_are_queued(ends: tuple[InitSocket, socket.socket]) -> None:
    """Packets that the orchestrator does not take are queued without blocking."""
    control, host = ends
    for _ in range(100):  # far more than the socket holds
        control.say(PIECE)
    assert not control.is_clear
    control.say(Drained())
    heard: list[object] = []
    while not heard or heard[-1] != Drained():
        heard.append(unpack_from_init(host.recv(1 << 16)))
        control.flush()
    assert heard == [PIECE] * 100 + [Drained()]
    assert control.is_clear


def test_poll_reports_when_packets_are_taken() -> None:
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with ours, theirs:
        events = Events()
        control, poll = InitSocket(ours, events, list), events.poll
        assert poll.poll(0) == []
        for _ in range(100):
            control.say(PIECE)
        assert poll.poll(0) == []
        while theirs.recv(1 << 16) and not poll.poll(0):
            pass
        assert poll.poll(0) == [(ours.fileno(), select.POLLOUT)]


def test_descriptor_is_closed_after_its_packet(ends: tuple[InitSocket, socket.socket]) -> None:
    """A descriptor travels with its packet, and init has it no longer."""
    control, host = ends
    for _ in range(100):
        control.say(PIECE)
    mine = os.open("/dev/null", os.O_RDONLY)
    control.say(Forked(), mine)
    packets: list[bytes] = []
    fds: list[int] = []
    while not fds:
        packet, fds, _, _ = socket.recv_fds(host, 1 << 16, 1)
        packets.append(packet)
        control.flush()
    assert packets[-1] == pack(Forked())
    assert os.path.samestat(os.fstat(fds[0]), os.stat("/dev/null"))  # noqa: PTH116
    os.close(fds[0])
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(mine)


def test_closed_socket_is_heard_and_not_raised(ends: tuple[InitSocket, socket.socket]) -> None:
    """Sending to a closed socket raises no error; the next reading reports the end."""
    control, host = ends
    host.close()
    control.say(Drained())
    assert control.is_clear
    assert control.hear() == (b"", [])


def test_event_of_closed_descriptor_is_not_heard() -> None:
    """Also if another one has its number since."""
    (one, one_end), (other, other_end) = os.pipe(), os.pipe()
    events = Events()
    heard: list[int] = []

    def hear(fd: int, _events: int) -> None:
        heard.append(fd)
        gone = other if fd == one else one
        events.forget(gone)
        os.dup2(fd, gone)
        events.listen(gone, lambda *_: heard.append(gone))

    for fd, end in ((one, one_end), (other, other_end)):
        os.write(end, b"x")
        events.listen(fd, hear)
    events.wait(0)
    for fd in (one, one_end, other, other_end):
        os.close(fd)
    assert len(heard) == 1
