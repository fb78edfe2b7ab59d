"""An ASGI application on loopback, as uvicorn serves it, in a thread of its own."""

import asyncio
import contextlib
import socket
import threading
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import uvicorn

from rlm_broker.serve.http_server import BoundedServer


@dataclass(frozen=True)
class HttpServer:
    """A server that runs: its address, and the loop that it lives on."""

    url: str
    loop: asyncio.AbstractEventLoop
    connections: Callable[[], int]
    """Returns the number of open connections."""
    unread: Callable[[], int]
    """Returns the number of connections whose clients do not read."""


@contextlib.contextmanager
def http_server(
    app: Any, most: int | None = None, *, config: Mapping[str, Any] | None = None, **bounds: float
) -> Iterator[HttpServer]:
    """Serve on a free port of loopback until the block is left. The application's lifespan runs.

    Args:
        app: ASGI application.
        most: Connections at the same time; None takes the default.
        config: Further settings of uvicorn, or None.
        bounds: Seconds for `BoundedServer`, by name.
    """
    with socket.create_server(("127.0.0.1", 0), backlog=2048) as listening:
        listening.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)  # asyncio sets it on its own sockets alone
        settings = uvicorn.Config(
            app,
            log_config=None,
            log_level="error",
            loop="asyncio",
            timeout_graceful_shutdown=20,
            lifespan="on",
            **(config or {}),
        )
        server = _Server(settings, most, **{"close_s": 0.3, **bounds})
        thread = threading.Thread(target=server.run, args=([listening],), daemon=True)
        thread.start()
        try:
            server.decided.wait()
            assert server.started, "the server did not start"
            yield HttpServer(
                f"http://127.0.0.1:{listening.getsockname()[1]}",
                server.loop,
                lambda: len(server.server_state.connections),
                lambda: len(server.unread),
            )
        finally:
            server.should_exit = True
            thread.join()


class _Server(BoundedServer):
    """Says when it has started, or has failed to."""

    def __init__(self, config: uvicorn.Config, most: int | None, **bounds: float) -> None:
        super().__init__(config, most, **bounds)  # type: ignore[arg-type]
        self.decided = threading.Event()
        self.loop: asyncio.AbstractEventLoop

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        self.loop = asyncio.get_running_loop()
        try:
            await super().startup(sockets)
        finally:
            self.decided.set()
