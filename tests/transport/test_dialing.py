"""The host's side of a door."""

import asyncio
from collections.abc import Awaitable, Callable

import pytest

from rlm_broker.errors import SandboxFailed
from rlm_broker.transport.connection import Connection
from rlm_broker.transport.dialing import dial
from rlm_broker.transport.listener import Listener
from rlm_broker.transport.session import Session
from sandbox_worker.wire.frames import encode_frame
from sandbox_worker.wire.messages import Ready, encode
from tests.handler.socket_peer import MAX_FRAME_BYTES, WAIT_S

Serve = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]


async def test_a_door_is_connected_welcomed_and_blocking() -> None:
    listener = Listener()
    address = await listener.start()
    connection = Connection(Session(MAX_FRAME_BYTES), 8)
    with await dial(address, listener.expect(connection, WAIT_S), WAIT_S) as door:
        assert door.getblocking()
        door.sendall(encode_frame(encode(Ready()), MAX_FRAME_BYTES))
        await asyncio.wait_for(connection.ready(), WAIT_S)
    await listener.stop()


async def refusal_of(serve: Serve, timeout_s: float = WAIT_S) -> str:
    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    address = server.sockets[0].getsockname()
    with pytest.raises(SandboxFailed) as refused:
        await dial(address, "token", timeout_s)
    server.close()
    assert str(refused.value).startswith(f"the handler at {address[0]}:{address[1]} did not take the connection: ")
    return str(refused.value)


async def test_a_handler_that_hangs_up_on_the_token_is_named() -> None:
    async def hang_up(_reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.close()

    await refusal_of(hang_up)


async def test_a_handler_that_never_answers_is_given_up() -> None:
    async def wait(reader: asyncio.StreamReader, _writer: asyncio.StreamWriter) -> None:
        await reader.read()

    await refusal_of(wait, timeout_s=0.1)


async def test_a_handler_that_speaks_something_else_is_named() -> None:
    async def speak_http(_reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b"HTTP/1.1 400 Bad Request\r\n\r\n")

    assert "frame of 1,213,486,160 bytes" in await refusal_of(speak_http)


async def test_nobody_there_is_named() -> None:
    server = await asyncio.start_server(lambda _reader, _writer: None, "127.0.0.1", 0)
    address = server.sockets[0].getsockname()
    server.close()
    await server.wait_closed()
    with pytest.raises(SandboxFailed, match="did not take the connection"):
        await dial(address, "token", WAIT_S)
