"""Rows of events and their texts, of proper and of hostile traces."""

import json
from typing import Any

import pytest

from rlm_broker.watch.viewer.rows import LABEL_CHARS, MOST_UNKNOWN, WORD_CHARS, Rows, encoded
from tests.support.traces import Line, Written, small


def _taken(lines: list[Line]) -> tuple[list[Any], bytes]:
    rows = Rows()
    taken = [row for line in lines if (row := rows.take(line)) is not None]
    return taken, rows.fresh()


def _text(row: Any, name: str, texts: bytes) -> str:
    begin, length = row[5][name]
    return texts[begin : begin + length].decode()


def test_texts_lie_in_one_stream() -> None:
    """Each text of an event is found at its offset, and numbers are in the row."""
    taken, texts = _taken(small().lines)
    ended = next(row for row in taken if row[0] == "call_ended")
    assert _text(ended, "response", texts) == "The reply."
    assert ended[5]["total_input_tokens"] == 100
    assert ended[5]["total_cost"] == 0.5
    assert ended[5]["label"] == "The reply."
    assert ended[:5] == ("call_ended", 5, 1_700_000_000.5, "t", "1")
    block = [row for row in taken if row[0] == "block_ended"][-1]
    assert _text(block, "stderr", texts) == "Traceback: it was 0"
    assert block[5]["status"] == "error"


def test_text_that_comes_again_is_stored_once() -> None:
    long = "a part " * 1_000
    taken, texts = _taken(Written().call(1, long, "x").call(2, long, "y").lines)
    starts = [row for row in taken if row[0] == "call_started"]
    assert starts[0][5]["prompt"] == starts[1][5]["prompt"]
    assert texts.count(long.encode()) == 1


def test_fresh_texts_continue_where_earlier_ones_ended() -> None:
    rows = Rows()
    rows.take(Written().call(1, "one", "two").lines[0])
    first = rows.fresh()
    row = rows.take(Written()("replied", number=1, text="three").lines[0])
    assert row is not None
    assert row[5]["text"] == (len(first), 5)
    assert rows.fresh() == b"three"
    assert rows.end == len(first) + 5


def test_conversations_are_text_with_roles() -> None:
    messages = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": [{"type": "text", "text": "Yes"}]}]
    taken, texts = _taken(Written().call(1, messages, "x").lines)
    assert _text(taken[0], "prompt", texts).startswith("[user]\nHi\n\n[assistant]\n[")


def test_lone_surrogates_become_visible() -> None:
    """A half of a character, for which UTF-8 has no bytes, is written out in texts, words and labels."""
    taken, texts = _taken(
        Written().call(1, "half \ud800", "x")("tool_started", call=1, tool="\udfff", arguments="").lines
    )
    assert _text(taken[0], "prompt", texts) == "half \\ud800"
    assert taken[0][5]["label"] == "half \\ud800"
    assert taken[2][5]["tool"] == "\\udfff"
    assert json.loads(encoded(taken))


def test_labels_and_words_are_bounded() -> None:
    long = "word\n" * 10_000
    taken, _ = _taken(Written()("tool_started", call=1, tool=long, arguments=long).lines)
    assert len(taken[0][5]["label"]) == LABEL_CHARS + 3
    assert "\n" not in taken[0][5]["label"]
    assert len(taken[0][5]["tool"]) == WORD_CHARS


@pytest.mark.parametrize("value", [float("nan"), float("inf"), 2**70, True, "7", [7], {"a": 1}, None])
def test_numbers_that_are_none_are_left_out(value: Any) -> None:
    taken, _ = _taken(Written()("call_ended", call=value, usage=value, model=None, response="").lines)
    assert "call" not in taken[0][5]


@pytest.mark.parametrize(
    "fields",
    [{"run": 1}, {"run": ""}, {"run": "1/../2"}, {"depth": -1}, {"depth": "0"}, {"depth": 10**9}, {"run": None}],
)
def test_events_of_no_run_are_refused(fields: Line) -> None:
    with pytest.raises(ValueError, match="is of no run"):
        Rows().take({"event": "replied", "run": "1", "depth": 0, **fields})


def test_unknown_kinds_are_counted() -> None:
    rows = Rows()
    for number in range(MOST_UNKNOWN + 50):
        assert rows.take({"event": f"later_{number}", "run": "1", "depth": 0}) is None
    assert len(rows.unknown) == MOST_UNKNOWN
