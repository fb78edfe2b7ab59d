"""Messages: each arrives unchanged, and any other payload is one error. (Frames with garbage: `test_frames.py`.)"""

import contextlib
import enum
import json
from typing import Any, get_args

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sandbox_worker import RELEASE
from sandbox_worker.loading.form import ContextForm, ContextPiece
from sandbox_worker.wire import messages
from sandbox_worker.wire.errors import FrameTooLarge, MessageInvalid, QueryTooLarge
from sandbox_worker.wire.frames import Beginning, encode_frame
from sandbox_worker.wire.messages import (
    DisplayMessage,
    Execute,
    FromOrchestrator,
    FromWorker,
    Hello,
    Output,
    Provide,
    Query,
    Ready,
    Reply,
    Result,
    Slot,
    VariableFact,
    Welcome,
    decode_from_orchestrator,
    decode_from_worker,
    decode_hello,
    decode_welcome,
    encode,
    framed,
)
from sandbox_worker.wire.prompts import ChildContext
from tests.support.tables import table

QUERY = Query(id="3:1", want="rlm", prompts=["a", ""], model="m", system="s", max_completion_tokens=1, max_concurrent=2)
FROM_WORKER: list[FromWorker] = [
    Ready(RELEASE),
    QUERY,
    Query(id="3:1", want="llm", prompts=[]),
    messages.Submit(id="3:1", fields=msgspec.Raw(b'{"n":{"$set":[1]}}')),
    messages.Values(block=3, number=1, value=msgspec.Raw(b'[{"a":1},{"b":"why"}]')),
    messages.Values(block=3, number=1, value_problem="why"),
    Output(block=3, stream="stderr", text="\x00\x1b \u2028 \N{GRINNING FACE}"),
    DisplayMessage(block=3, texts={"text/html": "<b>", "image/svg+xml": "\u2028"}, pictures={"image/png": b"\x00\xff"}),
    Result(block=3, status="ok"),
    Result(block=3, status="ok", displays_omitted=9),
    Result(block=3, status="ok", variables=[VariableFact("x", "int"), VariableFact("a", "ndarray", (3, 4))]),
    Result(block=3, status="ok", value=msgspec.Raw(b'{"$set":[1]}'), final_value=msgspec.Raw(b"1")),
    Result(block=3, status="ok", value_problem="why", final_value_problem="why"),
    Result(block=3, status="ok", texts={"text/plain": "1"}, pictures={"image/png": b"\xff"}),
    Result(block=3, status="error", error_type="E", error_text="a\nb", traceback="E: a\nb\n"),
    Result(block=3, status="exited", error="bye", exit_code=-1, final_answer="", descriptor_output=True),
]
FROM_ORCHESTRATOR: list[FromOrchestrator] = [
    Execute(block=3, code="x = 1\n"),
    Execute(block=3, code="", wants_value=True, names=["a"]),
    Execute(block=3, code="", names=[]),
    messages.Read(block=3, number=1, names=["a"]),
    Execute(block=3, code="", tells_variables=True),
    Execute(block=3, code="1", wants_value=True, echo=False),
    messages.Environment(variables={"HOME": "/w"}, seed=7),
    messages.Environment(scaffold=False),
    messages.Attach(
        name="context_1", pieces=[ContextPiece(ContextForm("text", 3)), ContextPiece(ContextForm("json", 3), "a")]
    ),
    messages.Provide(name="x", value=msgspec.Raw(b'{"a":[1,null,"b"]}')),
    messages.Provide(name="x", is_restored=False),
    Reply(id="3:1", slots=[Slot(), Slot(text="t"), Slot(text="partial", error="e")]),
]


DECODERS = (decode_hello, decode_welcome, decode_from_worker, decode_from_orchestrator)
FORMS: list[object] = [{"text/javascript": "x"}, {"image/png": 5}, {"text/html": None}, ["x"], "x", {"": ""}]


@table(
    "decode, messages",
    [
        (decode_hello, [Hello(token="t")]),
        (decode_welcome, [Welcome()]),
        (decode_from_worker, FROM_WORKER),
        (decode_from_orchestrator, FROM_ORCHESTRATOR),
    ],
)
def test_message_comes_out_unchanged_at_its_receiver_alone(decode: Any, messages: list[messages.Message]) -> None:
    for message in messages:
        assert decode(encode(message)) == message
        for other in DECODERS:
            if other is not decode:
                with pytest.raises(MessageInvalid):
                    other(encode(message))


def test_messages_of_both_directions_are_all_tried() -> None:
    assert {type(message) for message in FROM_WORKER} == set(get_args(FromWorker))
    assert {type(message) for message in FROM_ORCHESTRATOR} == set(get_args(FromOrchestrator))
    assert json.loads(encode(QUERY))["type"] == "query"


@table(
    "message, field, values",
    [
        (QUERY, "id", [1, ...]),
        (QUERY, "want", ["root", ...]),
        (QUERY, "prompts", ["one text", ["a", None], None, ...]),
        (QUERY, "model", [7]),
        (QUERY, "max_completion_tokens", [0, 1.5, True]),
        (QUERY, "max_concurrent", [-1]),
        (QUERY, "depth", [0]),
        (QUERY, "budget", [1e9]),
        (QUERY, "type", ["Query", ...]),
        (DisplayMessage(block=1), "texts", [*FORMS, {"image/png": "x"}]),
        (DisplayMessage(block=1), "pictures", [*FORMS, {"text/html": "AA=="}]),
        (Result(block=1, status="ok"), "status", ["killed", "OK", None]),  # the first is the orchestrator's to say
    ],
)
def test_wrong_or_missing_field_is_invalid(message: FromWorker, field: str, values: list[object]) -> None:
    for value in values:
        fields = {**json.loads(encode(message)), field: value}
        if value is ...:
            del fields[field]
        with pytest.raises(MessageInvalid):
            decode_from_worker(json.dumps(fields).encode())


def test_display_is_bounded_and_checked() -> None:
    """A display is bounded, and no other object is taken for a display."""
    fits = DisplayMessage(block=1, texts={"text/html": "x" * (messages.MAX_DISPLAY_BYTES - 100)})
    assert decode_from_worker(encode(fits)) == fits
    for long in (
        encode(DisplayMessage(block=1, texts={"text/html": "x" * messages.MAX_DISPLAY_BYTES})),
        encode(Output(block=1, stream="stdout", text="x" * (messages.FEW_BYTES + 1))),
    ):
        with pytest.raises(MessageInvalid, match="more than one of its kind may have"):
            decode_from_worker(long)


@table("decode", DECODERS)
@given(payload=st.binary(max_size=60) | st.text(max_size=60).map(str.encode))
def test_bytes_raise_only_message_errors(decode: Any, payload: bytes) -> None:
    with contextlib.suppress(MessageInvalid):
        assert isinstance(decode(payload), messages.Message)


@table("decode", DECODERS)
@table("opening", [b"[", b'{"type":', b'{"type":"reply","slots":[{"x":', b'{"type":"hello","x":['])
def test_deep_nesting_is_invalid(decode: Any, opening: bytes) -> None:
    with pytest.raises(MessageInvalid):
        decode(opening * 100_000)


@given(st.text(st.characters(exclude_categories=[])))
def test_text_is_read_with_surrogates_written_out(text: str) -> None:
    expected = text.encode("utf-8", "backslashreplace").decode()
    for message in (Output(block=1, stream="stdout", text=text), Result(block=1, status="error", error=text)):
        arrived = decode_from_worker(encode(message))
        assert expected in (getattr(arrived, "text", None), getattr(arrived, "error", None))


@given(st.text(st.characters(exclude_categories=[])))
def test_text_for_code_arrives_or_is_not_sent(text: str) -> None:
    is_whole = not any("\ud800" <= character <= "\udfff" for character in text)
    for message in (
        Query(id="1:1", want="llm", prompts=["whole", text]),
        Query(id="1:1", want="llm", prompts=["whole"], system=text),
        Provide(name=text, value=msgspec.Raw(b"1")),
        Execute(block=1, code=text),
    ):
        if is_whole:
            decode = decode_from_worker if isinstance(message, Query) else decode_from_orchestrator
            assert decode(encode(message)) == message
        else:
            with pytest.raises(UnicodeEncodeError):
                encode(message)


class Text(str):
    __slots__ = ()

    def __str__(self) -> str:
        return "not this"


class Colour(str, enum.Enum):  # noqa: UP042 - model code writes such classes
    RED = "red"


@table("text, plain", [(Text("a"), "a"), (Text("\ud800"), "\\ud800"), (Colour.RED, "red")])
def test_subclasses_of_text_are_text(text: str, plain: str) -> None:
    arrived = decode_from_worker(encode(Result(block=1, status="ok", final_answer=text)))
    assert arrived == Result(block=1, status="ok", final_answer=plain)


def test_non_text_is_refused_before_sending() -> None:
    with pytest.raises(TypeError, match="a message cannot hold a object"):
        encode(Output(block=1, stream="stdout", text=object()))  # type: ignore[arg-type]


def query_of(payload_bytes: int) -> Query:
    """Return a query of one prompt whose JSON has so many bytes."""
    empty = len(encode(Query(id="1:1", want="llm", prompts=[""])))
    return Query(id="1:1", want="llm", prompts=["x" * (payload_bytes - empty)])


def test_query_may_have_its_bytes_to_the_last() -> None:
    largest = query_of(messages.MAX_QUERY_BYTES)
    assert decode_from_worker(encode(largest)) == largest
    beyond = encode(query_of(messages.MAX_QUERY_BYTES + 1))
    said = "the query is too large: 4,194,305 bytes, 4,194,304 at most; pass a large"
    with pytest.raises(QueryTooLarge, match=said) as refused:
        decode_from_worker(beyond)
    assert refused.value.id == "1:1"


def test_query_too_large_is_not_decoded() -> None:
    """The length and the id decide; what else it has is not looked at."""
    beginning = Beginning(b'{"type":"query","id":"7:2","want":[[[')
    beginning.payload_bytes = messages.MAX_QUERY_BYTES + 1
    with pytest.raises(QueryTooLarge) as refused:
        decode_from_worker(beginning)
    assert refused.value.id == "7:2"


@table(
    "begin",
    [
        b'{"id":"1:1","type":"query"',
        *(b'{"type":' + rest for rest in (b'"query","want"', b'"output"', b'"query","id":"1')),
    ],
)
def test_other_message_too_large_is_invalid(begin: bytes) -> None:
    beginning = Beginning(begin)
    beginning.payload_bytes = messages.MAX_RESULT_BYTES
    for payload in (beginning, begin + b"x" * messages.MAX_RESULT_BYTES):
        with pytest.raises(MessageInvalid, match="more than one of its kind may have"):
            decode_from_worker(payload)


@table("unit", ["1", '""', "[]", "{}", '[{"type":"text","text":""}]'])
@table("field", ["prompts", "contexts"])
def test_query_of_a_million_values_is_invalid(field: str, unit: str) -> None:
    """No value amplifies without bound: the types refuse it at once, or the number of objects or prompts does."""
    fields = {"prompts": '["a"]', field: "[" + ",".join([unit] * ((4 << 20) // (len(unit) + 1) - 50)) + "]"}
    payload = b'{"type":"query","id":"1:1","want":"llm",%s}'
    payload %= ",".join(f'"{name}":{value}' for name, value in fields.items()).encode()
    with pytest.raises(MessageInvalid):
        decode_from_worker(payload)


def test_query_with_all_children_that_are_allowed_passes() -> None:
    most = messages.MAX_PROMPTS
    query = Query("1:1", "rlm", ["a"] * most, contexts=[ChildContext(own="context_1")] * most)
    assert decode_from_worker(encode(query)) == query


@table("message", [Reply("1:1", [Slot("a")]), Reply("1:1", [Slot("a\ud800")])])
def test_frame_of_a_message_is_bounded(message: Reply) -> None:
    frame = encode_frame(encode(message), 1000)
    assert framed(message, len(frame) - 4) == frame
    with pytest.raises(FrameTooLarge):
        framed(message, len(frame) - 5)


def test_long_prompt_of_quotes_is_one_string() -> None:
    query = Query(id="1:1", want="llm", prompts=['"a, \\ "b", ' * 200_000])
    assert decode_from_worker(encode(query)) == query
