"""Which connection is given up, and when."""

import asyncio
import resource

import pytest

from rlm_broker.serve.http_server import MOST_CONNECTIONS, ConnectionRoom
from tests.support.waiting import until

SOON_S = 0.01


class Connection:
    """A connection that notes how it was closed."""

    def __init__(self, unsent: list[int] | None = None) -> None:
        self.unsent = unsent or [0]
        self.is_closed = asyncio.Event()

    def hang_up(self) -> None:
        self.is_closed.set()

    def unsent_bytes(self) -> int:
        return self.unsent.pop(0) if len(self.unsent) > 1 else self.unsent[0]


async def test_silent_ones_go_before_unread_ones_oldest_first() -> None:
    room, (unread, old, young, served) = ConnectionRoom(1), [Connection() for _ in range(4)]
    room.stalls(unread)
    for each in (old, young, served):
        room.awaits(each)
    room.forget(served)
    for first, second in ((old, young), (young, unread), (unread, served)):
        assert room.give_up_one()
        assert first.is_closed.is_set()
        assert not second.is_closed.is_set()
    assert not room.give_up_one()
    room.close()


async def test_shorter_time_that_comes_later_is_kept() -> None:
    room = ConnectionRoom(header_s=SOON_S, unread_s=3_600)
    room.stalls(Connection([5]))
    room.awaits(silent := Connection())
    await silent.is_closed.wait()
    room.close()


async def test_client_that_reads_slowly_is_left_alone() -> None:
    """Its unsent bytes become fewer; the first look without progress closes the connection."""
    room, slow = ConnectionRoom(header_s=SOON_S, unread_s=SOON_S), Connection([9, 8, 7, 7])
    room.stalls(slow)
    await slow.is_closed.wait()
    assert slow.unsent == [7]
    room.close()


async def test_unread_rest_is_no_silence() -> None:
    """A connection that owes a header and whose client still reads the last answer has its whole time afterwards."""
    room, slow = ConnectionRoom(header_s=SOON_S, unread_s=SOON_S), Connection([9, 9, 4, 0, 0])
    room.awaits(slow)
    await until(lambda: slow.unsent == [0])
    await slow.is_closed.wait()
    room.close()


async def test_connections_follow_the_limit_of_descriptors(monkeypatch: pytest.MonkeyPatch) -> None:
    for soft, most in ((1_024, 512), (1 << 20, MOST_CONNECTIONS), (resource.RLIM_INFINITY, MOST_CONNECTIONS)):
        monkeypatch.setattr(resource, "getrlimit", lambda _, soft=soft: (soft, soft))
        assert ConnectionRoom().most == most
