"""`Strangers`: bounds for connections that have shown no token."""

import asyncio
import itertools
import json
import resource
import socket
import threading
from collections.abc import Iterator

import pytest

from rlm_broker.broker.transport import acceptor, strangers
from rlm_broker.broker.transport.acceptor import Acceptor, bind
from rlm_broker.broker.transport.one_shot import MAX_BATCH_PROMPTS, MAX_REQUEST_BYTES
from rlm_broker.broker.transport.strangers import BUSY, Strangers, request_weight
from rlm_broker.run.lm_handler import LMHandler
from sandbox_worker.wire.frames import PREFIX
from tests.rlm_broker.broker.transport.test_listener import fresh_connection, hello, listening, port_of
from tests.support.socket_peer import Peer
from tests.support.stand_ins import Echo
from tests.support.waiting import WAIT_S, until


class Named:
    """A stranger that notes when it is dropped."""

    def __init__(self, name: str, dropped: list[str]) -> None:
        self.name = name
        self._dropped = dropped

    def hang_up(self) -> None:
        self._dropped.append(self.name)

    async def end(self) -> None:
        """Return at once: this stranger has no request that is served."""


class Gate:
    """A one-shot server that answers once the test opens it."""

    def __init__(self) -> None:
        self.asked, self.opened = asyncio.Event(), asyncio.Event()

    async def serve(self, _: bytes) -> bytes:
        self.asked.set()
        await self.opened.wait()
        return b"{}"


async def test_longest_silent_is_dropped_when_there_are_too_many(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(strangers, "MOST_SILENT", 3)
    dropped: list[str] = []
    counted, named = Strangers(WAIT_S), [Named(name, dropped) for name in "abcdef"]
    for each in named[:3]:
        counted.awaits(each)
    counted.hears(named[0])
    counted.awaits(named[0])  # silent again, from now on
    counted.awaits(named[3])
    counted.awaits(named[4])
    assert dropped == ["b", "c"]
    counted.close()


async def test_silent_callers_give_way_to_a_token(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(strangers, "MOST_SILENT", 8)
    async with listening() as listener:
        silent = [await Peer.to(port_of(listener)) for _ in range(40)]
        for stranger in silent[:32]:
            assert await stranger.is_hung_up_on()
        async with await Peer.to(port_of(listener)) as peer:
            peer.send(hello(listener.expect(fresh_connection(), WAIT_S)))
            assert b"welcome" in await peer.receive()
        for stranger in silent:
            stranger.writer.transport.abort()


def test_callers_share_their_weight(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(strangers, "MOST_WEIGHT", 100)
    counted, first, second = Strangers(WAIT_S), Named("a", []), Named("b", [])
    assert counted.weigh(first, 1000)
    assert not counted.weigh(second, 1)
    assert counted.weigh(first, 90)
    assert counted.weigh(second, 10)
    assert counted.weigh(first, 0)
    assert counted.weigh(second, 100)


def test_so_many_requests_are_served_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(strangers, "MOST_SERVED", 2)
    counted = Strangers(WAIT_S)
    assert [counted.begins() for _ in range(3)] == [True, True, False]
    counted.ends()
    assert counted.begins()


def test_requests_take_a_quarter_of_the_descriptors(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(resource, "getrlimit", lambda _limit: (8, 8))
    counted = Strangers(WAIT_S)
    assert [counted.begins() for _ in range(3)] == [True, True, False]


@pytest.mark.parametrize("bound", ["MOST_SERVED", "MOST_WEIGHT"])
async def test_busy_handler_is_told_to_surplus_callers(bound: str, monkeypatch: pytest.MonkeyPatch) -> None:
    request = b'{"prompt": "p"}'
    monkeypatch.setattr(strangers, bound, 1 if bound == "MOST_SERVED" else request_weight(request))
    gate = Gate()
    async with (
        listening(one_shot=gate.serve) as listener,
        await Peer.to(port_of(listener)) as first,
        await Peer.to(port_of(listener)) as second,
    ):
        first.send(request)
        await asyncio.wait_for(gate.asked.wait(), WAIT_S)
        second.send(request)
        assert json.loads(await second.receive())["error"] == BUSY
        gate.opened.set()
        assert await first.receive() == b"{}"
        async with await Peer.to(port_of(listener)) as third:
            third.send(request)
            assert await third.receive() == b"{}"


async def test_half_a_request_is_weighed_and_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(strangers, "MOST_WEIGHT", 100_000)

    async def serve(_: bytes) -> bytes:
        return b"{}"

    half = PREFIX.pack(MAX_REQUEST_BYTES) + b" " * 60_000
    async with (
        listening(one_shot=serve) as listener,
        await Peer.to(port_of(listener)) as first,
        await Peer.to(port_of(listener)) as second,
    ):
        first.writer.write(half)
        await until(lambda: listener._strangers._weight)
        second.writer.write(half)
        assert json.loads(await second.receive())["error"] == BUSY


@pytest.mark.parametrize(
    ("request_", "why"),
    [
        (b'{"prompt": [' + b"[]," * 300_000 + b"1]}", "more than 65,536 values"),
        (json.dumps({"prompts": ["p"] * (MAX_BATCH_PROMPTS + 1)}).encode(), "batch too large: 4,097 > 4,096"),
        (json.dumps({"prompt": "p", "model": "m" * 257}).encode(), "'model' has 257 characters, more than 256"),
        (b'{"prompt": "' + b"x" * MAX_REQUEST_BYTES + b'"}', "frame of 8,388,622 bytes, the limit is 8,388,608"),
    ],
    ids=["values", "prompts", "model", "bytes"],
)
async def test_request_beyond_a_bound_is_refused_with_its_name(request_: bytes, why: str) -> None:
    async with LMHandler(Echo("root"), one_shot=True) as handler, await Peer.to(handler.port) as peer:
        peer.send(request_)
        assert why in json.loads(await peer.receive())["error"]


async def test_second_frame_while_serving_is_weighed(monkeypatch: pytest.MonkeyPatch) -> None:
    request = b'{"prompt": "p"}'
    gate = Gate()
    async with (
        listening(one_shot=gate.serve) as listener,
        await Peer.to(port_of(listener)) as first,
        await Peer.to(port_of(listener)) as second,
    ):
        first.send(request)
        await asyncio.wait_for(gate.asked.wait(), WAIT_S)
        monkeypatch.setattr(strangers, "MOST_WEIGHT", 2 * request_weight(request) + 10_000)
        second.send(request)
        second.writer.write(PREFIX.pack(MAX_REQUEST_BYTES) + b" " * 60_000)
        assert json.loads(await second.receive())["error"] == BUSY
        gate.opened.set()
        assert await first.receive() == b"{}"


class Listening(socket.socket):
    """A listening socket whose `accept` fails as often as the test says."""

    failures: Iterator[OSError] = iter(())

    def accept(self) -> tuple[socket.socket, object]:
        for error in self.failures:
            raise error
        return super().accept()


async def test_exhausted_descriptors_make_room_wait_and_go_on() -> None:
    (bound,) = await bind("127.0.0.1", 0)
    listening = Listening(fileno=bound.detach())
    listening.failures = iter([OSError(24, "Too many open files")] * 2)
    accepted, made_room = asyncio.Event(), list[bool]()

    def take(connected: socket.socket) -> None:
        connected.close()
        accepted.set()

    async def one_is_accepted() -> None:
        opened = Acceptor([listening], take, lambda: made_room.append(True))
        async with await Peer.to(opened.address[1]):
            await asyncio.wait_for(accepted.wait(), WAIT_S)
        opened.close()

    with pytest.warns(RuntimeWarning, match="connections wait to be accepted: Too many open files"):
        await one_is_accepted()
    assert made_room == [True, True]


async def test_connections_are_accepted_a_few_in_each_turn() -> None:
    taken: list[socket.socket] = []
    opened = Acceptor(await bind("127.0.0.1", 0), taken.append, list[None]().clear)
    peers: list[socket.socket] = []
    connecting = threading.Thread(
        target=lambda: peers.extend(socket.create_connection(opened.address) for _ in range(60))
    )
    connecting.start()
    connecting.join(WAIT_S)
    seen = [0]
    while len(taken) < 60:
        await asyncio.sleep(0)
        seen.append(len(taken))
    assert max(later - before for before, later in itertools.pairwise(seen)) <= acceptor.ACCEPTS_IN_A_ROW
    opened.close()
    for each in (*peers, *taken):
        each.close()
