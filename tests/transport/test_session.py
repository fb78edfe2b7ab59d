"""Which message may come when: all pairs of state and message."""

import itertools

import pytest

from rlm_broker.errors import ProtocolViolation
from rlm_broker.transport.session import Session, State
from sandbox_worker.wire.frames import encode_frame
from sandbox_worker.wire.messages import Message, Output, Query, Ready, Reply, Result, Slot, encode

SAMPLES: dict[type[Message], Message] = {
    Ready: Ready(),
    Query: Query(id="1:1", want="llm", prompts=["?"]),
    Output: Output(block=1, stream="stdout", text="x"),
    Result: Result(block=1, status="ok"),
}

# Written out, not read from the table under test: a wrong table must fail here.
LEGAL = {
    (State.STARTING, Ready): State.IDLE,
    (State.RUNNING, Query): State.RUNNING,
    (State.RUNNING, Output): State.RUNNING,
    (State.RUNNING, Result): State.IDLE,
}


def frame(message: Message) -> bytes:
    return encode_frame(encode(message), 1000)


def running() -> Session:
    session = Session(max_frame_bytes=1000)
    session.receive(frame(Ready()))
    session.execute("1")
    return session


@pytest.mark.parametrize(("state", "kind"), list(itertools.product(State, SAMPLES)))
def test_a_worker_may_say_just_what_its_state_allows(state: State, kind: type[Message]) -> None:
    session = Session(max_frame_bytes=1000)
    session.state, session.block = state, 1
    if (state, kind) in LEGAL:
        assert session.receive(frame(SAMPLES[kind])) == [SAMPLES[kind]]
        assert session.state is LEGAL[state, kind]
    else:
        with pytest.raises(ProtocolViolation, match=f"{kind.__name__} while {state.name}"):
            session.receive(frame(SAMPLES[kind]))
        assert session.state is State.CLOSED


@pytest.mark.parametrize(
    "forged",
    [
        Query(id="2:1", want="llm", prompts=["?"]),
        Query(id="1:" + "1" * 100, want="llm", prompts=["?"]),
        Result(block=2, status="ok"),
        Output(block=0, stream="stdout", text=""),
    ],
)
def test_a_message_that_names_another_block_is_a_violation(forged: Message) -> None:
    with pytest.raises(ProtocolViolation, match="while block 1 runs"):
        running().receive(frame(forged))


def test_an_open_query_id_cannot_be_used_again_until_it_is_answered() -> None:
    session, query = running(), frame(SAMPLES[Query])
    session.receive(query)
    session.reply(Reply(id="1:1", slots=[Slot("x")]))
    session.receive(query)
    with pytest.raises(ProtocolViolation, match="open already"):
        session.receive(query)


def test_a_reply_is_given_once_and_may_come_after_its_block() -> None:
    session = running()
    session.receive(frame(SAMPLES[Query]))
    session.receive(frame(SAMPLES[Result]))
    session.reply(Reply(id="1:1", slots=[Slot("x")]))
    with pytest.raises(ProtocolViolation, match="not open"):
        session.reply(Reply(id="1:1", slots=[Slot("x")]))


def test_a_session_that_was_violated_accepts_nothing_more() -> None:
    session = Session(max_frame_bytes=1000)
    with pytest.raises(ProtocolViolation):
        session.receive(frame(SAMPLES[Result]))
    with pytest.raises(ProtocolViolation, match="Ready while CLOSED"):
        session.receive(frame(Ready()))
