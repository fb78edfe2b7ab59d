"""An ASGI application on loopback, as uvicorn serves it, in a thread of its own."""

import asyncio
import contextlib
import socket
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import uvicorn


@dataclass(frozen=True)
class HttpServer:
    """A server that runs: its address, and the loop that it lives on."""

    url: str
    loop: asyncio.AbstractEventLoop


@contextlib.contextmanager
def http_server(app: Any) -> Iterator[HttpServer]:
    """Serve on a free port of loopback until the block is left. The application's lifespan runs."""
    with socket.create_server(("127.0.0.1", 0), backlog=2048) as listening:
        listening.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)  # asyncio sets it on its own sockets alone
        config = uvicorn.Config(app, log_config=None, timeout_graceful_shutdown=2, lifespan="on")
        server = _Server(config)
        thread = threading.Thread(target=server.run, args=([listening],), daemon=True)
        thread.start()
        try:
            server.decided.wait()
            assert server.started, "the server did not start"
            yield HttpServer(f"http://127.0.0.1:{listening.getsockname()[1]}", server.loop)
        finally:
            server.should_exit = True
            thread.join()


class _Server(uvicorn.Server):
    """Says when it has started, or has failed to; leaves signals to the tests."""

    def __init__(self, config: uvicorn.Config) -> None:
        super().__init__(config)
        self.decided = threading.Event()
        self.loop: asyncio.AbstractEventLoop

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        self.loop = asyncio.get_running_loop()
        try:
            await super().startup(sockets)
        finally:
            self.decided.set()

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield
