"""Silence on real connections: of a dead side, of a busy one, and of this process itself."""

import asyncio
import contextlib
from collections.abc import AsyncIterator
from typing import cast

import pytest

from rlm_broker.cluster.link import Link, from_broker
from rlm_broker.cluster.messages import PIECE_BYTES, FromBroker, Piece
from rlm_broker.cluster.silence import Silence, acknowledged_within
from tests.support.links import cut, load
from tests.support.waiting import WAIT_S, until

SILENCE_S, PATIENCE_S = 0.9, 1.9


@contextlib.asynccontextmanager
async def beside_a_stopped_broker() -> AsyncIterator[tuple[Link[FromBroker], asyncio.BaseTransport]]:
    """A link of an agent, and the transport of a broker that neither reads nor sends, like a stopped process."""
    made: asyncio.Queue[asyncio.BaseTransport] = asyncio.Queue()

    class Stopped(asyncio.Protocol):
        def connection_made(self, transport: asyncio.BaseTransport) -> None:
            # In a turn of its own: CPython 3.11.2 begins to read after this call, paused or not.
            loop.call_soon(cast("asyncio.Transport", transport).pause_reading)
            made.put_nowait(transport)

    loop = asyncio.get_running_loop()
    link: Link[FromBroker] = Link("node", from_broker, load, silence_s=SILENCE_S, patience_s=PATIENCE_S)
    server = await loop.create_server(Stopped, "127.0.0.1", 0)
    async with server:
        await loop.create_connection(lambda: link, *server.sockets[0].getsockname())
        transport = await made.get()
        try:
            yield link, transport
        finally:
            link.close()
            cast("asyncio.Transport", transport).abort()


async def test_busy_broker_is_given_more_time() -> None:
    """Its kernel acknowledges the heartbeats of the agent."""
    async with beside_a_stopped_broker() as (link, _), asyncio.timeout(WAIT_S):
        assert await link.lost() == "the other side was silent for 1.9 s"


async def test_broker_behind_a_cut_is_lost_soon() -> None:
    """No FIN tells the agent, and no acknowledgement comes."""
    async with beside_a_stopped_broker() as (link, transport), asyncio.timeout(WAIT_S):
        cut(transport)
        assert await link.lost() == "the other side was silent for 0.9 s"


async def test_broker_that_takes_nothing_is_given_more_time() -> None:
    """Its socket is full, so that the agent's messages wait. A heartbeat of its own would be heard."""
    async with beside_a_stopped_broker() as (link, transport), asyncio.timeout(WAIT_S):
        connected = transport.get_extra_info("socket")
        sending = asyncio.create_task(send_for_ever(link))
        beating = asyncio.create_task(say_something(cast("asyncio.Transport", transport)))
        assert await link.lost() == "the other side took no message for 1.9 s"
        assert connected is not None
        beating.cancel()
        await asyncio.wait({sending, beating})
        assert sending.exception() is not None


async def send_for_ever(link: Link[FromBroker]) -> None:
    while True:
        await link.send(Piece("d", 0), bytes(PIECE_BYTES))


async def say_something(transport: asyncio.Transport) -> None:
    """Send the bytes of a long frame, one after the other."""
    transport.write(b"\0\1\0\0")
    while True:
        transport.write(b"x")
        await asyncio.sleep(SILENCE_S / 8)


async def test_acknowledgements_are_read_from_the_kernel() -> None:
    async with beside_a_stopped_broker() as (link, transport):
        assert link._transport is not None
        connected = link._transport.get_extra_info("socket")
        assert acknowledged_within(WAIT_S, connected)
        cut(transport)
        await until(lambda: not acknowledged_within(0.1, connected))


class NoSocket:
    """A socket whose last acknowledgement is long ago."""

    def getsockopt(self, _level: int, _option: int, size: int, /) -> bytes:
        return b"\xff" * size


@pytest.mark.parametrize(
    ("times", "is_lost"),
    [
        ([(0.5, 0.5), (1.0, 1.0), (1.5, 1.5), (2.0, 2.0)], False),
        ([(0.5, 0.5), (1.0, 1.0), (1.5, 1.5), (2.0, 2.0), (2.5, 2.5)], True),
        ([(0.5, 0.5), (9.5, 1.0), (10.0, 10.0)], False),
        ([(0.5, 0.5), (9.5, 1.0), (10.0, 10.0), (10.5, 10.5), (11.0, 11.0)], True),
    ],
    ids=["in time", "silent", "own stall", "silent after a stall"],
)
def test_own_stall_is_not_counted(times: list[tuple[float, float]], is_lost: bool) -> None:
    """Each look has the time at which it took place and the time at which it was due."""
    silence = Silence(0.0, 2.0, 2.0)
    found = [silence.why_lost(now, due, 0, has_room=True, is_reading=True, connected=NoSocket()) for now, due in times]
    assert [why is not None for why in found] == [False] * (len(times) - 1) + [is_lost]
