"""Which message may come when: all pairs of state and message."""

import itertools

import pytest

from rlm_broker.errors import ProtocolViolation
from rlm_broker.transport.session import PROMPT_WEIGHT, Session, State
from sandbox_worker.wire.frames import PREFIX, encode_frame
from sandbox_worker.wire.messages import (
    MAX_DISPLAYS,
    MAX_DISPLAYS_BYTES,
    Display,
    Message,
    Output,
    Query,
    Ready,
    Reply,
    Result,
    Slot,
    encode,
)

SAMPLES: dict[type[Message], Message] = {
    Ready: Ready(),
    Query: Query(id="1:1", want="llm", prompts=["?"]),
    Output: Output(block=1, stream="stdout", text="x"),
    Display: Display(block=1, pictures={"image/png": b"x"}),
    Result: Result(block=1, status="ok"),
}

# Written out, not read from the table under test: a wrong table must fail here.
LEGAL = {
    (State.STARTING, Ready): State.IDLE,
    (State.RUNNING, Query): State.RUNNING,
    (State.RUNNING, Output): State.RUNNING,
    (State.RUNNING, Display): State.RUNNING,
    (State.RUNNING, Result): State.IDLE,
}


def frame(message: Message) -> bytes:
    return encode_frame(encode(message), 1000)


def receive(session: Session, data: bytes) -> list[Message]:
    session.feed(data)
    return list(iter(session.next_message, None))


def running() -> Session:
    session = Session(max_frame_bytes=1000)
    receive(session, frame(Ready()))
    session.execute("1")
    return session


@pytest.mark.parametrize(("state", "kind"), list(itertools.product(State, SAMPLES)))
def test_a_worker_may_say_just_what_its_state_allows(state: State, kind: type[Message]) -> None:
    session = running()
    session.state = state
    if (state, kind) in LEGAL:
        session.feed(frame(SAMPLES[kind]))
        assert session.next_message() == SAMPLES[kind]
        assert session.state is LEGAL[state, kind]
    else:
        with pytest.raises(ProtocolViolation, match=f"{kind.__name__} while {state.name}"):
            receive(session, frame(SAMPLES[kind]))
        assert session.state is State.CLOSED


@pytest.mark.parametrize(
    "forged",
    [
        Query(id="2:1", want="llm", prompts=["?"]),
        Query(id="1:" + "1" * 100, want="llm", prompts=["?"]),
        Result(block=2, status="ok"),
        Output(block=0, stream="stdout", text=""),
        Display(block=2, texts={"text/html": "x"}),
    ],
)
def test_a_message_that_names_another_block_is_a_violation(forged: Message) -> None:
    with pytest.raises(ProtocolViolation, match="while block 1 runs"):
        receive(running(), frame(forged))


def test_an_open_query_id_cannot_be_used_again_until_it_is_answered() -> None:
    session, query = running(), frame(SAMPLES[Query])
    receive(session, query)
    session.reply(Reply(id="1:1", slots=[Slot("x")]))
    receive(session, query)
    with pytest.raises(ProtocolViolation, match="open already"):
        receive(session, query)


def test_a_reply_is_given_once_and_may_come_after_its_block() -> None:
    session = running()
    receive(session, frame(SAMPLES[Query]))
    receive(session, frame(SAMPLES[Result]))
    session.reply(Reply(id="1:1", slots=[Slot("x")]))
    with pytest.raises(ProtocolViolation, match="not open"):
        session.reply(Reply(id="1:1", slots=[Slot("x")]))


def test_a_session_that_was_violated_accepts_nothing_more() -> None:
    session = Session(max_frame_bytes=1000)
    with pytest.raises(ProtocolViolation):
        receive(session, frame(SAMPLES[Result]))
    with pytest.raises(ProtocolViolation, match="Ready while CLOSED"):
        receive(session, frame(Ready()))


def test_sound_messages_before_a_wrong_frame_are_delivered() -> None:
    session = running()
    sound = frame(SAMPLES[Output])
    session.feed(sound + sound + b"\xff\xff\xff\xff")
    assert [session.next_message(), session.next_message()] == [SAMPLES[Output]] * 2
    with pytest.raises(ProtocolViolation, match="4,294,967,295"):
        session.next_message()


def test_displays_of_a_block_are_bounded_in_number_and_bytes() -> None:
    session = running()
    for _ in range(MAX_DISPLAYS):
        receive(session, frame(SAMPLES[Display]))
    receive(session, frame(SAMPLES[Result]))
    session.execute("2")
    second = frame(Display(block=2, texts={"text/html": "x"}))
    for _ in range(MAX_DISPLAYS):
        receive(session, second)
    with pytest.raises(ProtocolViolation, match=f"{MAX_DISPLAYS + 1} displays of .* bytes in block 2"):
        receive(session, second)


def test_displays_of_a_block_are_bounded_in_bytes() -> None:
    session = Session(max_frame_bytes=1 << 23)
    receive(session, frame(Ready()))
    session.execute("1")
    large = encode_frame(encode(Display(block=1, texts={"text/html": "x" * (MAX_DISPLAYS_BYTES // 4 - 100)})), 1 << 23)
    for _ in range(4):
        receive(session, large)
    with pytest.raises(ProtocolViolation, match="5 displays of"):
        receive(session, large)


def test_weight_of_open_queries_counts_prompts_and_falls_with_replies() -> None:
    session = Session(max_frame_bytes=1 << 23)
    receive(session, frame(Ready()))
    session.execute("1")
    small = Query(id="1:1", want="llm", prompts=["?"] * 100)
    large = Query(id="1:2", want="llm", prompts=["x" * (1 << 21)])
    session.feed(encode_frame(encode(small), 1 << 23))
    session.next_message()
    few = session.open_weight
    assert few >= 100 * PROMPT_WEIGHT
    session.feed(encode_frame(encode(large), 1 << 23))
    session.next_message()
    assert 1 << 21 <= session.open_weight - few < 1 << 22
    session.reply(Reply(id="1:1", slots=[Slot()] * 100))
    session.reply(Reply(id="1:2", slots=[Slot()]))
    assert session.open_weight == 0


def test_frame_larger_than_any_message_is_refused_at_its_prefix() -> None:
    session = Session(max_frame_bytes=64 << 20)
    with pytest.raises(ProtocolViolation, match="frame of 33,554,432 bytes, the limit is 16,777,216"):
        session.feed(PREFIX.pack(32 << 20))
