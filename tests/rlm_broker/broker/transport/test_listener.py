"""`Listener`: the port, tokens that give a connection, and callers that are turned away."""

import asyncio
import contextlib
import gc
import socket
from collections.abc import AsyncIterator
from typing import Any

import pytest

from rlm_broker.broker.transport.connection import Connection, QueryLoad
from rlm_broker.broker.transport.listener import Listener
from rlm_broker.broker.transport.session import Session
from rlm_broker.errors import ConfigurationError
from sandbox_worker import RELEASE
from sandbox_worker.wire.messages import Hello, Query, Ready, Slot, decode_welcome, encode
from tests.support.clock import Clock
from tests.support.socket_peer import MAX_FRAME_BYTES, WAIT_S, Peer
from tests.support.waiting import turns, until


@contextlib.asynccontextmanager
async def listening(**options: Any) -> AsyncIterator[Listener]:
    opened = Listener(**options)
    await opened.start()
    yield opened
    await opened.stop()


@pytest.fixture
async def listener() -> AsyncIterator[Listener]:
    async with listening() as opened:
        yield opened


def fresh_connection() -> Connection:
    return Connection(Session(MAX_FRAME_BYTES), max_queries_in_flight=8)


def port_of(listener: Listener) -> int:
    assert listener.address
    return listener.address[1]


def hello(token: str) -> bytes:
    return encode(Hello(token=token))


async def test_caller_that_shows_the_token_gets_its_connection(listener: Listener) -> None:
    connection = fresh_connection()
    token = listener.expect(connection, WAIT_S)
    async with await Peer.to(port_of(listener)) as peer:
        peer.send(hello(token))
        decode_welcome(await peer.receive())
        peer.send(encode(Ready(RELEASE)))
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
    await turns(2)  # the time of the loop's next turn is past the expiry
    async with await Peer.to(port_of(listener)) as peer:
        peer.send(hello(token))
        assert await peer.is_hung_up_on()


async def test_wrong_token_is_disconnected_silently(listener: Listener) -> None:
    listener.expect(fresh_connection(), WAIT_S)
    async with await Peer.to(port_of(listener)) as peer:
        peer.send(hello("x" * 43))
        assert await peer.is_hung_up_on()


async def test_socket_already_connected_shows_its_token(listener: Listener) -> None:
    connection = fresh_connection()
    ours, theirs = socket.socketpair()
    await listener.attach(theirs)
    async with Peer(*await asyncio.open_connection(sock=ours)) as peer:
        peer.send(hello(listener.expect(connection, WAIT_S)))
        decode_welcome(await peer.receive())
        peer.send(encode(Ready(RELEASE)))
        await asyncio.wait_for(connection.ready(), WAIT_S)


async def test_connections_of_a_port_share_query_weight(listener: Listener, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(listener, "_load", QueryLoad(most=1))
    asked: list[str] = []
    answered = asyncio.Event()

    async def answer(seen: Query) -> list[Slot]:
        asked.append(str(seen.prompts[0]))
        await answered.wait()
        return [Slot(text="ok")]

    async with await Peer.to(port_of(listener)) as heavy, await Peer.to(port_of(listener)) as other:
        for peer, queries in ((heavy, ["first"]), (other, ["second", "third"])):
            connection = fresh_connection()
            peer.send(hello(listener.expect(connection, WAIT_S)))
            await peer.receive()
            peer.send(encode(Ready(RELEASE)))
            await asyncio.wait_for(connection.ready(), WAIT_S)
            connection.execute("code", answer, lambda _: None)
            await peer.receive()
            for prompt in queries:
                peer.send(encode(Query(id=f"1:{prompt}", want="llm", prompts=[prompt])))
            await until(lambda wanted=queries[0]: wanted in asked)  # type: ignore[misc]
        await turns(50)
        assert asked == ["first", "second"]  # a connection without an open query is read; one with an open query waits
        answered.set()
        await until(lambda: len(asked) == 3)


async def test_oversized_first_frame_is_refused_at_its_prefix(listener: Listener) -> None:
    async with await Peer.to(port_of(listener)) as peer:
        peer.writer.write(b"\xff\xff\xff\xff")
        assert b"frame of 4,294,967,295 bytes, the limit is 512" in await peer.receive()
        assert await peer.is_hung_up_on()


async def test_refusal_reason_reaches_a_caller_still_sending(listener: Listener) -> None:
    async with await Peer.to(port_of(listener)) as peer:
        peer.send(b"x" * (8 << 20))
        await asyncio.wait_for(peer.writer.drain(), WAIT_S)
        assert b"frame of 8,388,608 bytes, the limit is 512" in await peer.receive()


async def writing_until_it_fails(peer: Peer) -> None:
    while True:
        peer.writer.write(b"x")
        await peer.writer.drain()
        await turns()


async def test_refused_caller_that_stays_is_hung_up_on() -> None:
    async with listening(first_frame_timeout_s=0.05) as listener, await Peer.to(port_of(listener)) as peer:
        peer.writer.write(b"\xff\xff\xff\xff")
        await peer.receive()
        assert await peer.is_hung_up_on()
        with pytest.raises(ConnectionError):
            await asyncio.wait_for(writing_until_it_fails(peer), WAIT_S)


async def test_caller_breaking_the_protocol_ends_only_itself(listener: Listener) -> None:
    connection = fresh_connection()
    token = listener.expect(connection, WAIT_S)
    for garbage in (b"\xff" * 64, b"[" * 100, b"{}", b'{"type":"ready"}'):
        async with await Peer.to(port_of(listener)) as stranger:
            stranger.send(garbage)
            assert b"one_shot=True" in await stranger.receive()
    async with await Peer.to(port_of(listener)) as peer:
        peer.send(hello(token))
        decode_welcome(await peer.receive())


async def test_stopping_hangs_up_on_callers_without_a_session(listener: Listener) -> None:
    port = port_of(listener)
    async with await Peer.to(port) as peer:
        token = listener.expect(fresh_connection(), WAIT_S)
        await listener.stop()
        await listener.stop()
        peer.send(hello(token))
        assert await peer.is_hung_up_on()
    assert listener.address is None
    assert listener.claim(token) is None
    with pytest.raises(ConnectionRefusedError):
        await Peer.to(port)


async def test_caller_accepted_during_closing_is_disconnected() -> None:
    for before in range(6):
        listener = Listener(first_frame_timeout_s=WAIT_S * 10)
        address = await listener.start()
        with contextlib.ExitStack() as callers:
            connected = [callers.enter_context(socket.create_connection(address)) for _ in range(3)]
            await turns(before)
            await listener.stop()
            await turns(3)
            # CPython may leave a socket that it accepted in the turn before a server is closed to the garbage collector.
            gc.collect()
            for caller in connected:
                async with Peer(*await asyncio.open_connection(sock=caller)) as peer:
                    assert await peer.is_hung_up_on()


async def test_stop_ends_all_calls_at_once() -> None:
    calls = 3
    asked, ending = asyncio.Semaphore(0), asyncio.Barrier(calls)

    async def serve(_payload: bytes) -> bytes:
        asked.release()
        try:
            await asyncio.Event().wait()
        finally:
            await ending.wait()
        return b""

    async with listening(one_shot=serve) as listener, contextlib.AsyncExitStack() as callers:
        for _ in range(calls):
            (await callers.enter_async_context(await Peer.to(port_of(listener)))).send(b"{}")
            await asyncio.wait_for(asked.acquire(), WAIT_S)
        await asyncio.wait_for(listener.stop(), WAIT_S)


@pytest.mark.parametrize("caller_left", [False, True], ids=["caller_waits", "caller_left"])
async def test_stop_awaits_the_cleanup_of_calls(caller_left: bool) -> None:
    asked, tidying, may_end, ended = (asyncio.Event() for _ in range(4))

    async def serve(_payload: bytes) -> bytes:
        asked.set()
        try:
            await asyncio.Event().wait()
        finally:
            tidying.set()
            await may_end.wait()
            ended.set()
        return b""

    async with listening(one_shot=serve) as listener, await Peer.to(port_of(listener)) as peer:
        peer.send(b"{}")
        await asyncio.wait_for(asked.wait(), WAIT_S)
        if caller_left:
            peer.writer.transport.abort()
            await asyncio.wait_for(tidying.wait(), WAIT_S)
        stopping = asyncio.create_task(listener.stop())
        await asyncio.wait_for(tidying.wait(), WAIT_S)
        await turns()  # the end of the socket arrives here, too
        assert not stopping.done()
        may_end.set()
        await asyncio.wait_for(stopping, WAIT_S)
    assert ended.is_set()


async def test_one_shot_server_bug_is_a_reply() -> None:
    async def serve(_payload: bytes) -> bytes:
        raise RuntimeError("a bug")

    async with listening(one_shot=serve) as listener, await Peer.to(port_of(listener)) as peer:
        assert (await peer.ask({"prompt": "x"}))["error"] == "RuntimeError: a bug"


async def test_listener_starts_once_and_names_a_used_port(listener: Listener) -> None:
    first = listener.address
    assert await listener.start() == first == listener.address
    port = port_of(listener)
    with pytest.raises(ConfigurationError) as refused:
        await Listener(port=port).start()
    assert str(refused.value) == (
        f"cannot listen on 127.0.0.1:{port}: Address already in use; choose another port, or 0 for a free one"
    )


async def test_concurrent_starts_get_the_same_port() -> None:
    listener = Listener()
    first, second = await asyncio.gather(listener.start(), listener.start())
    assert first == second
    await listener.stop()


@pytest.mark.parametrize("port", [-1, 65_536])
def test_a_port_that_does_not_exist_is_named(port: int) -> None:
    with pytest.raises(ConfigurationError, match=f"port {port} does not exist: choose 1 to 65535, or 0"):
        Listener(port=port)


def test_listener_needs_the_named_risk_beyond_loopback() -> None:
    for host in ("0.0.0.0", "::", "192.168.1.1", "example.org"):
        with pytest.raises(ConfigurationError, match="insecure_bind=True"):
            Listener(host)
        Listener(host, insecure_bind=True)
    for host in ("127.0.0.1", "127.8.8.8", "::1", "localhost"):
        Listener(host)


async def test_silent_callers_are_disconnected_at_their_own_times(clock: Clock) -> None:
    async def serve(_: bytes) -> bytes:
        return b"{}"

    options = {"first_frame_timeout_s": 100, "one_shot": serve}
    async with listening(**options) as listener, contextlib.AsyncExitStack() as callers:
        peers = []
        for _ in range(4):
            peers.append(await callers.enter_async_context(await Peer.to(port_of(listener))))
            await turns(20)  # the connection is accepted here
            clock.forward(20)
        for speaks in peers[1], peers[3]:  # at 80 s; each may then be silent until 180 s
            speaks.send(b'{"prompt": "p"}')
            assert await speaks.receive() == b"{}"
        clock.forward(19)
        await turns(20)
        assert not any(peer.reader.at_eof() for peer in peers)
        for ended, forward_s in enumerate((2, 40), start=1):
            clock.forward(forward_s)
            assert await peers[2 * (ended - 1)].is_hung_up_on()
            await turns(20)
            assert [peer.reader.at_eof() for peer in peers] == [True, False, ended == 2, False]
        clock.forward(40)
        assert await peers[1].is_hung_up_on()
        assert await peers[3].is_hung_up_on()


async def test_socket_that_is_attached_after_the_end_is_closed() -> None:
    listener = Listener()
    await listener.start()
    await listener.stop()
    ours, theirs = socket.socketpair()
    async with Peer(*await asyncio.open_connection(sock=theirs)) as peer:
        await listener.attach(ours)
        assert await peer.is_hung_up_on()
    assert not listener._strangers.present


async def test_port_that_another_socket_holds_without_listening_is_named() -> None:
    with socket.socket() as other, socket.socket() as second:
        for each in (other, second):
            each.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        other.bind(("127.0.0.1", 0))
        second.bind(other.getsockname())
        port = other.getsockname()[1]
        other.listen()
        with pytest.raises(ConfigurationError, match=f"cannot listen on 127.0.0.1:{port}: Address already in use"):
            await Listener(port=port).start()
