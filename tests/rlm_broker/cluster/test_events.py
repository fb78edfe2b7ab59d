"""Events of runs on nodes, as the receivers here get them."""

import msgspec
import pytest

from rlm_broker.cluster import events as module
from rlm_broker.cluster.events import RunEvents
from rlm_broker.errors import ModelFailed, ProtocolViolation
from rlm_broker.events.event import (
    BlockEnded,
    BlockPrinted,
    BlockStarted,
    CallEnded,
    CallStarted,
    CallText,
    Event,
    EventsMissed,
    RunEnded,
    RunStarted,
    ToolEnded,
    TreeEvents,
)
from rlm_broker.events.trace import plain
from rlm_broker.results import Block, Completion
from rlm_broker.usage import Usage, UsageSummary

STARTED = RunStarted("1", 0, "What?", "model", {"version": "1"}, time=100.0)
ENDED = RunEnded("1", 0, "yes", None, 1, 0.5, UsageSummary({"a lie": Usage(0)}), time=103.0)


def raw(event: Event) -> msgspec.Raw:
    return msgspec.Raw(msgspec.json.encode(plain(event)))


def of_a_run() -> tuple[RunEvents, list[Event]]:
    told: list[Event] = []
    return RunEvents(TreeEvents("tree", [told.append])), told


def printed(text: str, stream: str = "stdout") -> Event:
    return msgspec.convert({"run": "1", "depth": 0, "block": 1, "stream": stream, "text": text}, BlockPrinted)


def test_an_event_arrives_as_it_was() -> None:
    """Each kind is decoded to its class, and has the id, the number and the clock of the orchestrator's tree."""
    events, told = of_a_run()
    block = Block("print(1)", "ok", "1\n")
    sent = [
        STARTED,
        BlockStarted("1", 0, 1, 1, "print(1)", time=101.0),
        BlockEnded("1", 0, 1, block, ({"text/html": 12},), time=101.5),
        CallEnded("1.2", 1, 1, "model", Usage(1, 2, 3, 0.5), 0.1, "text", time=102.0),
        ToolEnded("1", 0, 1, "note", 0.1, "[]", time=102.5),
        EventsMissed("1", 0, 3, time=102.6),
    ]
    events.take([raw(event) for event in sent])
    assert [event.n for event in told] == [1, 2, 3, 4, 5, 6]
    assert {event.tree for event in told} == {"tree"}
    assert told[1].time - told[0].time == pytest.approx(0, abs=0.01)  # no event is later than now
    assert [msgspec.structs.replace(event, tree="", n=0, time=0.0) for event in told] == [
        msgspec.structs.replace(event, time=0.0) for event in sent
    ]


def test_a_further_attempt_repeats_no_event() -> None:
    """Events that were told are left out, and new ones are told with the next numbers."""
    events, told = of_a_run()
    first = [STARTED, CallStarted("1", 0, 1, None, "hello"), CallStarted("1.1", 1, 2, None, "below")]
    events.take([raw(event) for event in first])
    events.begin()
    events.take([raw(event) for event in [*first, CallEnded("1", 0, 1, "model", Usage(1), 0.1, "text")]])
    assert [type(event) for event in told] == [RunStarted, CallStarted, CallStarted, CallEnded]
    assert [event.n for event in told] == [1, 2, 3, 4]


def test_a_text_goes_on_where_it_ended() -> None:
    """A further attempt prints and streams in other pieces: each character is told once."""
    events, told = of_a_run()
    pieces = [printed("one "), printed("t"), printed("err", "stderr"), CallText("1", 0, 1, "abc")]
    events.take([raw(each) for each in pieces])
    events.begin()
    pieces = [printed("one two "), printed("three"), printed("err", "stderr"), CallText("1", 0, 1, "ab")]
    events.take([raw(each) for each in [*pieces, CallText("1", 0, 1, "cd")]])
    out = [event.text for event in told if isinstance(event, BlockPrinted) and event.stream == "stdout"]
    assert "".join(out) == "one two three"
    assert "".join(event.text for event in told if isinstance(event, CallText)) == "abcd"


def test_pieces_of_a_retried_call_begin_again() -> None:
    """Within one attempt nothing is left out: a call that is retried sends its text anew."""
    events, told = of_a_run()
    events.take([raw(CallText("1", 0, 1, text)) for text in ("abc", "abc")])
    assert [event.text for event in told if isinstance(event, CallText)] == ["abc", "abc"]


def test_identities_of_texts_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """A node that names ever new calls fills no memory. Its texts are told, and those that are kept go on."""
    monkeypatch.setattr(module, "MOST_TOLD", 2)
    events, told = of_a_run()
    events.take([raw(CallText("1", 0, call, "abc")) for call in (1, 2, 3, 4, 1)])
    assert len(told) == 5
    assert (len(events._seen), len(events._chars)) == (2, 2)
    events.begin()
    events.take([raw(CallText("1", 0, 1, "abcabcd"))])
    assert isinstance(told[-1], CallText)
    assert told[-1].text == "d"


def test_the_end_waits_until_it_is_certain() -> None:
    """The end of a lost attempt is not told. That of the run has the usage that was counted here."""
    events, told = of_a_run()
    events.take([raw(STARTED), raw(ENDED)])
    assert [type(event) for event in told] == [RunStarted]
    events.begin()
    events.take([raw(STARTED), raw(ENDED)])
    usage = UsageSummary({"model": Usage(2, 1, 1, 0.5)})
    events.end(Completion("yes", "model", 0, 1, 0.5, usage), None, "answered")
    assert isinstance(told[-1], RunEnded)
    assert (told[-1].response, told[-1].usage, told[-1].cost_usd, told[-1].kind) == ("yes", usage, 0.5, "answered")


def test_a_failed_end_says_why() -> None:
    events, told = of_a_run()
    events.take([raw(STARTED)])
    events.end(Completion(None, "model", 0, 1, 0.5, UsageSummary()), ModelFailed("no luck"), "provider")
    assert isinstance(told[-1], RunEnded)
    assert (told[-1].response, told[-1].error, told[-1].kind) == (None, "no luck", "provider")


def test_a_run_that_never_began_has_no_end() -> None:
    events, told = of_a_run()
    events.end(Completion(None, "model", 0, 0, 0.0, UsageSummary()), ModelFailed("no luck"), "provider")
    assert told == []


def test_times_are_in_order_and_not_later_than_now() -> None:
    """The clock of a node may be wrong or lie: distances are kept, and no event lies in the future or goes back."""
    events, told = of_a_run()
    times = (5_000_000_000.0, 4_999_999_999.0, 9e15)
    events.take([raw(CallStarted("1", 0, 1 + number, None, "", time=at)) for number, at in enumerate(times)])
    assert told[0].time <= told[1].time <= told[2].time < 5_000_000_000


@pytest.mark.parametrize(
    "encoded",
    [
        b'{"event": "run_vanished"}',
        b'{"event": 1}',
        b'{"event": "iteration_started", "run": "1", "depth": 0}',
        b'{"event": "iteration_started", "run": "2", "depth": 0, "number": 1}',
        b'{"event": "iteration_started", "run": "1.\\n1", "depth": 0, "number": 1}',
        b'{"event": "iteration_started", "run": "1", "depth": -1, "number": 1}',
        b'{"event": "iteration_started", "run": "1", "depth": 0, "number": 99999999999999999999999}',
        b"[" * 9_000 + b"]" * 9_000,
    ],
)
def test_other_events_are_refused(encoded: bytes) -> None:
    events, told = of_a_run()
    with pytest.raises(ProtocolViolation, match="an event that cannot be read"):
        events.take([msgspec.Raw(encoded)])
    assert told == []


@pytest.mark.parametrize(
    "encoded",
    [
        [raw(STARTED)] * 1_001,
        [msgspec.Raw(b" " * (17 << 20))],
        [msgspec.Raw(b'{"event": "replied", "more": [' + b"0," * 40_000 + b"0]}")],
    ],
    ids=["number", "bytes", "values"],
)
def test_events_of_one_message_are_bounded(encoded: list[msgspec.Raw]) -> None:
    """The loop passes them on in one turn, and serves no other node meanwhile."""
    events, told = of_a_run()
    with pytest.raises(ProtocolViolation, match="more events in one message"):
        events.take(encoded)
    assert told == []


def test_secrets_of_a_node_are_replaced() -> None:
    """Texts of a node are looked through again, since the node may not have done so."""
    events, told = of_a_run()
    key = "sk-" + "proj-abcdefghijklmnopqrstuvwxyz0123456789"
    encoded = msgspec.json.encode(
        {"event": "call_started", "run": "1", "depth": 0, "call": 1, "requested_model": None, "prompt": f"key {key}"}
    )
    events.take([msgspec.Raw(encoded)])
    assert isinstance(told[0], CallStarted)
    assert key not in str(told[0].prompt)
