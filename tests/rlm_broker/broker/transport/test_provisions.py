import msgspec
import pytest

from rlm_broker.broker.transport.provisions import Provisions
from rlm_broker.broker.transport.session import Session
from rlm_broker.errors import ConfigurationError, ValueTooLarge
from sandbox_worker import RELEASE
from sandbox_worker.wire.frames import FrameDecoder, encode_frame
from sandbox_worker.wire.messages import (
    MAX_AGAIN_BYTES,
    Environment,
    Execute,
    FromOrchestrator,
    Provide,
    Ready,
    decode_from_orchestrator,
    encode,
)

MAX_FRAME_BYTES = 1000


def said_with_the_next_block(session: Session) -> list[FromOrchestrator]:
    session.feed(encode_frame(encode(Ready(RELEASE)), MAX_FRAME_BYTES))
    session.next_message()
    return list(map(decode_from_orchestrator, FrameDecoder(MAX_FRAME_BYTES).feed(session.execute("1"))))


def test_tools_and_values_are_sent_once() -> None:
    session = Session(MAX_FRAME_BYTES)
    session.provide(Provisions.of({"a": 1, "b": [2]}, MAX_FRAME_BYTES, ["search"]))
    session.provide(Provisions.of({"a": 3}, MAX_FRAME_BYTES, ["read"]))
    block = Execute(block=1, code="1", tools=["read"])
    assert said_with_the_next_block(session) == [
        Provide("a", msgspec.Raw(b"3")),
        Provide("b", msgspec.Raw(b"[2]")),
        block,
    ]
    assert not session._unsent.tools()
    assert not session._unsent.frames()


def test_provisions_of_a_holder_change_no_other() -> None:
    own = Provisions.of({"a": 1}, MAX_FRAME_BYTES, ["search"])
    one, other = Session(MAX_FRAME_BYTES), Session(MAX_FRAME_BYTES)
    one.provide(own)
    other.provide(own)
    own.add(Provisions.of({"late": 2}, MAX_FRAME_BYTES, ["late"]))
    one.provide(Provisions.of({"mine": 3}, MAX_FRAME_BYTES))
    given = Execute(block=1, code="1", tools=["search"])
    assert said_with_the_next_block(one) == [Provide("a", msgspec.Raw(b"1")), Provide("mine", msgspec.Raw(b"3")), given]
    assert said_with_the_next_block(other) == [Provide("a", msgspec.Raw(b"1")), given]
    assert (len(own.frames()), own.tools()) == (2, ["late"])
    (own.tools() or []).append("not added")
    assert own.tools() == ["late"]
    own.add(Provisions.of({}, MAX_FRAME_BYTES))
    assert own.tools() == ["late"]


def test_long_text_given_again_is_named() -> None:
    most = 1 << 20
    text = "x" * (MAX_AGAIN_BYTES + 1)
    whole, session = Provisions.of({"a": text, "b": [text], "c": "x"}, most), Session(most)
    session.provide(whole)

    def given(**values: object) -> Provisions:
        more = Provisions.of(values, most, earlier=whole)
        whole.add(more)
        return more

    def said(*more: Provisions) -> list[FromOrchestrator]:
        session = Session(most)
        for each in more:
            session.provide(each)
        return list(map(decode_from_orchestrator, FrameDecoder(most).feed(b"".join(session._unsent.frames()))))

    again = given(a="".join(text), b=[text], c="x")
    assert {each.name: each.value is msgspec.UNSET for each in said(again) if isinstance(each, Provide)} == {
        "a": True,
        "b": False,
        "c": False,
    }
    assert said(whole, again) == said(whole)  # what is not sent yet is not named
    other = given(a=text + "y")
    assert len(said(other)) == 1
    assert said(other, given(a=text + "y")) == said(other)
    assert said(given(a=text)) == said(Provisions.of({"a": text}, most))


def test_a_value_may_be_given_once() -> None:
    given = Session(MAX_FRAME_BYTES)
    given.provide(Provisions.of({"a": 1}, MAX_FRAME_BYTES, are_restored=False))
    assert said_with_the_next_block(given)[0] == Provide("a", msgspec.Raw(b"1"), is_restored=False)


def test_a_value_that_no_message_can_hold_is_refused() -> None:
    with pytest.raises(ValueTooLarge, match="the value a is too large for a message to a REPL: frame of 1,040"):
        Provisions.of({"a": "x" * MAX_FRAME_BYTES}, MAX_FRAME_BYTES)
    with pytest.raises(ConfigurationError, match=r"the value a\['b'\] is an object, which does not cross"):
        Provisions.of({"a": {"b": object()}}, MAX_FRAME_BYTES)


def test_environment_goes_out_before_the_values() -> None:
    session, environment = Session(MAX_FRAME_BYTES), Environment({"HOME": "/here"}, seed=7)
    session.provide(Provisions.of({"a": 1}, MAX_FRAME_BYTES, environment=environment))
    provided = Provide("a", msgspec.Raw(b"1"))
    assert said_with_the_next_block(session) == [environment, provided, Execute(block=1, code="1")]


def test_environment_larger_than_a_frame_is_refused() -> None:
    with pytest.raises(ValueTooLarge):
        Provisions.of({}, MAX_FRAME_BYTES, environment=Environment({"LONG": "x" * MAX_FRAME_BYTES}))
