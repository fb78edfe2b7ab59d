"""`Session`: all pairs of state and message, and the bounds on what a worker claims."""

import itertools
import tomllib

import msgspec
import pytest

import rlm_broker
import rlm_broker.broker.transport.session
from rlm_broker.broker.transport.provisions import Provisions
from rlm_broker.broker.transport.session import (
    ARGUMENT_WEIGHT,
    BYTE_WEIGHT,
    PROMPT_WEIGHT,
    RefusedQuery,
    Session,
    State,
    Wanted,
)
from rlm_broker.errors import ProtocolViolation
from rlm_broker.sandbox.sandbox import Sandbox
from sandbox_worker import RELEASE
from sandbox_worker.wire.frames import PREFIX, FrameDecoder, encode_frame
from sandbox_worker.wire.messages import (
    MAX_DISPLAYS,
    MAX_DISPLAYS_BYTES,
    MAX_QUERY_BYTES,
    DisplayMessage,
    Execute,
    Message,
    Output,
    Provide,
    Query,
    Read,
    Ready,
    Reply,
    Result,
    Slot,
    Submit,
    Values,
    decode_from_orchestrator,
    encode,
)
from sandbox_worker.wire.prompts import ChildContext
from tests.support.places import PROJECT

SAMPLES: dict[type[Message], Message] = {
    Ready: Ready(RELEASE),
    Query: Query(id="1:1", want="llm", prompts=["?"]),
    Submit: Submit(id="1:2", fields=msgspec.Raw(b"{}")),
    Output: Output(block=1, stream="stdout", text="x"),
    DisplayMessage: DisplayMessage(block=1, pictures={"image/png": b"x"}),
    Result: Result(block=1, status="ok"),
}

# Written out and not read from the table under test: a wrong table must fail here.
LEGAL = {
    (State.STARTING, Ready): State.IDLE,
    (State.RUNNING, Query): State.RUNNING,
    (State.RUNNING, Submit): State.RUNNING,
    (State.RUNNING, Output): State.RUNNING,
    (State.RUNNING, DisplayMessage): State.RUNNING,
    (State.RUNNING, Result): State.IDLE,
}


def frame(message: Message) -> bytes:
    return encode_frame(encode(message), 1000)


def receive(session: Session, data: bytes) -> list[Message | RefusedQuery]:
    session.feed(data)
    return list(iter(session.next_message, None))


def running(max_frame_bytes: int = 1000) -> Session:
    session = Session(max_frame_bytes)
    receive(session, frame(Ready(RELEASE)))
    session.execute("1")
    return session


def test_a_worker_may_say_just_what_its_state_allows() -> None:
    for state, kind in itertools.product(State, SAMPLES):
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


def test_a_message_that_names_another_block_is_a_violation() -> None:
    forged: tuple[Message, ...] = (
        Query(id="2:1", want="llm", prompts=["?"]),
        Query(id="1:" + "1" * 100, want="llm", prompts=["?"]),
        Result(block=2, status="ok"),
        Output(block=0, stream="stdout", text=""),
        DisplayMessage(block=2, texts={"text/html": "x"}),
        Submit(id="2:1", fields=msgspec.Raw(b"{}")),
        Values(block=2, number=1),
    )
    for each in forged:
        with pytest.raises(ProtocolViolation, match="while block 1 runs"):
            receive(running(), frame(each))


def test_open_query_id_is_not_reusable() -> None:
    session, query = running(), frame(SAMPLES[Query])
    receive(session, query)
    session.reply(Reply(id="1:1", slots=[Slot("x")]))
    receive(session, query)
    with pytest.raises(ProtocolViolation, match="open already"):
        receive(session, query)


def test_variables_answer_one_request_of_their_block() -> None:
    session = running()
    receive(session, frame(SAMPLES[Query]))
    number, request = session.read(["n"])
    assert sent(request) == [Read(block=1, number=number, names=["n"])]
    answer = frame(Values(block=1, number=number, value_problem="why"))
    receive(session, answer)
    with pytest.raises(ProtocolViolation, match="variables that answer no request"):
        receive(session, answer)
    session = running()
    receive(session, frame(SAMPLES[Query]))
    number, _ = session.read([])
    receive(session, frame(SAMPLES[Result]))
    session.execute("2")
    with pytest.raises(ProtocolViolation, match="variables that answer no request"):
        receive(session, frame(Values(block=2, number=number, value_problem="why")))


def test_reply_is_given_once_even_after_its_block() -> None:
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
        receive(session, frame(Ready(RELEASE)))


def test_sound_messages_before_a_wrong_frame_are_delivered() -> None:
    session = running()
    sound = frame(SAMPLES[Output])
    session.feed(sound + sound + b"\xff\xff\xff\xff")
    assert [session.next_message(), session.next_message()] == [SAMPLES[Output]] * 2
    with pytest.raises(ProtocolViolation, match="4,294,967,295"):
        session.next_message()


def test_displays_of_a_block_are_bounded() -> None:
    session = running()
    for _ in range(MAX_DISPLAYS):
        receive(session, frame(SAMPLES[DisplayMessage]))
    receive(session, frame(SAMPLES[Result]))
    session.execute("2")
    second = frame(DisplayMessage(block=2, texts={"text/html": "x"}))
    for _ in range(MAX_DISPLAYS):
        receive(session, second)
    with pytest.raises(ProtocolViolation, match=f"{MAX_DISPLAYS + 1} displays of .* bytes in block 2"):
        receive(session, second)


def test_open_query_weight_falls_with_replies() -> None:
    session = running(1 << 23)
    two = encode(Query(id="1:1", want="llm", prompts=["a", "b"]))
    receive(session, encode_frame(two, 1 << 23))
    assert session.open_weight == len(two) * BYTE_WEIGHT + 2 * PROMPT_WEIGHT
    many = encode(Query(id="1:2", want="rlm", prompts=["p"], contexts=[ChildContext(own="context")] * 1_000))
    receive(session, encode_frame(many, 1 << 23))
    assert session.open_queries["1:2"] == len(many) * BYTE_WEIGHT + 1_001 * PROMPT_WEIGHT
    session.reply(Reply(id="1:1", slots=[Slot()] * 2))
    session.reply(Reply(id="1:2", slots=[Slot()]))
    assert session.open_weight == 0


def test_arguments_of_a_tool_weigh_what_pydantic_makes_of_them() -> None:
    session = running()
    plain = Query(id="1:1", want="tool", prompts=['{"args":[],"kwargs":{}}'], tool="f")
    more = Query(id="1:2", want="tool", prompts=['{"args":[1,2],"kwargs":{}}'], tool="f")
    receive(session, frame(plain) + frame(more))
    weights = session.open_queries
    assert weights["1:2"] - weights["1:1"] == ARGUMENT_WEIGHT + 3 * BYTE_WEIGHT


def long_query(id: str, payload_bytes: int) -> bytes:
    begin = b'{"type":"query","id":"%s","want":"llm","prompts":["' % id.encode()
    return PREFIX.pack(payload_bytes) + begin + b"x" * (payload_bytes - len(begin) - 3) + b'"]}'


@pytest.mark.parametrize("step_bytes", [1 << 16, 1 << 30])
def test_query_too_large_is_open_without_being_kept(step_bytes: int) -> None:
    session = running(64 << 20)
    stream = long_query("1:1", MAX_QUERY_BYTES) + long_query("1:2", MAX_QUERY_BYTES + 1) + frame(SAMPLES[Output])
    got = [each for at in range(0, len(stream), step_bytes) for each in receive(session, stream[at : at + step_bytes])]
    largest, refused, after = got
    assert isinstance(largest, Query)
    assert isinstance(refused, RefusedQuery)
    assert "4,194,305 bytes, 4,194,304 at most; pass a large text as a context" in refused.why
    assert after == SAMPLES[Output]
    assert session.open_queries["1:2"] == PROMPT_WEIGHT
    assert sent(session.reply(Reply("1:2", [Slot(error=refused.why)]))) == [Reply("1:2", [Slot(error=refused.why)])]


def test_query_too_large_keeps_to_the_protocol() -> None:
    for id in ("2:1", "1:" + "1" * 60):
        with pytest.raises(ProtocolViolation, match="query id"):
            receive(running(64 << 20), long_query(id, MAX_QUERY_BYTES + 1))
    session = Session(max_frame_bytes=64 << 20)
    receive(session, frame(Ready(RELEASE)))
    with pytest.raises(ProtocolViolation, match="Query while IDLE"):
        receive(session, long_query("1:1", MAX_QUERY_BYTES + 1))


def test_oversized_frame_is_refused_at_its_prefix() -> None:
    session = Session(max_frame_bytes=16 << 20)
    with pytest.raises(ProtocolViolation, match="frame of 33,554,432 bytes, the limit is 16,777,216"):
        session.feed(PREFIX.pack(32 << 20))


@pytest.mark.parametrize("said", [b'{"type":"ready"}', b'{"type":"ready","release":"0.0.9"}'])
def test_worker_of_another_release_is_refused_in_a_sentence(said: bytes) -> None:
    session = Session(max_frame_bytes=1000)
    with pytest.raises(ProtocolViolation, match=rf"the worker runs release '(unknown|0.0.9)' .* '{RELEASE}': restart"):
        receive(session, encode_frame(said, 1000))
    assert session.state is State.CLOSED


def test_process_with_replaced_code_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    with Sandbox(warm=0) as sandbox:
        with sandbox.repl() as repl:
            assert repl.execute("print(1)").status == "ok"
        monkeypatch.setattr(rlm_broker.broker.transport.session, "RELEASE", "0.0.9")
        why = f"the worker runs release '{RELEASE}' of rlm-broker and this process '0.0.9': restart this process"
        with pytest.raises(ProtocolViolation, match=why):
            sandbox.repl().__enter__()


def test_release_is_the_same_everywhere() -> None:
    installed = tomllib.loads((PROJECT / "pyproject.toml").read_text())["project"]["version"]
    assert installed == rlm_broker.__version__ == RELEASE


def sent(data: bytes | bytearray) -> list[Message]:
    """Return the messages that a REPL would read."""
    return [decode_from_orchestrator(payload) for payload in FrameDecoder(1 << 20).feed(bytes(data))]


def test_blocks_are_numbered_and_carry_provisions_once() -> None:
    session = Session(max_frame_bytes=1000)
    session.provide(Provisions.of({"n": 5}, 1000, tools=["search"]))
    receive(session, frame(Ready(RELEASE)))
    wanted = Wanted(value=True, names=("a", "b"), stdin="in", submit=("field",))
    provided, first = sent(session.execute("first", wanted))
    assert isinstance(provided, Provide)
    assert first == Execute(1, "first", ["search"], True, ["a", "b"], "in", ["field"])
    receive(session, frame(Result(block=1, status="ok")))
    assert sent(session.execute("second")) == [Execute(2, "second")]
    assert session.block == 2


def test_reply_is_refused_in_states_without_replies() -> None:
    session = running()
    receive(session, frame(SAMPLES[Query]))
    reply = Reply(id="1:1", slots=[Slot("x")])
    session.state = State.STARTING
    with pytest.raises(ProtocolViolation, match="Reply while STARTING"):
        session.reply(reply)
    again = running()
    receive(again, frame(SAMPLES[Query]))
    assert sent(again.reply(reply)) == [reply]


def test_received_data_ends_with_the_session() -> None:
    session = running()
    session.feed(frame(SAMPLES[Query]) + frame(SAMPLES[Output]))
    session.next_message()
    assert session.open_queries
    session.close()
    assert (session.next_message(), session.open_queries, session.open_weight) == (None, {}, 0)


def test_bytes_that_are_no_message_end_the_session() -> None:
    session = running()
    session.feed(encode_frame(b"{}", 1000))
    with pytest.raises(ProtocolViolation, match="type"):
        session.next_message()
    assert session.state is State.CLOSED


def test_query_id_has_at_most_40_characters() -> None:
    longest, longer = (Query(id="1:" + "1" * chars, want="llm", prompts=["?"]) for chars in (38, 39))
    assert receive(running(), frame(longest)) == [longest]
    with pytest.raises(ProtocolViolation, match="query id"):
        receive(running(), frame(longer))


def test_displays_may_fill_their_bytes_to_the_last() -> None:
    session = running(1 << 23)
    empty = len(encode(DisplayMessage(block=1, texts={"text/html": ""})))
    quarter = DisplayMessage(block=1, texts={"text/html": "x" * (MAX_DISPLAYS_BYTES // 4 - empty)})
    for _ in range(4):
        assert receive(session, encode_frame(encode(quarter), 1 << 23)) == [quarter]
    with pytest.raises(ProtocolViolation, match="5 displays of"):
        receive(session, frame(SAMPLES[DisplayMessage]))
