"""The port for agents: tokens, certificates, strangers."""

import asyncio
import contextlib
import socket
import ssl
import sys
from collections.abc import AsyncIterator

import pytest

from rlm_broker import ConfigurationError, SandboxFailed
from rlm_broker.nodes import messages, port
from rlm_broker.nodes.agent import Agent, AgentOrder
from rlm_broker.nodes.link import Link
from rlm_broker.nodes.port import AgentPort, made_certificate
from sandbox_worker import RELEASE
from sandbox_worker.wire.frames import encode_frame
from tests.support.nodes import LocalNodes
from tests.support.waiting import until


class Taken:
    """An open port, and the links that were taken."""

    def __init__(self, agents: AgentPort, address: tuple[str, int]) -> None:
        self.port = agents
        self.address = address
        self.links: list[Link] = []

    def order(self, **fields: object) -> AgentOrder:
        token = self.port.expect("one", self._make)
        given = {"host": self.address[0], "port": self.address[1], "fingerprint": self.port.fingerprint, "token": token}
        return AgentOrder(**{**given, **fields})  # type: ignore[arg-type]

    def _make(self) -> Link:
        self.links.append(Link(messages.from_agent, lambda _: None, lambda _: None))
        return self.links[-1]


@pytest.fixture(params=["plain", "tls"])
async def taken(request: pytest.FixtureRequest) -> AsyncIterator[Taken]:
    agents = AgentPort(is_encrypted=request.param == "tls")
    taken = Taken(agents, await agents.open("127.0.0.1"))
    yield taken
    for link in taken.links:
        link.close("over")
    await agents.close()


async def test_token_is_for_one_agent(taken: Taken) -> None:
    """The second that shows it, and one with another token, protocol or release, is dropped without a word."""
    order = taken.order()
    agents = [asyncio.create_task(Agent(order).serve())]
    await until(lambda: len(taken.links) == 1)
    agents += [asyncio.create_task(Agent(each).serve()) for each in (order, taken.order(token="guessed"))]
    done, _ = await asyncio.wait(agents, return_when=asyncio.FIRST_COMPLETED)
    await until(lambda: all(agent.done() for agent in agents[1:]))
    assert {agent.result() for agent in agents[1:]} == {"its connection was lost"}
    assert len(taken.links) == 1
    assert taken.links[0].why_lost is None
    assert agents[0] not in done
    taken.links[0].close("over")
    assert "lost" in await agents[0]


async def test_next_order_of_a_node_takes_its_last_token_back(taken: Taken) -> None:
    first, second = taken.order(), taken.order()
    assert await Agent(first).serve() == "its connection was lost"
    agent = asyncio.create_task(Agent(second).serve())
    await until(lambda: len(taken.links) == 1)
    taken.links[0].close("over")
    assert "lost" in await agent


async def test_other_certificate_and_closed_port_get_no_token(taken: Taken) -> None:
    if taken.port.fingerprint is None:
        pytest.skip("is about TLS")
    with pytest.raises(SandboxFailed, match="another certificate answers than the order says"):
        await Agent(taken.order(fingerprint=made_certificate()[1])).serve()
    assert taken.links == []
    with socket.create_server(("127.0.0.1", 0)) as closed:
        number = closed.getsockname()[1]
    with pytest.raises(SandboxFailed, match=f"127.0.0.1:{number} cannot be reached"):
        await Agent(taken.order(port=number)).serve()


@pytest.mark.parametrize("sent", [b"GET / HTTP/1.1\r\n\r\n", b"\x00\x00\x10\x00x", b"\x00\x00\x00\x01x"])
async def test_strangers_are_dropped(taken: Taken, sent: bytes) -> None:
    """Bytes that are no token end the connection at once, and so does a plain word to a port with TLS."""
    reader, writer = await asyncio.open_connection(*taken.address)
    writer.write(sent)
    with contextlib.suppress(ConnectionResetError):
        assert await reader.read() == b"" or taken.port.fingerprint is not None
    writer.close()
    await until(lambda: not taken.port.strangers)


async def test_silent_strangers_are_bounded(taken: Taken, monkeypatch: pytest.MonkeyPatch) -> None:
    """With more than the most, the oldest is dropped, also in a handshake; an agent with a token still joins."""
    monkeypatch.setattr(port, "MOST_STRANGERS", 4)
    silent = [await asyncio.open_connection(*taken.address) for _ in range(12)]
    await until(lambda: len(taken.port.strangers) == 4)
    for reader, _ in silent[:8]:
        with contextlib.suppress(ConnectionResetError):
            assert await reader.read() == b""
    serving = asyncio.create_task(Agent(taken.order()).serve())
    await until(lambda: len(taken.links) == 1)
    serving.cancel()
    for _, writer in silent:
        writer.close()
    await asyncio.wait({serving})


async def test_silent_stranger_is_dropped_in_time(taken: Taken, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(port, "JOIN_TIMEOUT_S", 0.05)
    reader, writer = await asyncio.open_connection(*taken.address)
    with contextlib.suppress(ConnectionResetError):
        assert await reader.read() == b""
    await until(lambda: not taken.port.strangers)
    writer.close()


async def test_join_and_what_follows_may_come_in_any_pieces(taken: Taken) -> None:
    if taken.port.fingerprint is not None:
        pytest.skip("TLS cuts into pieces of its own")
    join = messages.encoded(messages.Join(taken.order().token, messages.PROTOCOL, RELEASE))
    beat = messages.encoded(messages.Beat())
    whole = encode_frame(join, 512) + encode_frame(bytes(4) + beat, 512) * 3
    _, writer = await asyncio.open_connection(*taken.address)
    for at in range(0, len(whole), 7):
        writer.write(whole[at : at + 7])
        await writer.drain()
        await asyncio.sleep(0)
    await until(lambda: len(taken.links) == 1)
    assert taken.links[0].why_lost is None
    writer.close()


async def test_repls_beyond_loopback_are_encrypted() -> None:
    """An address that is not loopback has a certificate, and a REPL works over it; loopback needs none."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(("192.0.2.1", 9))
        except OSError:
            pytest.skip("this machine has no address beyond loopback")
        own = probe.getsockname()[0]
    async with LocalNodes(at=own) as nodes, nodes.repl("x" * 100_000) as repl:
        assert nodes._port is not None
        assert nodes._port.fingerprint is not None
        assert (await repl.aexecute("print(len(context))")).stdout == "100000\n"
        context = ssl.create_default_context()
        context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
        context.maximum_version = ssl.TLSVersion.TLSv1_2
        with pytest.raises(OSError):  # an alert or a reset; SSLError is an OSError
            await asyncio.open_connection(*nodes._address, ssl=context)


def test_missing_package_for_tls_is_one_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "cryptography.x509", None)
    with pytest.raises(ConfigurationError, match=r"pip install 'rlm-broker\[ray\]'"):
        AgentPort(is_encrypted=True)
