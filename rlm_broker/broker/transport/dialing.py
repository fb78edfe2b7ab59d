"""The orchestrator's connection for a REPL: it shows the token and is welcomed. The socket is then sent to the worker.

A worker cannot connect itself: at `strict` it has no network."""

import asyncio
import os
import socket

from rlm_broker.concurrency.forking import FORKING, socket_of_parent
from rlm_broker.errors import SandboxFailed, is_shortage
from sandbox_worker.wire.errors import WireError
from sandbox_worker.wire.frames import FrameDecoder, encode_frame
from sandbox_worker.wire.messages import Hello, decode_welcome, encode

MAX_WELCOME_BYTES = 4096
"""Bytes of the handler's first frame; a longer one is refused."""


async def dial(address: tuple[str, int], token: str, timeout_s: float) -> socket.socket:
    """Return a connected socket that the handler at `address` has accepted for the session of `token`.

    The handler's only message before the REPL's first is the welcome, so that no byte of the REPL's is read here.

    Args:
        address: Host and port of the handler.
        token: One-time token, see `Listener.expect`.
        timeout_s: Seconds for all of it.

    Returns:
        A blocking socket.

    Raises:
        SandboxFailed: The port is closed, the token is not known, or it took longer than `timeout_s`.
        OSError: This process has no descriptor left, see `is_shortage`.
    """
    loop = asyncio.get_running_loop()
    family = socket.AF_INET6 if ":" in address[0] else socket.AF_INET
    with FORKING:
        connected = socket_of_parent(socket.socket(family, socket.SOCK_STREAM))
    try:
        connected.setblocking(False)
        # The handler in this process takes a second descriptor. Without one it would wait for a descriptor until the
        # time is over: here the error says so at once.
        spare = os.dup(connected.fileno())
        try:
            async with asyncio.timeout(timeout_s):
                await loop.sock_connect(connected, address)
        finally:
            os.close(spare)
        async with asyncio.timeout(timeout_s):
            connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)  # each frame is answered on its own
            await loop.sock_sendall(connected, encode_frame(encode(Hello(token=token)), MAX_WELCOME_BYTES))
            await _welcome(connected)
        connected.setblocking(True)
    except BaseException as error:
        connected.close()
        if isinstance(error, OSError | WireError) and not is_shortage(error):
            why = _reason(error, timeout_s)
            raise SandboxFailed(
                f"the handler at {address[0]}:{address[1]} did not take the connection: {why}"
            ) from None
        raise
    return connected


def _reason(error: OSError | WireError, timeout_s: float) -> str:
    if isinstance(error, TimeoutError):  # an OSError without a text
        return f"no answer within {timeout_s:g} s"
    number = error.errno if isinstance(error, OSError) else None
    return os.strerror(number) if number is not None and number > 0 else str(error)  # below 0: resolver, not errno


async def _welcome(connected: socket.socket) -> None:
    frames = FrameDecoder(MAX_WELCOME_BYTES)
    loop = asyncio.get_running_loop()
    while True:
        data = await loop.sock_recv(connected, MAX_WELCOME_BYTES)
        if not data:
            raise ConnectionResetError("it closed the connection after the token was shown")
        if payloads := frames.feed(data):
            decode_welcome(payloads[0])
            return
