"""The port: who gets a connection, and who is turned away."""

import asyncio
import socket
from collections.abc import AsyncIterator

import pytest

from rlm_broker.errors import ConfigurationError, WorkerDied
from rlm_broker.transport.connection import Connection
from rlm_broker.transport.listener import Listener
from rlm_broker.transport.session import Session
from sandbox_worker.wire.frames import encode_frame
from sandbox_worker.wire.messages import Hello, Ready, decode_welcome, encode
from tests.handler.socket_peer import MAX_FRAME_BYTES, WAIT_S, Peer


@pytest.fixture
async def listener() -> AsyncIterator[Listener]:
    opened = Listener()
    await opened.start()
    yield opened
    await opened.stop()


def fresh_connection() -> Connection:
    return Connection(Session(MAX_FRAME_BYTES), max_queries_in_flight=8)


def port_of(listener: Listener) -> int:
    assert listener.address
    return listener.address[1]


def hello(token: str) -> bytes:
    return encode(Hello(token=token))


async def test_whoever_shows_the_token_gets_its_connection(listener: Listener) -> None:
    connection = fresh_connection()
    token = listener.expect(connection, WAIT_S)
    async with await Peer.to(port_of(listener)) as peer:
        peer.send(hello(token))
        decode_welcome(await peer.receive())
        peer.send(encode(Ready()))
        await asyncio.wait_for(connection.ready(), WAIT_S)


async def test_a_token_works_once(listener: Listener) -> None:
    token = listener.expect(fresh_connection(), WAIT_S)
    async with await Peer.to(port_of(listener)) as first, await Peer.to(port_of(listener)) as second:
        first.send(hello(token))
        await first.receive()
        second.send(hello(token))
        assert await second.is_hung_up_on()


async def test_a_token_expires(listener: Listener) -> None:
    connection = fresh_connection()
    token = listener.expect(connection, 0.0)
    await asyncio.sleep(0)  # the loop's next turn is past its time
    await asyncio.sleep(0)
    async with await Peer.to(port_of(listener)) as peer:
        peer.send(hello(token))
        assert await peer.is_hung_up_on()


async def test_a_wrong_token_is_hung_up_on_without_a_word(listener: Listener) -> None:
    listener.expect(fresh_connection(), WAIT_S)
    async with await Peer.to(port_of(listener)) as peer:
        peer.send(hello("x" * 43))
        assert await peer.is_hung_up_on()


async def test_a_hello_may_arrive_in_single_bytes(listener: Listener) -> None:
    token = listener.expect(fresh_connection(), WAIT_S)
    async with await Peer.to(port_of(listener)) as peer:
        peer.writer.transport.get_extra_info("socket").setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        for byte in encode_frame(hello(token), MAX_FRAME_BYTES):
            peer.writer.write(bytes([byte]))
            await asyncio.sleep(0)
        decode_welcome(await peer.receive())


async def test_what_comes_right_behind_the_hello_reaches_the_connection(listener: Listener) -> None:
    connection = fresh_connection()
    token = listener.expect(connection, WAIT_S)
    async with await Peer.to(port_of(listener)) as peer:
        both = encode_frame(hello(token), MAX_FRAME_BYTES) + encode_frame(encode(Ready()), MAX_FRAME_BYTES)
        peer.writer.write(both)
        await asyncio.wait_for(connection.ready(), WAIT_S)


@pytest.mark.parametrize("said", [b"", b"\x00\x00\x00\x20half a fr"], ids=["silent", "half_a_frame"])
async def test_whoever_does_not_say_whose_it_is_in_time_is_hung_up_on(said: bytes) -> None:
    listener = Listener(first_frame_timeout_s=0.05)
    await listener.start()
    async with await Peer.to(port_of(listener)) as peer:
        peer.writer.write(said)
        assert await peer.is_hung_up_on()
    await listener.stop()


async def test_an_oversized_first_frame_is_refused_before_it_comes(listener: Listener) -> None:
    async with await Peer.to(port_of(listener)) as peer:
        peer.writer.write(b"\xff\xff\xff\xff")
        assert b"frame of 4,294,967,295 bytes, the limit is 4,096" in await peer.receive()
        assert await peer.is_hung_up_on()


async def test_a_stranger_that_breaks_the_protocol_ends_only_itself(listener: Listener) -> None:
    connection = fresh_connection()
    token = listener.expect(connection, WAIT_S)
    for garbage in (b"\xff" * 64, b"[" * 100, b"{}", b'{"type":"ready"}'):
        async with await Peer.to(port_of(listener)) as stranger:
            stranger.send(garbage)
            assert b"one_shot=True" in await stranger.receive()
    async with await Peer.to(port_of(listener)) as peer:
        peer.send(hello(token))
        decode_welcome(await peer.receive())


async def test_stopping_hangs_up_on_whoever_has_not_said_whose_it_is(listener: Listener) -> None:
    port = port_of(listener)
    async with await Peer.to(port) as peer:
        token = listener.expect(fresh_connection(), WAIT_S)
        await listener.stop()
        await listener.stop()
        peer.send(hello(token))
        assert await peer.is_hung_up_on()
    assert listener.address is None
    with pytest.raises(ConnectionRefusedError):
        await Peer.to(port)


async def test_a_connection_that_is_lost_says_so_to_whoever_waits_for_it(listener: Listener) -> None:
    connection = fresh_connection()
    token = listener.expect(connection, WAIT_S)
    async with await Peer.to(port_of(listener)) as peer:
        peer.send(hello(token))
        await peer.receive()
    with pytest.raises(WorkerDied):
        await asyncio.wait_for(connection.ready(), WAIT_S)


async def test_it_starts_once_and_a_port_in_use_is_named(listener: Listener) -> None:
    assert await listener.start() == listener.address
    with pytest.raises(ConfigurationError, match=f"cannot listen on 127.0.0.1:{port_of(listener)}: "):
        await Listener(port=port_of(listener)).start()


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "192.168.1.1", "example.org"])
def test_only_loopback_is_listened_on_unless_the_risk_is_named(host: str) -> None:
    with pytest.raises(ConfigurationError, match="insecure_bind=True"):
        Listener(host)
    Listener(host, insecure_bind=True)
