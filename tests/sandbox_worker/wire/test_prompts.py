"""Types of prompts, and long tasks of children, shown by their beginning and end."""

import pytest

from sandbox_worker.wire.errors import MessageInvalid
from sandbox_worker.wire.messages import Query, decode_from_worker, encode
from sandbox_worker.wire.prompts import (
    LONG_TASK_CHARS,
    SHOWN_CHARS,
    ImagePart,
    ImageUrl,
    MessagePart,
    Prompt,
    TextPart,
    are_messages,
    beginning_and_end,
)
from tests.support.tables import table

CONVERSATION: Prompt = [
    MessagePart("system", "brief"),
    MessagePart("user", [TextPart('[1], "b"'), ImagePart(ImageUrl("data:image/png;base64,AA=="))]),
    MessagePart("assistant", "]"),
    MessagePart("user", "?"),
]


def test_prompts_of_each_kind_cross() -> None:
    prompts: list[Prompt] = ["a", [TextPart("b")], CONVERSATION]
    query = decode_from_worker(encode(Query("1:1", "llm", prompts)))
    assert query == Query("1:1", "llm", prompts)
    assert isinstance(query, Query)
    assert query.texts == ["a"]
    assert not query.is_text
    assert Query("1:1", "llm", ["a"]).is_text


@table(
    "message",
    [
        b'{"type":"message","role":"tool","content":"a"}',
        b'{"type":"message","role":"user","content":"a","name":"b"}',
        b'{"type":"message","role":"user","content":[]}',
        b'{"type":"message","role":"user","content":[{"type":"message","role":"user","content":"a"}]}',
        b'{"type":"message","role":"user","content":[{"type":"text","text":5}]}',
        b'{"type":"message","role":"user"}',
    ],
)
def test_message_of_another_shape_is_refused(message: bytes) -> None:
    payload = b'{"type":"query","id":"1:1","want":"llm","prompts":[[%s]]}' % message
    with pytest.raises(MessageInvalid):
        decode_from_worker(payload)


def test_parts_and_messages_do_not_mix() -> None:
    assert are_messages([MessagePart("user", "a")])
    assert not are_messages([TextPart("a")])
    with pytest.raises(MessageInvalid, match="not both"):
        are_messages([MessagePart("user", "a"), TextPart("b")])


@table("temperature", [b"-0.1", b"2.1", b"1e999", b'"0"', b"true"])
def test_temperature_out_of_its_range_is_refused(temperature: bytes) -> None:
    with pytest.raises(MessageInvalid):
        decode_from_worker(b'{"type":"query","id":"1:1","want":"llm","prompts":["a"],"temperature":%s}' % temperature)


@table("between, told", [(0, ""), (1, "1"), (9_998_000, "9,998,000")])
def test_long_task_shows_its_ends(between: int, told: str) -> None:
    """A long task is told by its ends and by the amount between them."""
    begin, end = "a" * SHOWN_CHARS, "c" * SHOWN_CHARS
    shown = f"{begin}\n... [{told} characters left out here] ...\n{end}" if between else begin + end
    assert beginning_and_end(begin + "b" * between + end) == shown


def test_shown_task_can_always_be_sent() -> None:
    told = beginning_and_end("\ud800" + "x" * LONG_TASK_CHARS + "\udfff")
    assert told.encode().startswith(b"?x")
    assert told.endswith("x?")
