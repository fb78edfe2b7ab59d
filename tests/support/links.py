"""Two links over a real TCP connection in one event loop."""

import asyncio
import contextlib
import ssl
from collections.abc import AsyncIterator
from typing import cast

from rlm_broker.cluster.link import Link, from_agent, from_broker
from rlm_broker.cluster.messages import SILENCE_S, FromAgent, FromBroker, Load


def load() -> Load:
    """Heartbeat of an agent without runs."""
    return Load(runs=0, free_bytes=1 << 30)


@contextlib.asynccontextmanager
async def linked(
    silence_s: float = SILENCE_S,
    server_tls: ssl.SSLContext | None = None,
    client_tls: ssl.SSLContext | None = None,
) -> AsyncIterator[tuple[Link[FromAgent], Link[FromBroker]]]:
    """Connect a broker's link with an agent's, admission left out."""
    at_broker = Link("node", from_agent, silence_s=silence_s)
    at_agent = Link("node", from_broker, load, silence_s=silence_s)
    loop = asyncio.get_running_loop()
    server = await loop.create_server(lambda: at_broker, "127.0.0.1", 0, ssl=server_tls)
    async with server:
        port = server.sockets[0].getsockname()[1]
        transport, _ = await loop.create_connection(asyncio.Protocol, "127.0.0.1", port, ssl=client_tls)
        at_agent.begin(cast("asyncio.Transport", transport))
        try:
            yield at_broker, at_agent
        finally:
            at_agent.close()
            at_broker.close()
