"""Requests per second: a process full of fake REPLs against the handler, and against an echo of the same frames."""

import asyncio
import os
import selectors
import socket
import sys
import time
from collections.abc import Callable, Coroutine
from typing import Any

from rlm_broker.clients.base import LMReply, LMRequest
from rlm_broker.handler.calls import Caller, RunCalls
from rlm_broker.handler.handler import LMHandler
from rlm_broker.ledger import Ledger
from rlm_broker.limits import Limits
from rlm_broker.transport.connection import Connection
from rlm_broker.transport.session import Session
from rlm_broker.types import Usage
from sandbox_worker.wire.frames import PREFIX, encode_frame
from sandbox_worker.wire.messages import Hello, Output, Query, Ready, Result, Slot, encode

SESSIONS = 64
REQUESTS = 100_000
MAX_FRAME_BYTES = 1 << 20


def handler_rate() -> float:
    """Requests per second that `LMHandler` answers, counted and recorded as in a run."""
    return asyncio.run(_handler_rate())


def echo_rate() -> float:
    """The same number of the same frames, sent back by a bare asyncio server."""
    return asyncio.run(_echo_rate())


class _NoOp:
    model_name = "noop"

    async def complete(self, request: LMRequest) -> LMReply:
        del request
        return LMReply("ok", Usage(total_calls=1))

    async def aclose(self) -> None:
        """Nothing is held."""


async def _handler_rate() -> float:
    limits = Limits(max_llm_calls=None, max_concurrent_calls=SESSIONS)
    async with LMHandler(_NoOp()) as handler:
        calls = RunCalls(handler, Ledger(limits), lambda _event: None)
        caller = Caller("1", 1, "?")

        async def answer(query: Query) -> list[Slot]:
            return await calls.slots(caller, query)

        connections = [Connection(Session(MAX_FRAME_BYTES), 16) for _ in range(SESSIONS)]
        tokens = [handler.listener.expect(connection, 60) for connection in connections]

        async def serve() -> None:
            await asyncio.gather(*(connection.ready() for connection in connections))
            await asyncio.gather(*(connection.execute("", answer, _ignore) for connection in connections))

        return await _rate(handler.port, lambda sockets: _introduce(sockets, tokens), serve())


async def _echo_rate() -> float:
    class Echo(asyncio.Protocol):
        def connection_made(self, transport: asyncio.BaseTransport) -> None:
            assert isinstance(transport, asyncio.Transport)
            self._transport = transport

        def data_received(self, data: bytes) -> None:
            self._transport.write(data)

    server = await asyncio.get_running_loop().create_server(Echo, "127.0.0.1", 0, backlog=SESSIONS)
    async with server:
        port = server.sockets[0].getsockname()[1]
        return await _rate(port, lambda _sockets: None, asyncio.sleep(0))


async def _rate(
    port: int, introduce: Callable[[list[socket.socket]], None], serving: Coroutine[Any, Any, None]
) -> float:
    """Fork the load, serve it on this loop, and return what it measured."""
    read_end, write_end = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            os.write(write_end, repr(_measure(port, introduce)).encode())
        finally:
            os._exit(0)
    os.close(write_end)
    task = asyncio.ensure_future(serving)
    rate = await asyncio.to_thread(os.read, read_end, 64)
    os.waitpid(pid, 0)
    os.close(read_end)
    await task
    return float(rate)


def _measure(port: int, introduce: Callable[[list[socket.socket]], None]) -> float:
    """In the forked process: one request open on each connection, until all are answered. Requests per second."""
    sockets = [socket.create_connection(("127.0.0.1", port)) for _ in range(SESSIONS)]
    for connection in sockets:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    introduce(sockets)
    selector = selectors.DefaultSelector()
    by_number = {connection.fileno(): connection for connection in sockets}
    counts = dict.fromkeys(sockets, 0)
    each = REQUESTS // SESSIONS
    started = time.perf_counter()
    for connection in sockets:
        selector.register(connection, selectors.EVENT_READ)
        _ask(connection, counts)
    while selector.get_map():
        for key, _ in selector.select():
            connection = by_number[key.fd]
            _receive_frame(connection)
            if counts[connection] < each:
                _ask(connection, counts)
            else:
                selector.unregister(key.fd)
    taken_s = time.perf_counter() - started
    for connection in sockets:
        connection.sendall(_frame(encode(Result(block=1, status="ok"))))
    return each * SESSIONS / taken_s


def _introduce(sockets: list[socket.socket], tokens: list[str]) -> None:
    """Token, welcome, ready, and the block that is being run from then on."""
    for connection, token in zip(sockets, tokens, strict=True):
        connection.sendall(_frame(encode(Hello(token=token))))
        _receive_frame(connection)
        connection.sendall(_frame(encode(Ready())))
    for connection in sockets:
        _receive_frame(connection)


def _ask(connection: socket.socket, counts: dict[socket.socket, int]) -> None:
    counts[connection] += 1
    query_id = f"1:{counts[connection]}"
    connection.sendall(_frame(b'{"type":"query","id":"%s","want":"llm","prompts":["hello"]}' % query_id.encode()))


def _receive_frame(connection: socket.socket) -> bytes:
    data = connection.recv(65536)
    (length,) = PREFIX.unpack_from(data)
    while len(data) < PREFIX.size + length:
        more = connection.recv(65536)
        if not more:
            sys.exit("the server hung up")
        data += more
    return data[PREFIX.size :]


def _frame(payload: bytes) -> bytes:
    return encode_frame(payload, MAX_FRAME_BYTES)


def _ignore(_output: Output) -> None:
    """There is none."""
