"""The REPL's end of the connection, with the test as its peer on a socketpair."""

import socket
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest

from sandbox_worker.repl.channel import CannotAsk, Channel, ConnectionClosed
from sandbox_worker.repl.interrupts import Interrupts
from sandbox_worker.repl.memory_reserve import Reserve
from sandbox_worker.wire.errors import FrameTooLarge
from sandbox_worker.wire.frames import FrameDecoder, encode_frame
from sandbox_worker.wire.messages import (
    MAX_QUERY_BYTES,
    MAX_RESULT_BYTES,
    Execute,
    FromOrchestrator,
    FromWorker,
    Output,
    Query,
    Read,
    Reply,
    Result,
    Slot,
    Values,
    decode_from_worker,
    encode,
)
from tests.support.forked_child import in_child
from tests.support.waiting import WAIT_S

MAX_FRAME_BYTES = 1 << 16


class Peer:
    """A channel at its first block, and the orchestrator's end of its socket."""

    def __init__(self, theirs: socket.socket, ours: socket.socket) -> None:
        self.channel = Channel(theirs, MAX_FRAME_BYTES, Interrupts(), Reserve())
        self.end = ours
        ours.settimeout(WAIT_S)
        self._frames = FrameDecoder(MAX_FRAME_BYTES)
        self._heard: list[FromWorker] = []
        self.say(Execute(block=1, code="code"))
        assert self.channel.next_block() == (Execute(block=1, code="code"), [])

    def say(self, message: FromOrchestrator) -> None:
        self.end.sendall(encode_frame(encode(message), MAX_FRAME_BYTES))

    def hear(self) -> FromWorker:
        while not self._heard:
            self._heard += map(decode_from_worker, self._frames.feed(self.end.recv(65536)))
        return self._heard.pop(0)

    def ask(self, prompt: str = "p") -> str:
        return self.channel.ask(Query(id="", want="llm", prompts=[prompt])).slots[0].text


@pytest.fixture
def peer() -> Iterator[Peer]:
    theirs, ours = socket.socketpair()
    with theirs, ours:
        yield Peer(theirs, ours)


def test_flush_sends_output_of_a_young_block_that_waits(peer: Peer, monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernel holds back what is sent in a block's first millisecond: a flush is a further message behind it."""
    printed, empty = (Output(block=1, stream="stdout", text=text) for text in ("text", ""))
    for young_s, sent in (60, [printed, empty]), (0, [printed]):
        monkeypatch.setattr("sandbox_worker.repl.channel.YOUNG_S", young_s)
        peer.channel.send_output(peer.channel.encode(printed))
        peer.channel.push(empty)
        peer.channel.push(empty)
        peer.channel.send(peer.channel.encode(Result(block=1, status="ok")))
        heard = [peer.hear() for _ in range(len(sent) + 1)]
        assert heard[:-1] == sent
        assert isinstance(heard[-1], Result)


def test_query_is_numbered_and_waits_for_its_reply(peer: Peer) -> None:
    peer.say(Reply(id="0:9", slots=[Slot(text="late")]))
    peer.say(Reply(id="1:1", slots=[Slot(text="mine")]))
    assert peer.ask() == "mine"
    assert peer.hear() == Query(id="1:1", want="llm", prompts=["p"])


def test_threads_get_their_own_replies(peer: Peer) -> None:
    """Many threads each get their own reply, in any order of arrival."""
    prompts = [f"prompt {number}" for number in range(20)]
    with ThreadPoolExecutor(len(prompts)) as threads:
        got = threads.map(peer.ask, prompts)
        for query in reversed([peer.hear() for _ in prompts]):
            assert isinstance(query, Query)
            peer.say(Reply(id=query.id, slots=[Slot(text=query.texts[0].upper())]))
        assert list(got) == [prompt.upper() for prompt in prompts]


def test_full_socket_is_read_while_a_frame_waits_for_room(peer: Peer) -> None:
    """The orchestrator sends answers of children, and takes no message while these are unread."""
    text, count = "x" * 60_000, 40
    id = peer.channel.start(Query(id="", want="rlm", prompts=["p"], background=True))
    assert isinstance(peer.hear(), Query)
    with ThreadPoolExecutor(1) as threads:
        frame = peer.channel.encode(Output(block=1, stream="stdout", text=text))
        sent = [threads.submit(peer.channel.send, frame) for _ in range(count)]
        try:
            for _ in range(count):
                peer.say(Reply(id=id, slots=[Slot(text=text)]))
            assert [peer.hear() for _ in range(count)] == [Output(block=1, stream="stdout", text=text)] * count
            assert [each.result(WAIT_S) for each in sent] == [None] * count
        finally:
            peer.end.shutdown(socket.SHUT_RDWR)
    assert peer.channel.reply(id) == Reply(id=id, slots=[Slot(text=text)])


def test_each_request_for_variables_is_answered_before_the_wait_ends(peer: Peer) -> None:
    peer.channel.read_variables = lambda read: peer.channel.encode(Values(read.block, read.number, value_problem="x"))
    for number in (1, 2):
        peer.say(Read(block=1, number=number, names=[]))
    peer.say(Reply(id="1:1", slots=[Slot(text="late")]))
    assert peer.ask() == "late"
    assert isinstance(peer.hear(), Query)
    assert [peer.hear() for _ in range(2)] == [Values(block=1, number=n, value_problem="x") for n in (1, 2)]


def test_thread_of_ended_block_cannot_ask(peer: Peer) -> None:
    peer.channel.send_result(peer.channel.encode(Result(block=1, status="ok")))
    with pytest.raises(CannotAsk, match="the block that started this thread has ended"):
        peer.ask()


def test_forked_process_cannot_ask_for_its_parent(peer: Peer) -> None:
    def ask() -> None:
        with pytest.raises(CannotAsk):
            peer.ask()

    in_child(ask)


def test_query_too_large_is_not_sent(peer: Peer) -> None:
    with pytest.raises(FrameTooLarge):
        peer.ask("x" * MAX_FRAME_BYTES)
    peer.say(Reply(id="1:2", slots=[Slot(text="ok")]))
    assert peer.ask() == "ok"
    assert peer.hear() == Query(id="1:2", want="llm", prompts=["p"])


def test_hang_up_ends_all_waits(peer: Peer) -> None:
    with ThreadPoolExecutor(3) as threads:
        asked = [threads.submit(peer.ask) for _ in range(3)]
        for _ in asked:
            peer.hear()
        peer.end.shutdown(socket.SHUT_RDWR)
        assert [type(each.exception(WAIT_S)) for each in asked] == [ConnectionClosed] * 3
    assert not issubclass(ConnectionClosed, Exception)  # no `except Exception` of model code stops it


def test_each_kind_of_message_has_its_own_limit() -> None:
    """A result and a query past their limits are refused, and a result past that of queries is not."""
    theirs, ours = socket.socketpair()
    with theirs, ours:
        channel, text = Channel(theirs, 64 << 20, Interrupts(), Reserve()), "x" * MAX_RESULT_BYTES
        with pytest.raises(FrameTooLarge):
            channel.encode(Result(1, "ok", final_answer=text))
        channel.encode(Result(1, "ok", final_answer=text[:-1000]))
        with pytest.raises(FrameTooLarge):
            channel.encode(Query("1:1", "llm", [text[:MAX_QUERY_BYTES]]))
        channel.encode(Query("1:1", "llm", [text[: MAX_QUERY_BYTES - 1000]]))
