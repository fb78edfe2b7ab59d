"""The REPL's end of the connection, with the test as its peer on a socketpair."""

import os
import socket
import threading
from collections.abc import Iterator

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
    Query,
    Reply,
    Result,
    Slot,
    decode_from_worker,
    encode,
)

MAX_FRAME_BYTES = 1 << 16
WAIT_S = 30


class Orchestrator:
    def __init__(self, end: socket.socket) -> None:
        self.end = end
        end.settimeout(WAIT_S)
        self._frames = FrameDecoder(MAX_FRAME_BYTES)
        self._heard: list[FromWorker] = []

    def say(self, message: FromOrchestrator) -> None:
        self.end.sendall(encode_frame(encode(message), MAX_FRAME_BYTES))

    def hear(self) -> FromWorker:
        while not self._heard:
            self._heard += map(decode_from_worker, self._frames.feed(self.end.recv(65536)))
        return self._heard.pop(0)


@pytest.fixture
def pair() -> Iterator[tuple[Channel, Orchestrator]]:
    theirs, ours = socket.socketpair()
    with theirs, ours:
        yield Channel(theirs, MAX_FRAME_BYTES, Interrupts(), Reserve()), Orchestrator(ours)


def begin(pair: tuple[Channel, Orchestrator], block: int = 1) -> None:
    pair[1].say(Execute(block=block, code="code"))
    assert pair[0].next_block() == (Execute(block=block, code="code"), [])


def question(prompt: str = "p") -> Query:
    return Query(id="", want="llm", prompts=[prompt])


def test_query_is_numbered_and_waits_for_reply(pair: tuple[Channel, Orchestrator]) -> None:
    begin(pair, block=3)
    pair[1].say(Reply(id="3:1", slots=[Slot(text="answer")]))
    assert pair[0].ask(question()).slots == [Slot(text="answer")]
    assert pair[1].hear() == Query(id="3:1", want="llm", prompts=["p"])


def test_threads_get_their_own_replies(pair: tuple[Channel, Orchestrator]) -> None:
    """Many threads each get their own reply, in any order of arrival."""
    begin(pair)
    got: dict[str, str] = {}

    def ask(prompt: str) -> None:
        got[prompt] = pair[0].ask(question(prompt)).slots[0].text

    prompts = [f"prompt {number}" for number in range(20)]
    threads = [threading.Thread(target=ask, args=(prompt,)) for prompt in prompts]
    for thread in threads:
        thread.start()
    queries = [pair[1].hear() for _ in prompts]
    for query in reversed(queries):
        assert isinstance(query, Query)
        pair[1].say(Reply(id=query.id, slots=[Slot(text=query.texts[0].upper())]))
    for thread in threads:
        thread.join(WAIT_S)
    assert got == {prompt: prompt.upper() for prompt in prompts}


def test_late_reply_is_dropped(pair: tuple[Channel, Orchestrator]) -> None:
    begin(pair)
    pair[1].say(Reply(id="0:9", slots=[Slot(text="late")]))
    pair[1].say(Reply(id="1:1", slots=[Slot(text="mine")]))
    assert pair[0].ask(question()).slots[0].text == "mine"


def test_thread_of_ended_block_cannot_ask(pair: tuple[Channel, Orchestrator]) -> None:
    begin(pair)
    pair[0].send_result(pair[0].encode(Result(block=1, status="ok")))
    with pytest.raises(CannotAsk, match="the block that started this thread has ended"):
        pair[0].ask(question())


def test_forked_process_cannot_ask_for_its_parent(pair: tuple[Channel, Orchestrator]) -> None:
    begin(pair)
    pid = os.fork()
    if pid == 0:
        code = 1
        try:
            pair[0].ask(question())
        except CannotAsk:
            code = 0
        finally:
            os._exit(code)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0


def test_query_too_large_is_not_sent(pair: tuple[Channel, Orchestrator]) -> None:
    begin(pair)
    with pytest.raises(FrameTooLarge):
        pair[0].ask(question("x" * MAX_FRAME_BYTES))
    pair[1].say(Reply(id="1:2", slots=[Slot(text="ok")]))
    assert pair[0].ask(question()).slots[0].text == "ok"
    assert pair[1].hear() == Query(id="1:2", want="llm", prompts=["p"])


def test_hang_up_ends_all_waits(pair: tuple[Channel, Orchestrator]) -> None:
    begin(pair)
    ended: list[str] = []

    def ask() -> None:
        try:
            pair[0].ask(question())
        except ConnectionClosed:
            ended.append("closed")

    threads = [threading.Thread(target=ask) for _ in range(3)]
    for thread in threads:
        thread.start()
    for _ in threads:
        pair[1].hear()
    pair[1].end.shutdown(socket.SHUT_RDWR)
    for thread in threads:
        thread.join(WAIT_S)
    assert ended == ["closed"] * 3


def test_connection_closed_is_no_exception_subclass() -> None:
    assert not issubclass(ConnectionClosed, Exception)


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
