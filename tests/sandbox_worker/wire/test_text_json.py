"""Text with lone surrogates in JSON: each function handles them as it promises."""

import json
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sandbox_worker.wire.text_json import (
    decode_escaped,
    encode_escaped,
    encode_raw,
    encode_written_out,
    written_out,
)
from tests.support.tables import table

ANY_TEXT = st.text(st.characters(exclude_categories=[]))


class Said(msgspec.Struct, frozen=True):
    text: str
    more: list[str] = []


class Name(str):
    """Subclass of `str`, which msgspec does not encode."""

    __slots__ = ()


@table("encode", [encode_escaped, encode_written_out, encode_raw])
@given(text=st.text())
def test_text_without_surrogates_is_encoded_as_msgspec_does(encode: Any, text: str) -> None:
    assert encode({"text": text}) == msgspec.json.encode({"text": text})


@given(ANY_TEXT, ANY_TEXT)
def test_escaped_text_decodes_to_an_equal_value(one: str, other: str) -> None:
    joined = json.loads(json.dumps(one))  # a pair of escapes is one character
    assert json.loads(encode_escaped([one])) == [joined]
    said = Said(joined, [json.loads(json.dumps(other))])
    assert decode_escaped(encode_escaped(said), Said) == said


def test_escaped_bytes_are_ascii_escapes() -> None:
    assert encode_escaped(["a\ud800"]) == b'["a\\ud800"]'


@table(
    "data, error",
    [
        (b'{"text": 1}', msgspec.ValidationError),
        (b'{"text": "\\ud800", "more": 1}', msgspec.ValidationError),
        (b"{", ValueError),
        (b'{"unknown": ' + b"[" * 200_000, RecursionError),
    ],
)
def test_decode_escaped_refuses_other_json(data: bytes, error: type[Exception]) -> None:
    with pytest.raises(error):
        decode_escaped(data, Said)


@given(ANY_TEXT)
def test_written_out_text_is_utf8_that_msgspec_reads(text: str) -> None:
    expected = text.encode("utf-8", "backslashreplace").decode()
    assert msgspec.json.decode(encode_written_out(Said(text)), type=Said) == Said(expected)
    assert json.loads(written_out(json.dumps([text], ensure_ascii=False))) == [expected]


def test_encode_written_out_calls_the_hook_in_either_way() -> None:
    for text in ("a", "a\ud800"):
        assert encode_written_out([text, 1j], lambda value: str(value)).endswith(b'"1j"]')


@given(ANY_TEXT)
def test_raw_text_is_the_same_characters(text: str) -> None:
    encoded = encode_raw([text, Name("named")])
    assert json.loads(encoded.decode("utf-8", "surrogatepass")) == [text, "named"]


def test_raw_adjacent_surrogates_stay_two_characters() -> None:
    assert encode_raw("\ud83d\ude00") == b'"\xed\xa0\xbd\xed\xb8\x80"'
    assert encode_raw({"a": "\ud800"}) == b'{"a":"\xed\xa0\x80"}'
