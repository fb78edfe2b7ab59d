"""An ASGI application on loopback, as uvicorn serves it, in a thread of its own."""

import asyncio
import contextlib
import socket
import threading
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import uvicorn

from rlm_broker.serve.http_server import BoundedServer, ConnectionRoom


@dataclass(frozen=True)
class HttpServer:
    """A server that runs: its address, and the loop that it lives on."""

    url: str
    loop: asyncio.AbstractEventLoop
    connections: Callable[[], int]
    """Returns the number of open connections."""


@contextlib.contextmanager
def http_server(
    app: Any, room: ConnectionRoom | None = None, *, close_s: float = 0.3, config: Mapping[str, Any] | None = None
) -> Iterator[HttpServer]:
    """Serve on a free port of loopback until the block is left. The application's lifespan runs.

    Args:
        app: ASGI application.
        room: Room for the connections, as `rlm-broker serve` bounds them; None takes the defaults.
        close_s: Seconds that connections have to end.
        config: Further settings of uvicorn, or None.
    """
    with socket.create_server(("127.0.0.1", 0), backlog=2048) as listening:
        listening.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)  # asyncio sets it on its own sockets alone
        settings = uvicorn.Config(
            app, log_config=None, loop="asyncio", timeout_graceful_shutdown=20, lifespan="on", **(config or {})
        )
        server = _Server(settings, room, close_s)
        thread = threading.Thread(target=server.run, args=([listening],), daemon=True)
        thread.start()
        try:
            server.decided.wait()
            assert server.started, "the server did not start"
            yield HttpServer(
                f"http://127.0.0.1:{listening.getsockname()[1]}",
                server.loop,
                lambda: len(server.server_state.connections),
            )
        finally:
            server.should_exit = True
            thread.join()


class _Server(BoundedServer):
    """Says when it has started, or has failed to."""

    def __init__(self, config: uvicorn.Config, room: ConnectionRoom | None, close_s: float) -> None:
        super().__init__(config, room, close_s)
        self.decided = threading.Event()
        self.loop: asyncio.AbstractEventLoop

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        self.loop = asyncio.get_running_loop()
        try:
            await super().startup(sockets)
        finally:
            self.decided.set()
