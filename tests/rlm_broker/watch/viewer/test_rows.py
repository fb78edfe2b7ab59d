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


def test_texts_are_stored_once_and_continue_where_earlier_ones_ended() -> None:
    long = "a part " * 1_000
    rows = Rows()
    first, _, second, _ = (rows.take(line) for line in Written().call(1, long, "x").call(2, long, "y").lines)
    assert first is not None
    assert second is not None
    assert first[5]["prompt"] == second[5]["prompt"]
    texts = rows.fresh()
    assert texts.count(long.encode()) == 1
    row = rows.take(Written()("replied", number=1, text="three").lines[0])
    assert row is not None
    assert row[5]["text"] == (len(texts), 5)
    assert (rows.fresh(), rows.end) == (b"three", len(texts) + 5)


def test_conversations_are_text_with_roles_and_lone_surrogates_become_visible() -> None:
    """A half of a character, for which UTF-8 has no bytes, is written out in texts, words and labels."""
    messages = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": [{"type": "text", "text": "Yes"}]}]
    written = Written().call(1, messages, "x").call(2, "half \ud800", "x")
    taken, texts = _taken(written("tool_started", call=1, tool="\udfff", arguments="").lines)
    assert _text(taken[0], "prompt", texts).startswith("[user]\nHi\n\n[assistant]\n[")
    assert _text(taken[2], "prompt", texts) == taken[2][5]["label"] == "half \\ud800"
    assert taken[4][5]["tool"] == "\\udfff"
    assert json.loads(encoded(taken))


def test_rows_of_hostile_events_are_bounded() -> None:
    """Labels and words are short, numbers are numbers, events of no run are refused, and unknown kinds are counted."""
    long = "word\n" * 10_000
    taken, _ = _taken(Written()("tool_started", call=1, tool=long, arguments=long).lines)
    assert len(taken[0][5]["label"]) == LABEL_CHARS + 3
    assert "\n" not in taken[0][5]["label"]
    assert len(taken[0][5]["tool"]) == WORD_CHARS
    for value in (float("nan"), float("inf"), 2**70, True, "7", [7], {"a": 1}, None):
        taken, _ = _taken(Written()("call_ended", call=value, usage=value, model=None, response="").lines)
        assert "call" not in taken[0][5], value
    rows = Rows()
    runs, depths = (1, "", "1/../2", None), (-1, "0", 10**9)
    for run, depth in [*((run, 0) for run in runs), *(("1", depth) for depth in depths)]:
        with pytest.raises(ValueError, match="is of no run"):
            rows.take({"event": "replied", "run": run, "depth": depth})
    for number in range(MOST_UNKNOWN + 50):
        assert rows.take({"event": f"later_{number}", "run": "1", "depth": 0}) is None
    assert len(rows.unknown) == MOST_UNKNOWN


def test_row_of_a_killed_block_has_what_it_undid() -> None:
    killed = {"event": "block_ended", "run": "1", "depth": 0, "block": 2}
    for outcome, undone in (({"blocks_undone": 3}, 3), ({"blocks_undone": None}, None), ({}, None)):
        row = Rows().take(killed | {"outcome": {"status": "killed", **outcome}})
        assert row is not None
        assert row[5].get("blocks_undone") == undone
