"""The broker's port under attack: which connections join it, and how all others end."""

import asyncio
import contextlib
import socket
import ssl
from collections.abc import AsyncIterator

import msgspec
import pytest

from rlm_broker.cluster import admission as module
from rlm_broker.cluster.admission import BAD_TOKEN, Admission, is_loopback, source_of
from rlm_broker.cluster.dialing import JoinRefused, join
from rlm_broker.cluster.link import encode
from rlm_broker.cluster.messages import JOIN_BYTES, Join, Need, Refused
from rlm_broker.cluster.tls import ServerTls, client_context, made_tls
from rlm_broker.cluster.tokens import Tokens
from rlm_broker.errors import ConfigurationError
from sandbox_worker import RELEASE
from sandbox_worker.wire.frames import PREFIX
from tests.support.links import Port, admitting, asking
from tests.support.waiting import WAIT_S, until

SHORT_S = 0.3


class Attacker:
    """A connection that sends whatever bytes it likes."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader = reader
        self.writer = writer

    async def said(self) -> bytes:
        """All that the broker sends until it hangs up."""
        async with asyncio.timeout(WAIT_S):
            try:
                return await self.reader.read()
            except ConnectionResetError:
                return b""


@contextlib.asynccontextmanager
async def attacker(
    port: Port, data: bytes = b"", *, tls: ssl.SSLContext | None = None, source: str = "127.0.0.1"
) -> AsyncIterator[Attacker]:
    reader, writer = await asyncio.open_connection(
        port.target.host, port.target.port, ssl=tls, server_hostname=None if tls is None else "", local_addr=(source, 0)
    )
    writer.write(data)
    try:
        yield Attacker(reader, writer)
    finally:
        writer.transport.abort()


def refusal(why: str) -> bytes:
    return encode(Refused(why))


def payload_of(message: Join) -> dict[str, object]:
    plain: dict[str, object] = msgspec.json.decode(msgspec.json.encode(message))
    return plain


def framed(value: object) -> bytes:
    payload = msgspec.json.encode(value)
    return PREFIX.pack(len(payload)) + payload


@pytest.fixture(scope="module")
def tls() -> ServerTls:
    return made_tls()


@pytest.mark.parametrize("has_tls", [False, True], ids=["plain", "tls"])
async def test_node_joins_and_joins_again(has_tls: bool, tls: ServerTls) -> None:
    """The node keeps its name, and its older link ends."""
    async with admitting(tls if has_tls else None) as port:
        first, welcome = await join(port.target, asking(port.tokens.make(uses=1), "gpu 1/é"))
        again, second = await join(port.target, asking(welcome.rejoin, "other"))
        assert welcome.node == second.node == port.joined[0][0].name == port.joined[1][0].name == "gpu-1"
        assert await port.joined[0][0].lost() == "the node has joined again"
        assert await first.lost() == "the other side has closed the connection"
        await again.send(Need("d"))
        async for message, _ in port.joined[1][0].receive():
            if message == Need("d"):
                break
        assert port.admission.refused == 0
        again.close()


async def test_invalid_tokens_get_one_answer() -> None:
    """A wrong, a used, an expired and a missing token look the same from outside, whatever else the frame has."""
    now = 0.0
    async with admitting(tokens=Tokens(lambda: now)) as port:
        used, expired = port.tokens.make(uses=1), port.tokens.make(valid_s=1)
        link, _ = await join(port.target, asking(used))
        now = 2.0
        join_of = payload_of(asking("x" * 43))
        attacks = [
            encode(asking("x" * 43)),
            encode(asking(used)),
            encode(asking(expired)),
            framed({**join_of, "protocol": 99, "release": "9.9"}),
            framed({**join_of, "cpus": "many", "further": [[[]]]}),
            framed({name: value for name, value in join_of.items() if name != "token"}),
            framed({**join_of, "token": 5}),
            framed([]),
            PREFIX.pack(4) + b"\xff\xff\xff\xff",
            PREFIX.pack(4000) + b"[" * 4000,
            PREFIX.pack(0),
        ]
        for attack in attacks:
            async with attacker(port, attack) as one:
                assert await one.said() == refusal(BAD_TOKEN), attack
        assert len(port.joined) == 1
        await until(lambda: port.admission.refused == len(attacks))
        link.close()


async def test_other_version_is_one_sentence_naming_both() -> None:
    """A node of another version cannot use the token up, and fields that only it has do not matter."""
    async with admitting() as port:
        token = port.tokens.make(uses=1)
        with pytest.raises(JoinRefused, match=rf"release 9\.9 .*protocol 1.* and the broker {RELEASE} .*same release"):
            await join(port.target, msgspec.structs.replace(asking(token), release="9.9"))
        async with attacker(port, framed({"token": token, "protocol": 2, "release": RELEASE, "gpus": 4})) as one:
            assert b"(protocol 2)" in await one.said()
        link, _ = await join(port.target, asking(token))
        link.close()


@pytest.mark.parametrize(
    "change",
    [{"cpus": 0}, {"cpus": -1}, {"max_runs": 0}, {"memory_bytes": -1}, {"name": ""}, {"name": "x" * 201}, {"more": 1}],
    ids=str,
)
async def test_impossible_facts_are_refused(change: dict[str, object]) -> None:
    async with admitting() as port:
        async with attacker(port, framed({**payload_of(asking(port.tokens.make())), **change})) as one:
            assert b"the join is not valid" in await one.said()
        assert port.joined == []


@pytest.mark.parametrize("has_tls", [False, True], ids=["plain", "tls"])
@pytest.mark.parametrize(
    "data",
    [
        PREFIX.pack(JOIN_BYTES + 1),
        PREFIX.pack(0xFFFF_FFFF),
        b"GET / HTTP/1.1\r\nhost: x\r\n\r\n",
        b"\x16\x03\x01\x02\x00",
    ],
    ids=["too large", "huge", "HTTP", "TLS"],
)
async def test_large_first_frame_ends_at_its_prefix(data: bytes, has_tls: bool, tls: ServerTls) -> None:
    """No byte of the frame itself is waited for, and the stranger gets no answer."""
    async with (
        admitting(tls if has_tls else None) as port,
        attacker(port, data, tls=client_context() if has_tls else None) as one,
    ):
        assert await one.said() == b""


async def test_agent_that_does_not_wait_is_refused() -> None:
    """Bytes behind the first frame, before the welcome, may be an attempt to have more read."""
    async with admitting() as port:
        async with attacker(port, encode(asking(port.tokens.make())) + encode(Need("d"))) as one:
            assert await one.said() == b""
        assert port.joined == []


@pytest.mark.parametrize("data", [b"", b"\0", encode(asking("x" * 43))[:-1]], ids=["silent", "one byte", "half"])
@pytest.mark.parametrize("has_tls", [False, True], ids=["plain", "tls"])
async def test_slow_stranger_is_closed(
    data: bytes, has_tls: bool, tls: ServerTls, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With TLS, the same bytes are a handshake that does not begin, or does not end."""
    monkeypatch.setattr(module, "JOIN_S", SHORT_S)
    async with admitting(tls if has_tls else None) as port, attacker(port, data) as one:
        await one.said()
        await until(lambda: port.admission.refused == 1)
        assert port.admission._strangers == {}


async def test_dripping_stranger_gets_no_more_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """The time counts from the arrival, and not from the last byte. TLS counts, too."""
    monkeypatch.setattr(module, "JOIN_S", SHORT_S)
    async with admitting() as port, attacker(port, PREFIX.pack(JOIN_BYTES)) as one:
        said = asyncio.create_task(one.said())
        while not said.done():
            one.writer.write(b"x")
            await asyncio.sleep(0.01)
        assert await said == b""
        assert port.joined == []


async def test_refused_stranger_that_stays_is_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    """The stranger reads its refusal, and then neither leaves nor is listened to."""
    monkeypatch.setattr(module, "JOIN_S", SHORT_S)
    async with admitting() as port, attacker(port, encode(asking("x" * 43))) as one:
        one.writer.write(encode(asking(port.tokens.make())))
        await until(lambda: port.admission.refused == 1)
        assert port.joined == []


async def test_connections_of_one_address_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """A further one takes the place of the oldest: idle connections lock out no agent of the same address."""
    monkeypatch.setattr(module, "MOST_OF_ADDRESS", 3)
    async with admitting() as port, contextlib.AsyncExitStack() as stack:
        held = [await stack.enter_async_context(attacker(port)) for _ in range(3)]
        await until(lambda: len(port.admission._strangers) == 3)
        link, _ = await join(port.target, asking(port.tokens.make()))
        assert await held[0].said() == b""
        assert len(port.admission._strangers) == 2
        link.close()


async def test_flood_from_one_address_keeps_no_other_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """When all places are taken, the oldest connection of the address with the most has to leave."""
    monkeypatch.setattr(module, "MOST_STRANGERS", 6)
    async with admitting() as port, contextlib.AsyncExitStack() as stack:
        other = await stack.enter_async_context(attacker(port, source="127.0.0.2"))
        flood = [await stack.enter_async_context(attacker(port, source="127.0.0.3")) for _ in range(5)]
        await until(lambda: len(port.admission._strangers) == 6)
        link, _ = await join(port.target, asking(port.tokens.make()))
        assert await flood[0].said() == b""
        assert len(port.admission._strangers) == 5
        other.writer.write(encode(asking(port.tokens.make())))
        await until(lambda: len(port.joined) == 2)
        link.close()


async def test_many_connections_at_once_are_all_ended() -> None:
    """A thousand strangers leave neither a socket nor a task behind, and a node joins beside them."""
    async with admitting() as port:
        tasks = len(asyncio.all_tasks())
        sockets = []
        for number in range(1_000):
            one = socket.socket()
            one.setblocking(False)
            one.bind((f"127.0.1.{number % 200 + 1}", 0))
            with contextlib.suppress(BlockingIOError):
                one.connect((port.target.host, port.target.port))
            sockets.append(one)
        link, _ = await join(port.target, asking(port.tokens.make()))
        assert len(port.admission._strangers) <= module.MOST_STRANGERS
        for one in sockets:
            one.close()
        await until(lambda: not port.admission._strangers and port.admission.refused == 1_000)
        await until(lambda: len(asyncio.all_tasks()) == tasks)
        link.close()


async def test_nodes_of_one_name_are_told_apart() -> None:
    async with admitting() as port:
        token = port.tokens.make()
        names = []
        for wanted in ("a", "a", "../a", "\x1b[2J", "a"):
            link, welcome = await join(port.target, asking(token, wanted))
            names.append(welcome.node)
        assert names == ["a", "a-2", "a-3", "2J", "a-4"]
        port.admission.forget("a-4")
        _, welcome = await join(port.target, asking(token, "a"))
        assert welcome.node == "a-4"
        link.close()


async def test_number_of_nodes_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """A node that was lost gives its place to a new one, and its secret is then refused."""
    monkeypatch.setattr(module, "MOST_NODES", 2)
    async with admitting() as port:
        token = port.tokens.make()
        link, welcome = await join(port.target, asking(token))
        other, _ = await join(port.target, asking(token))
        with pytest.raises(JoinRefused, match="has 2 nodes, and takes no more"):
            await join(port.target, asking(token))
        link.close()
        await until(lambda: port.joined[0][0].is_lost)
        further, _ = await join(port.target, asking(token))
        with pytest.raises(JoinRefused, match="token is not valid"):
            await join(port.target, asking(welcome.rejoin))
        other.close()
        further.close()


async def test_plain_text_beyond_loopback_must_be_named(tls: ServerTls) -> None:
    for host in ("0.0.0.0", "", "::"):
        with pytest.raises(ConfigurationError, match="beyond loopback: nodes connect to it by TLS, or"):
            await Admission(Tokens(), lambda *_: None).open(host)
    for admission, plain in (
        (Admission(Tokens(), lambda *_: None), True),
        (Admission(Tokens(), lambda *_: None, tls), False),
    ):
        _, port = await admission.open("0.0.0.0", plain=plain)
        assert port > 0
        await admission.aclose()


async def test_closing_ends_strangers_and_no_link() -> None:
    async with admitting() as port:
        link, _ = await join(port.target, asking(port.tokens.make()))
        async with attacker(port) as one:
            await until(lambda: port.admission._strangers)
            await port.admission.aclose()
            assert await one.said() == b""
        assert not link.is_lost
        link.close()


async def test_connection_is_closed_before_its_task_ran() -> None:
    """A connection that has to make room in the same turn of the loop in which it came."""
    async with admitting() as port:
        with socket.create_server(("127.0.0.1", 0)) as listening:
            reader, writer = await asyncio.open_connection(*listening.getsockname())
            accepted, _ = listening.accept()
            port.admission._accept(accepted)
            port.admission._make_room()
            assert await Attacker(reader, writer).said() == b""
            assert accepted.fileno() == -1
            writer.transport.abort()


def test_sources_and_loopback() -> None:
    assert source_of("10.0.0.1") == "10.0.0.1"
    assert source_of("::ffff:10.0.0.1") == "10.0.0.1"
    assert source_of("2001:db8::1%eth0") == source_of("2001:db8::ffff") == "2001:db8::/64"
    assert source_of("2001:db8:0:1::1") != source_of("2001:db8::1")
    assert [is_loopback(host) for host in ("127.0.0.9", "::1", "localhost")] == [True] * 3
    assert [is_loopback(host) for host in ("0.0.0.0", "", "::", "10.0.0.1", "localhost.example")] == [False] * 5
