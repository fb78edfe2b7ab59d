"""Prompts of a large query, which are decoded one at a time."""

import pytest

from sandbox_worker.wire.errors import MessageInvalid
from sandbox_worker.wire.messages import FEW_BYTES, Output, Query, Result, decode_from_worker, encode
from sandbox_worker.wire.prompts import (
    MAX_PROMPT_BYTES,
    ImagePart,
    ImageUrl,
    MessagePart,
    Prompt,
    Prompts,
    TextPart,
    are_messages,
)

PADDING = "x" * FEW_BYTES


def large(*prompts: Prompt) -> Query:
    """Return a query that is too large to be decoded at once, as it arrives."""
    query = decode_from_worker(encode(Query("1:1", "llm", [*prompts, PADDING], "m", "s", 5, 2, 1.5, True)))
    assert isinstance(query, Query)
    assert isinstance(query.prompts, Prompts)
    return query


def test_small_query_is_decoded_at_once() -> None:
    query = decode_from_worker(encode(Query("1:1", "llm", ["a", [TextPart("b")]])))
    assert query == Query("1:1", "llm", ["a", [TextPart("b")]])


def test_large_query_equals_a_small_one() -> None:
    """A large query has the fields and prompts of a small query."""
    prompts: list[Prompt] = ["é", [TextPart("b")], '"quoted", \n']
    query = large(*prompts)
    assert query == Query("1:1", "llm", [*prompts, PADDING], "m", "s", 5, 2, 1.5, True)
    assert query.prompts[1:3] == prompts[1:]
    assert list(query.prompts)[:3] == prompts
    assert query.texts == ["é", '"quoted", \n', PADDING]
    assert not query.is_text
    assert large("a").is_text
    assert large("a").prompts != ["b", PADDING]


def test_weight_of_a_prompt_counts_wide_characters() -> None:
    query = large("a" * 1000, "é" * 1000)
    assert isinstance(query.prompts, Prompts)
    assert query.prompts.decoded_bytes(0) == 1002
    assert query.prompts.decoded_bytes(1) == 4 * 2002


@pytest.mark.parametrize(("prompt", "why"), [("[]", "neither text"), ("[5]", "neither text")])
def test_invalid_prompt_fails_when_decoded(prompt: str, why: str) -> None:
    payload = encode(Query("1:1", "llm", ["PLACE", PADDING])).replace(b'"PLACE"', prompt.encode())
    query = decode_from_worker(payload)
    assert isinstance(query, Query)
    assert query.prompts[1] == PADDING
    with pytest.raises(MessageInvalid, match=why):
        query.prompts[0]


def test_prompt_beyond_its_limit_is_never_decoded() -> None:
    query = large("x" * MAX_PROMPT_BYTES)
    assert isinstance(query.prompts, Prompts)
    assert query.prompts.decoded_bytes(0) == 0
    with pytest.raises(MessageInvalid, match="8,388,610 bytes, more than 8,388,608"):
        query.prompts[0]


@pytest.mark.parametrize(
    "payload",
    [
        encode(Output(1, "stdout", PADDING)),
        encode(Result(1, "ok", final_answer=PADDING * 16)),
        encode(Query("1:1", "llm", ["a"], system=PADDING)),
        b'{"id":"1:1","type":"query","want":"llm","prompts":["%s"]}' % PADDING.encode(),
        b'{"type":"query","id":"1:1","want":"llm","prompts":["%s"],"depth":0}' % PADDING.encode(),
        b'{"type":"query","id":"1:1","want":"other","prompts":["%s"]}' % PADDING.encode(),
        b'{"type":"query","id":"1:1","want":"llm","prompts":["\\ud800%s"]}' % PADDING.encode(),
        b'{"type":"query","id":5,"want":"llm","prompts":["%s"]}' % PADDING.encode(),
        b'{"type":"query","want":"llm","prompts":["%s"]}' % PADDING.encode(),
        b'{"type":"query","id":"1:1","want":"llm","prompts":[%s1]}' % (b"1," * 70_000 + b" " * FEW_BYTES),
    ],
    ids=[
        "output",
        "answer",
        "system",
        "order",
        "unknown field",
        "want",
        "half a character",
        "id",
        "missing",
        "too many",
    ],
)
def test_large_messages_of_another_kind_or_form_are_invalid(payload: bytes) -> None:
    with pytest.raises(MessageInvalid):
        decode_from_worker(payload)


CONVERSATION: Prompt = [
    MessagePart("system", "brief"),
    MessagePart("user", [TextPart('[1], "b"'), ImagePart(ImageUrl("data:image/png;base64,AA=="))]),
    MessagePart("assistant", "]"),
    MessagePart("user", "?"),
]


def test_chat_messages_cross_in_small_and_large_queries() -> None:
    assert decode_from_worker(encode(Query("1:1", "llm", [CONVERSATION]))) == Query("1:1", "llm", [CONVERSATION])
    query = large("a", CONVERSATION, "b")
    assert list(query.prompts)[:3] == ["a", CONVERSATION, "b"]
    assert not query.is_text


@pytest.mark.parametrize(
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
    large = b'{"type":"query","id":"1:1","want":"llm","prompts":[[%s],"%s"]}' % (message, PADDING.encode())
    query = decode_from_worker(large)
    assert isinstance(query, Query)
    with pytest.raises(MessageInvalid, match="neither text, content parts nor chat messages"):
        query.prompts[0]


def test_parts_and_messages_do_not_mix() -> None:
    assert are_messages([MessagePart("user", "a")])
    assert not are_messages([TextPart("a")])
    with pytest.raises(MessageInvalid, match="not both"):
        are_messages([MessagePart("user", "a"), TextPart("b")])


@pytest.mark.parametrize("temperature", [b"-0.1", b"2.1", b"1e999", b'"0"', b"true"])
def test_temperature_out_of_its_range_is_refused(temperature: bytes) -> None:
    for prompt in (b"a", PADDING.encode()):
        with pytest.raises(MessageInvalid):
            decode_from_worker(
                b'{"type":"query","id":"1:1","want":"llm","prompts":["%s"],"temperature":%s}' % (prompt, temperature)
            )
