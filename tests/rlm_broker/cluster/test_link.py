"""Links over real connections: what they carry, how they are bounded, and why they end."""

import asyncio
import time
from typing import Any

import msgspec
import pytest

from rlm_broker.cluster import link as link_module
from rlm_broker.cluster.link import MAX_VALUES, UNSENT_BYTES, Link, LinkLost, encode
from rlm_broker.cluster.messages import (
    FRAME_BYTES,
    PIECE_BYTES,
    Ask,
    Cancel,
    Ended,
    FromAgent,
    Happened,
    Leave,
    Load,
    Need,
    Piece,
    Quit,
    Reply,
    ReplyText,
)
from rlm_broker.cluster.silence import Silence
from rlm_broker.cluster.tls import client_context, made_tls
from sandbox_worker.wire.errors import FrameTooLarge
from sandbox_worker.wire.frames import PREFIX
from tests.support.links import linked, listening, load
from tests.support.waiting import WAIT_S, until

SHORT_S = 0.4
"""Seconds of silence after which the links of these tests are lost, where they are to be lost."""


def framed(payload: bytes) -> bytes:
    return PREFIX.pack(len(payload)) + payload


async def taken(link: Link[Any]) -> list[tuple[Any, bytes | None]]:
    """All messages but heartbeats until the link ends."""
    async with asyncio.timeout(WAIT_S):
        return [
            (message, None if raw is None else bytes(raw))
            async for message, raw in link.receive()
            if not isinstance(message, Load)
        ]


@pytest.fixture(scope="module")
def tls_contexts() -> dict[str, Any]:
    return {"server_tls": made_tls().context, "client_tls": client_context()}


@pytest.mark.parametrize("has_tls", [False, True], ids=["plain", "tls"])
async def test_messages_arrive_whole_and_in_order(has_tls: bool, tls_contexts: dict[str, Any]) -> None:
    long = "long " * 100_000
    piece = bytes(range(256)) * (PIECE_BYTES // 256)
    async with linked(**tls_contexts if has_tls else {}) as (broker, agent):
        for number in range(300):
            agent.post(Leave(1, number))
        await agent.send(Ask(1, 2, "s", (("user", long),), 9.0))
        await agent.send(Happened(1, (msgspec.Raw(b'{"a": [1]}'),)))
        await broker.send(Piece("d", 0), piece)
        await broker.send(Piece("d", PIECE_BYTES), memoryview(b"end"))
        await broker.send(Cancel(1))
        at_agent = asyncio.create_task(taken(agent))
        at_broker = asyncio.create_task(taken(broker))
        agent.post(Quit("done"))
        await until(lambda: broker.farewell)
        await broker.aclose()
        assert await at_agent == [(Piece("d", 0), piece), (Piece("d", PIECE_BYTES), b"end"), (Cancel(1), None)]
        messages = [message for message, _ in await at_broker]
    assert messages[:300] == [Leave(1, number) for number in range(300)]
    assert messages[300].messages == (("user", long),)
    assert bytes(messages[301].events[0]) == b'{"a": [1]}'
    assert messages[302] == Quit("done")


async def test_halves_of_characters_arrive_as_visible_text() -> None:
    """A lone surrogate does not end the link. Encoded parts of the message stay as they are."""
    async with linked() as (broker, agent):
        await agent.send(Ended(1, msgspec.Raw(b'{"a":"\xc3\xa9"}'), message="half \ud800"))
        agent.post(Quit(""))
        taking = asyncio.create_task(taken(broker))
        await until(lambda: broker.farewell is not None)
        await agent.aclose()
        (ended, _), _ = await taking
    assert ended.message == r"half \ud800"
    assert msgspec.json.decode(ended.completion) == {"a": "é"}


def _nested(message: bytes) -> bytes:
    return b'{"type":"ask","run":1,"call":1,"session":"s","messages":[["user",' + message


BREACHES: dict[str, bytes] = {
    "no JSON": framed(b"\x16\x03\x01\x00"),
    "no type": framed(b"{}"),
    "unknown message": framed(b'{"type":"shutdown"}'),
    "message of the other side": framed(b'{"type":"cancel","run":1}'),
    "unknown field": framed(b'{"type":"leave","run":1,"call":2,"also":3}'),
    "wrong type of a field": framed(b'{"type":"leave","run":"1","call":2}'),
    "number beyond all bounds": framed(b'{"type":"leave","run":' + b"9" * 5000 + b',"call":2}'),
    "no UTF-8": framed(b'{"type":"need","digest":"\xff"}'),
    "deep nesting": framed(_nested(b"[" * 200_000)),
    "too many values": framed(_nested(b"[" + b"[]," * MAX_VALUES + b"[]]]]}")),
    "too large a frame": PREFIX.pack(FRAME_BYTES + 1),
}


@pytest.mark.parametrize("breach", BREACHES)
async def test_breach_of_the_protocol_ends_the_link(breach: str) -> None:
    """The messages before it are taken, and the reason is bounded."""
    async with listening() as (broker, port):
        _, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(encode(Need("d")) + BREACHES[breach] + encode(Leave(1, 1)))
        assert (await taken(broker))[:1] == [(Need("d"), None)]
        assert broker.why_lost is not None
        assert "the other side broke the protocol: " in broker.why_lost
        assert len(broker.why_lost) < 300
        writer.transport.abort()


async def test_piece_larger_than_announced_ends_link() -> None:
    async with linked() as (broker, agent):
        broker._write(encode(Piece("d", 0)) + framed(bytes(PIECE_BYTES + 1)))
        assert await taken(agent) == []
        assert "262,145 bytes" in (agent.why_lost or "")


async def test_too_large_message_is_refused_to_its_sender() -> None:
    """The sender learns it, and the link goes on."""
    async with linked() as (broker, agent):
        with pytest.raises(FrameTooLarge):
            await broker.send(Piece("d", 0), bytes(PIECE_BYTES + 1))
        await agent.send(Need("d"))
        async for message, _ in broker.receive():
            assert message in (Need("d"), load())
            if message == Need("d"):
                break


async def test_half_a_frame_is_no_message() -> None:
    async with listening() as (broker, port):
        _, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(encode(Need("a")) + encode(Need("b"))[:-1])
        writer.write_eof()
        assert await taken(broker) == [(Need("a"), None)]
        assert await broker.lost() == "the other side has closed the connection"
        writer.transport.abort()


async def test_silence_ends_the_link() -> None:
    """The other side is connected, and sends nothing: no FIN tells that it is dead."""
    async with listening(SHORT_S) as (broker, port):
        _, writer = await asyncio.open_connection("127.0.0.1", port)
        assert await taken(broker) == []
        assert broker.why_lost == "the other side was silent for 0.4 s"
        writer.transport.abort()


async def test_heartbeats_keep_an_idle_link() -> None:
    """The content of an agent's heartbeat is asked for each time."""
    counted = iter(range(100))
    async with linked(1.0) as (broker, agent):
        agent.beat = lambda: Load(runs=next(counted), free_bytes=0)
        heard = []
        async for message, _ in broker.receive():
            assert isinstance(message, Load)
            heard.append(message.runs)
            if len(heard) == 5:
                break
        assert heard == [0, 1, 2, 3, 4]
        assert not agent.is_lost


async def test_stall_of_this_process_is_no_silence() -> None:
    """The loop of both sides stands still for longer than silence may last."""
    async with linked(SHORT_S + 0.3) as (broker, agent):
        await until(lambda: broker._tick)
        time.sleep(3 * SHORT_S)
        await agent.send(Need("d"))
        async for message, _ in broker.receive():
            if message == Need("d"):
                break
        assert not broker.is_lost
        assert not agent.is_lost


async def beating(writer: asyncio.StreamWriter) -> None:
    """Send heartbeats, and read nothing."""
    while not writer.is_closing():
        writer.write(encode(load()))
        await asyncio.sleep(SHORT_S / 8)


async def test_peer_that_reads_nothing_is_lost() -> None:
    """Its sender is held with bounded memory, and then learns that the link is lost."""
    async with listening(SHORT_S) as (broker, port):
        _, writer = await asyncio.open_connection("127.0.0.1", port)
        beats = asyncio.create_task(beating(writer))
        taking = asyncio.create_task(taken(broker))
        most = 0

        async def send_for_ever() -> None:
            nonlocal most
            while True:
                await broker.send(Piece("d", 0), bytes(PIECE_BYTES))
                assert broker._transport is not None
                most = max(most, broker._transport.get_write_buffer_size())

        for result in await asyncio.gather(*(send_for_ever() for _ in range(8)), return_exceptions=True):
            assert isinstance(result, LinkLost)
        assert broker.why_lost == "the other side took no message for 0.4 s"
        assert most <= UNSENT_BYTES + 2 * PIECE_BYTES
        beats.cancel()
        await taking
        writer.transport.abort()


async def test_flood_of_posts_to_slow_reader_ends_link() -> None:
    async with listening() as (broker, port):
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        await until(lambda: broker._transport)
        text = ReplyText(1, 1, "x" * 10_000)
        while not broker.is_lost:
            broker.post(text)
        assert "messages unread" in (broker.why_lost or "")
        broker.post(text)
        with pytest.raises(LinkLost):
            await broker.send(text)
        assert await reader.read(1)
        writer.transport.abort()


async def test_messages_that_are_not_taken_stop_reading() -> None:
    """The queue is bounded, and the link of a side that takes nothing is lost on both sides."""
    async with linked(WAIT_S) as (broker, agent):
        big = ReplyText(1, 1, "x" * (1 << 20))

        async def send_for_ever() -> None:
            while True:
                await broker.send(big)

        sending = asyncio.create_task(send_for_ever())
        await until(lambda: not agent._is_reading and not broker._room.is_set())
        for link in (broker, agent):  # from here on, so that no slow transfer is taken for silence
            link._silence = Silence(asyncio.get_running_loop().time(), SHORT_S, SHORT_S)
        with pytest.raises(LinkLost):
            await sending
        await agent.lost()
        assert link_module.MOST_QUEUED_BYTES < agent._queued_bytes < link_module.MOST_QUEUED_BYTES + (4 << 20)


async def answer_calls(link: Link[FromAgent]) -> None:
    async for message, _ in link.receive():
        if isinstance(message, Ask):
            await link.send(Reply(message.run, message.call))


async def send_pieces(link: Link[FromAgent], digest: str, pieces: int) -> None:
    for number in range(pieces):
        await link.send(Piece(digest, number), bytes(PIECE_BYTES))


async def test_calls_pass_contexts_in_transfer() -> None:
    """A call that is made while pieces go out is answered before more than a few further pieces have come."""
    pieces = 400
    async with linked() as (broker, agent):
        answering = asyncio.create_task(answer_calls(broker))
        sending = [asyncio.create_task(send_pieces(broker, digest, pieces)) for digest in "ab"]
        receiving = agent.receive()
        seen, asked_at, behind = 0, 0, list[int]()
        await agent.send(Ask(1, 0, "s", (("user", "?"),), 9.0))
        while seen < 2 * pieces:
            message, _ = await anext(receiving)
            if isinstance(message, Piece):
                seen += 1
            elif isinstance(message, Reply):
                behind.append(seen - asked_at)
                asked_at = seen
                await agent.send(Ask(1, len(behind), "s", (("user", "?"),), 9.0))
        await asyncio.gather(*sending)
        answering.cancel()
    assert len(behind) > 10
    assert sorted(behind)[len(behind) // 2] <= 20


async def test_close_drops_what_was_not_taken() -> None:
    async with linked() as (broker, agent):
        await agent.send(Need("d"))
        await until(lambda: broker._queue)
        broker.close("for this test")
        broker.close("for another reason")
        assert await taken(broker) == []
        assert await broker.lost() == "for this test"
        assert await agent.lost() == "the other side has closed the connection"


async def test_link_that_was_closed_early_does_not_begin() -> None:
    async with listening() as (broker, port):
        broker.close()
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        async with asyncio.timeout(WAIT_S):
            assert await reader.read() == b""
        writer.transport.abort()
