"""`dial`: the orchestrator's side of a connection."""

import asyncio
from collections.abc import Awaitable, Callable

import pytest

from rlm_broker.broker.transport.connection import Connection
from rlm_broker.broker.transport.listener import Listener, dial
from rlm_broker.broker.transport.session import Session
from rlm_broker.errors import SandboxFailed
from sandbox_worker import RELEASE
from sandbox_worker.wire.frames import encode_frame
from sandbox_worker.wire.messages import Ready, Welcome, encode
from tests.support.socket_peer import MAX_FRAME_BYTES, WAIT_S

Serve = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]


async def test_dialed_socket_is_connected_welcomed_and_blocking() -> None:
    listener = Listener()
    address = await listener.start()
    connection = Connection(Session(MAX_FRAME_BYTES), 8)
    with await dial(address, listener.expect(connection, WAIT_S), WAIT_S) as connected:
        assert connected.getblocking()
        connected.sendall(encode_frame(encode(Ready(RELEASE)), MAX_FRAME_BYTES))
        await asyncio.wait_for(connection.ready(), WAIT_S)
    await listener.stop()


async def refusal_of(serve: Serve, timeout_s: float = WAIT_S) -> str:
    """Return the reason within the error's sentence; the socket is closed by then."""
    hung_up = asyncio.Event()

    async def serve_and_wait(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await serve(reader, writer)
        while await reader.read(1000):
            pass
        hung_up.set()

    server = await asyncio.start_server(serve_and_wait, "127.0.0.1", 0)
    address = server.sockets[0].getsockname()
    with pytest.raises(SandboxFailed) as refused:
        await dial(address, "token", timeout_s)
    await asyncio.wait_for(hung_up.wait(), WAIT_S)
    server.close()
    said, reason = str(refused.value).split(" did not take the connection: ")
    assert said == f"the handler at {address[0]}:{address[1]}"
    return reason


async def test_handler_hanging_up_on_the_token_is_named() -> None:
    async def hang_up(_reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write_eof()

    assert await refusal_of(hang_up) == "it closed the connection after the token was shown"


async def test_a_handler_that_never_answers_is_given_up() -> None:
    async def say_nothing(_reader: asyncio.StreamReader, _writer: asyncio.StreamWriter) -> None:
        pass

    assert await refusal_of(say_nothing, timeout_s=0.1) == "no answer within 0.1 s"


@pytest.mark.parametrize(
    ("answer", "reason"),
    [
        (b"HTTP/1.1 400 Bad Request\r\n\r\n", "frame of 1,213,486,160 bytes"),
        (encode_frame(b"[1]", 100), "Expected `object`, got `array`"),
    ],
    ids=["http", "another_frame"],
)
async def test_a_handler_that_speaks_something_else_is_named(answer: bytes, reason: str) -> None:
    async def speak(_reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(answer)

    assert (await refusal_of(speak)).startswith(reason)


async def test_a_welcome_may_arrive_in_pieces() -> None:
    async def drip(_reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        for byte in encode_frame(encode(Welcome()), 100):
            writer.write(bytes([byte]))
            await asyncio.sleep(0)

    server = await asyncio.start_server(drip, "127.0.0.1", 0)
    (await dial(server.sockets[0].getsockname(), "token", WAIT_S)).close()
    server.close()


async def test_port_without_a_listener_is_named() -> None:
    server = await asyncio.start_server(lambda _reader, _writer: None, "127.0.0.1", 0)
    address = server.sockets[0].getsockname()
    server.close()
    await server.wait_closed()
    with pytest.raises(SandboxFailed, match=f":{address[1]} did not take the connection: Connection refused$"):
        await dial(address, "token", WAIT_S)
