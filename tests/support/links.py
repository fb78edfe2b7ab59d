"""Links over real TCP connections in one event loop, with and without admission."""

import asyncio
import contextlib
import ctypes
import socket
import ssl
import struct
from collections.abc import AsyncIterator
from dataclasses import dataclass, field

import pytest

from rlm_broker.cluster.admission import Admission
from rlm_broker.cluster.dialing import Target
from rlm_broker.cluster.link import Link, from_agent, from_broker
from rlm_broker.cluster.messages import PROTOCOL, SILENCE_S, FromAgent, FromBroker, Join, Load
from rlm_broker.cluster.tls import ServerTls
from rlm_broker.cluster.tokens import Tokens
from sandbox_worker import RELEASE
from tests.support.skips import NEEDS_SOCKET_FILTERS

SO_ATTACH_FILTER = 26
BPF_RETURN = 0x06


def load() -> Load:
    """Heartbeat of an agent without runs."""
    return Load(runs=0, free_bytes=1 << 30)


def asking(token: str, name: str = "node") -> Join:
    """First frame of an agent."""
    return Join(token, PROTOCOL, RELEASE, name, cpus=2, memory_bytes=1 << 30, max_runs=4)


def cut(transport: asyncio.BaseTransport) -> None:
    """Let the kernel drop all that arrives for a connection, as behind a cut cable: no byte, no FIN, no acknowledgement."""
    connected = transport.get_extra_info("socket")
    program = ctypes.create_string_buffer(struct.pack("HBBI", BPF_RETURN, 0, 0, 0))
    try:
        connected.setsockopt(socket.SOL_SOCKET, SO_ATTACH_FILTER, struct.pack("HxxxxxxP", 1, ctypes.addressof(program)))
    except PermissionError:
        pytest.skip(NEEDS_SOCKET_FILTERS)


@contextlib.asynccontextmanager
async def linked(
    silence_s: float = SILENCE_S,
    server_tls: ssl.SSLContext | None = None,
    client_tls: ssl.SSLContext | None = None,
) -> AsyncIterator[tuple[Link[FromAgent], Link[FromBroker]]]:
    """Connect a broker's link with an agent's, admission left out."""
    async with listening(silence_s, server_tls) as (at_broker, port):
        at_agent = Link("node", from_broker, load, silence_s=silence_s)
        connecting = asyncio.get_running_loop().create_connection(asyncio.Protocol, "127.0.0.1", port, ssl=client_tls)
        transport, _ = await connecting
        at_agent.begin(transport)
        try:
            yield at_broker, at_agent
        finally:
            at_agent.close()


@contextlib.asynccontextmanager
async def listening(
    silence_s: float = SILENCE_S, tls: ssl.SSLContext | None = None
) -> AsyncIterator[tuple[Link[FromAgent], int]]:
    """A broker's link that waits for one connection, and its port."""
    link = Link("node", from_agent, silence_s=silence_s)
    server = await asyncio.get_running_loop().create_server(lambda: link, "127.0.0.1", 0, ssl=tls)
    async with server:
        try:
            yield link, server.sockets[0].getsockname()[1]
        finally:
            link.close()


@dataclass
class Port:
    """An open `Admission`, and the nodes that have joined it."""

    admission: Admission
    tokens: Tokens
    target: Target
    joined: list[tuple[Link[FromAgent], Join]] = field(default_factory=list)


@contextlib.asynccontextmanager
async def admitting(tls: ServerTls | None = None, tokens: Tokens | None = None) -> AsyncIterator[Port]:
    """Listen on loopback."""
    joined: list[tuple[Link[FromAgent], Join]] = []
    tokens = tokens or Tokens()
    admission = Admission(tokens, lambda link, join, _: joined.append((link, join)), tls)
    host, port = await admission.open()
    try:
        yield Port(admission, tokens, Target(host, port, None if tls is None else tls.fingerprint), joined)
    finally:
        await admission.aclose()
        for link, _ in joined:
            link.close()
