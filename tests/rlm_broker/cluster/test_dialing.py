"""An agent's way to its broker: the broker that it means, one that it does not, none, and one that comes back."""

import asyncio
import contextlib
import socket
from collections.abc import AsyncIterator

import pytest

from rlm_broker.cluster import dialing as module
from rlm_broker.cluster.dialing import JoinRefused, NotReached, Target, attend, join
from rlm_broker.cluster.link import Link, LinkLost, encode
from rlm_broker.cluster.messages import JOIN_BYTES, Cancel, FromBroker, Quit, Refused, Welcome
from rlm_broker.cluster.tls import ServerTls, WrongBroker, made_tls
from rlm_broker.cluster.tokens import Tokens
from sandbox_worker.wire.frames import PREFIX
from tests.support.links import admitting, asking
from tests.support.waiting import LONGER_AND_LONGER, WAIT_S, until


class Impostor(asyncio.Protocol):
    """A server that is no broker: it says one thing, and keeps what it hears."""

    def __init__(self, says: bytes, heard: list[bytes], *, closes: bool = False) -> None:
        self._says = says
        self._closes = closes
        self._heard = heard

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport
        transport.write(self._says)

    def data_received(self, data: bytes) -> None:
        self._heard.append(data)
        if self._closes:
            self._transport.close()


@contextlib.asynccontextmanager
async def impostor(
    says: bytes = b"", tls: ServerTls | None = None, *, closes: bool = False
) -> AsyncIterator[tuple[Target, list[bytes]]]:
    heard: list[bytes] = []
    server = await asyncio.get_running_loop().create_server(
        lambda: Impostor(says, heard, closes=closes), "127.0.0.1", 0, ssl=None if tls is None else tls.context
    )
    async with server:
        port = server.sockets[0].getsockname()[1]
        yield Target("127.0.0.1", port, None if tls is None else tls.fingerprint), heard


async def take_all(link: Link[FromBroker], _welcome: Welcome) -> None:
    async for message, _ in link.receive():
        if isinstance(message, Quit):
            break


@pytest.fixture(scope="module")
def tls() -> ServerTls:
    return made_tls()


async def test_man_in_the_middle_gets_no_token(tls: ServerTls) -> None:
    """He ends the TLS connection with a certificate of his own, and would pass all on to the broker."""
    async with impostor(tls=made_tls()) as (target, heard):
        with pytest.raises(WrongBroker, match=r"another certificate .* the token was not sent"):
            await join(Target(target.host, target.port, tls.fingerprint), asking("secret" * 8))
        assert heard == []


async def test_node_ends_at_another_broker_and_does_not_retry(tls: ServerTls) -> None:
    """A server in the broker's place could otherwise wait for a mistake."""
    async with impostor(tls=made_tls()) as (target, heard):
        with pytest.raises(WrongBroker):
            await attend(Target(target.host, target.port, tls.fingerprint), asking("x" * 43), take_all, wait_s=WAIT_S)
        assert heard == []


@pytest.mark.parametrize(
    "says",
    [
        b"HTTP/1.1 400 Bad Request\r\n\r\n",
        PREFIX.pack(JOIN_BYTES + 1),
        PREFIX.pack(4) + b"true",
        PREFIX.pack(2000) + b"[" * 2000,
        PREFIX.pack(2) + b"\xff\xff",
    ],
    ids=["HTTP", "too large", "no message", "nested", "no UTF-8"],
)
async def test_server_that_is_no_broker_is_one_sentence(says: bytes) -> None:
    async with impostor(says) as (target, _):
        with pytest.raises(NotReached, match=rf"^the broker at {target} was not reached: [^\n]+$"):
            await join(target, asking("x" * 43))


async def test_refusal_shows_no_control_characters() -> None:
    """Its text comes from a server that has shown no certificate."""
    async with impostor(encode(Refused("\x1b[2Jno\n" + "x" * 1_000))) as (target, _):
        with pytest.raises(JoinRefused) as refused:
            await join(target, asking("x" * 43))
    assert r"\x1b[2Jno\n" in str(refused.value)
    assert len(str(refused.value)) < 600


async def test_broker_that_never_answers_is_left(monkeypatch: pytest.MonkeyPatch) -> None:
    async with impostor() as (target, heard):
        for limit_s in (0.2, *LONGER_AND_LONGER):  # a busy machine may not even have connected within the first
            monkeypatch.setattr(module, "DIAL_S", limit_s)
            with pytest.raises(NotReached, match=rf"no answer within {limit_s:g} s"):
                await join(target, asking("x" * 43))
            if heard:
                break
        assert heard
    monkeypatch.setattr(module, "DIAL_S", 0.2)
    deaf = socket.create_server(("127.0.0.1", 0))  # it accepts no connection, and shows no certificate
    with deaf, pytest.raises(NotReached, match=r"no answer within 0\.2 s"):
        await join(Target("127.0.0.1", deaf.getsockname()[1], "sha256:" + "0" * 64), asking("x" * 43))


async def test_plain_and_tls_are_told_apart(tls: ServerTls) -> None:
    async with admitting(tls) as port:
        with pytest.raises(NotReached, match="if it listens with TLS, give its --fingerprint"):
            await join(Target(port.target.host, port.target.port), asking("x" * 43))
    async with admitting() as port:
        with pytest.raises(NotReached, match="if it listens in plain text, give --plain"):
            await join(Target(port.target.host, port.target.port, tls.fingerprint), asking("x" * 43))


async def test_first_message_may_follow_the_welcome() -> None:
    """The broker begins a run in the same moment in which it admits the node."""
    async with impostor(encode(Welcome("n", "s")) + encode(Cancel(7))[:-3]) as (target, _):
        link, welcome = await join(target, asking("x" * 43))
        assert welcome == Welcome("n", "s")
        link._take_in(encode(Cancel(7))[-3:])
        assert await anext(link.receive()) == (Cancel(7), None)
        link.close()


async def test_pauses_grow_over_short_links(monkeypatch: pytest.MonkeyPatch) -> None:
    """A broker that welcomes a node and then closes is not asked without a pause. A link that lasted begins anew."""
    pauses: list[float] = []

    async def paused(pause_s: float) -> float:
        pauses.append(pause_s)
        if len(pauses) == 3:
            monkeypatch.setattr(module, "SETTLED_S", 0.0)
        return 2 * pause_s

    async def serve(link: Link[FromBroker], _welcome: Welcome) -> None:
        if len(pauses) == 4:
            link.farewell = "done"

    monkeypatch.setattr(module, "_paused", paused)
    async with admitting() as port:
        await attend(port.target, asking(port.tokens.make()), serve, wait_s=WAIT_S)
    first = module.FIRST_PAUSE_S
    assert pauses == [first, 2 * first, 4 * first, first]


async def test_connection_closed_after_the_welcome_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    """The sentence says what the broker did, and names no error of a closed socket."""
    wait = module._Answer.wait

    async def both(answer: module._Answer, gone: asyncio.Event) -> None:
        await wait(answer, gone)
        await gone.wait()

    monkeypatch.setattr(module._Answer, "wait", both)
    async with impostor(encode(Welcome("n", "s")), closes=True) as (target, _):
        with pytest.raises(NotReached, match="closed the connection after its welcome"):
            await join(target, asking("x" * 43))


async def test_lost_node_joins_again_under_its_name() -> None:
    """The node shows its secret, since its token was good for one use. The broker's farewell ends it."""
    told: list[str] = []
    async with admitting() as port:
        token = port.tokens.make(uses=1)
        attending = asyncio.create_task(attend(port.target, asking(token), take_all, wait_s=WAIT_S, tell=told.append))
        await until(lambda: len(told) == 1)  # the node has its welcome; a link that ends before was none
        port.joined[0][0].close()
        await until(lambda: len(port.joined) == 2)
        port.joined[1][0].post(Quit("all is done"))
        async with asyncio.timeout(WAIT_S):
            await attending
    assert [link.name for link, _ in port.joined] == ["node", "node"]
    assert told == [
        f"joined {port.target} as node",
        f"the broker at {port.target} was lost: the other side has closed the connection; all runs of this node are ended",
        f"joined {port.target} as node",
        "the cluster has ended: all is done",
    ]


async def test_new_broker_gets_the_token_again() -> None:
    """The new broker does not know the secret of the broker before it."""
    told: list[str] = []
    tokens = Tokens()
    token = tokens.make()
    async with admitting(tokens=tokens) as port:
        attending = asyncio.create_task(attend(port.target, asking(token), take_all, wait_s=WAIT_S, tell=told.append))
        await until(lambda: told)
        tokens.forget("node")
        port.joined[0][0].close()
        await until(lambda: len(told) == 3)
        assert port.joined[1][0].name == "node-2"
        tokens._passes.clear()
        port.joined[1][0].close()
        with pytest.raises(JoinRefused, match="the token is not valid"):
            await attending


async def test_broker_is_looked_for_as_long_as_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    """An agent may start before its orchestrator."""
    monkeypatch.setattr(module, "LONGEST_PAUSE_S", 0.2)
    told: list[str] = []
    async with admitting() as port:
        pass
    with pytest.raises(NotReached, match="Connection refused"):
        await attend(port.target, asking("x" * 43), take_all, wait_s=0, tell=told.append)
    assert told == []
    attending = asyncio.create_task(attend(port.target, asking("x" * 43), take_all, wait_s=WAIT_S, tell=told.append))
    await until(lambda: told)
    assert told == [f"the broker at {port.target} was not reached: Connection refused; trying again for {WAIT_S} s"]
    welcome = encode(Welcome("n", "s")) + encode(Quit("end"))
    server = await asyncio.get_running_loop().create_server(
        lambda: Impostor(welcome, []), "127.0.0.1", port.target.port
    )
    async with server, asyncio.timeout(WAIT_S):
        await attending


async def test_loss_ends_a_node_that_asked_for_it() -> None:
    joined = asyncio.Event()
    async with admitting() as port:
        attending = asyncio.create_task(
            attend(
                port.target, asking(port.tokens.make()), take_all, wait_s=WAIT_S, once=True, tell=lambda _: joined.set()
            )
        )
        await joined.wait()
        port.joined[0][0].close()
        with pytest.raises(LinkLost, match=r"was lost: the other side has closed the connection$"):
            await attending


@pytest.mark.parametrize("moment", ["joining", "serving"])
async def test_cancelling_leaves_no_connection(moment: str) -> None:
    started = asyncio.Event()

    async def serve(link: Link[FromBroker], _welcome: Welcome) -> None:
        started.set()
        await link.lost()

    async with admitting() as port, impostor() as (silent, heard):
        target = silent if moment == "joining" else port.target
        attending = asyncio.create_task(attend(target, asking(port.tokens.make()), serve, wait_s=0))
        await until(lambda: heard if moment == "joining" else started.is_set())
        tasks = asyncio.all_tasks() - {attending}
        attending.cancel()
        with pytest.raises(asyncio.CancelledError):
            await attending
        if moment == "serving":
            assert await port.joined[0][0].lost() == "the other side has closed the connection"
        await until(lambda: not (asyncio.all_tasks() - tasks))


def test_target_is_written_as_it_is_given() -> None:
    assert [str(Target("::1", 5)), str(Target("host", 5))] == ["[::1]:5", "host:5"]
