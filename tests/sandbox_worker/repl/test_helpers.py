"""Matches, chunks and lines of large texts, in this process."""

import re
import tracemalloc
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sandbox_worker.repl.helpers import STEP_CHARS, chunks, lines, search
from tests.support.tables import table

TEXT = "first line\nsecond: Error 12\nthird\n\nerror 345 at the end"


def test_match_knows_its_place() -> None:
    found = search(r"(?i)error (\d+)", TEXT, around=5)
    assert found.total == len(found) == 2
    first, second = found
    assert (first.part, first.line, first.start, first.end) == (None, 2, 19, 27)
    assert TEXT[first.start : first.end] == first.text == "Error 12"
    assert first.around == "ond: Error 12\nthir"
    assert (second.line, second.text, second.around) == (5, "error 345", "ird\n\nerror 345 at t")


def test_printed_matches_take_a_line_each() -> None:
    assert str(search("line", TEXT, around=3)) == "1 match\nline 1 [6:10] 'st line\\nse'"
    assert repr(search("rror", {"a": TEXT, "b": "x"}, around=0, limit=1)) == (
        "2 matches, of which this has the first 1\n'a', line 2 [20:24] 'rror'"
    )
    assert str(search("nothing", TEXT)) == "no match"
    assert str(search("b" * 400, "a" + "b" * 400)) == f"1 match\nline 1 [1:401] '{'a' + 'b' * 299}'..."


def test_matches_are_all_there_and_made_when_they_are_read() -> None:
    texts = {"a": "x ERROR\n" * 1_000, "b": "ERROR\n" * 234}
    found = search("ERROR", texts)
    assert len(found) == 1_234
    assert [found[place][:2] for place in (-1, 0, 1_000, 999)] == [("b", 234), ("a", 1), ("b", 1), ("a", 1_000)]
    assert [match.line for match in found[998:1_002]] == [999, 1_000, 1, 2]
    assert repr(found).startswith("1,234 matches; the first 20 of them:\n'a', line 1 ")
    assert len(repr(found).splitlines()) == 21
    assert len(found + search("x", texts)) == 2_234
    assert search("nothing", texts) == []
    with pytest.raises(IndexError, match="there are 1,234 matches"):
        found[1_234]


@table("pattern", ["ab", "a[b]", re.compile("AB", re.IGNORECASE)])
@table("limit", [0, 3, 1000])
def test_matches_are_counted_past_those_returned(pattern: Any, limit: int) -> None:
    found = search(pattern, ["ab" * 10, "", "xab\nab"], limit=limit)
    assert (found.total, len(found)) == (12, min(limit, 12))
    if limit == 1000:
        assert [(match.part, match.line, match.start) for match in found[-2:]] == [(2, 1, 1), (2, 2, 4)]


def test_plain_pattern_is_no_expression() -> None:
    assert search("a.c", "abc a.c").total == 2
    assert [match.start for match in search("a.c", "abc a.c", plain=True)] == [4]
    assert search("(", "f(x)", plain=True).total == 1


@given(st.text("ab\n", max_size=60), st.sampled_from(["a", "ab", "aa", "b\n"]))
def test_plain_and_regular_search_find_the_same(text: str, word: str) -> None:
    assert list(search(word, text)) == list(search(f"(?:{word})", text))


SEARCH: Any = search
CHUNKS: Any = chunks
LINES: Any = lines
BYTES: Any = b"x"


@table(
    "call, error, said",
    [
        (lambda: SEARCH("(", "x"), ValueError, r"'\(' is not a regular expression: .*; plain=True looks for"),
        (lambda: SEARCH("", "x"), ValueError, "'pattern' must not be empty"),
        (lambda: SEARCH(5, "x"), TypeError, "'pattern' must be text or a compiled regular expression, not int"),
        (lambda: SEARCH(re.compile("x"), "x", plain=True), TypeError, "'pattern' must be text, not Pattern"),
        (lambda: SEARCH(re.compile(BYTES), "x"), TypeError, "'pattern' must be text or a compiled"),
        (lambda: SEARCH("x", b"x"), TypeError, "takes a text, or a list or dict of texts, not a bytes"),
        (lambda: SEARCH("x", {"a": "x", "b": 5}), TypeError, r"text\['b'\] is a int: make a text of it first"),
        (lambda: SEARCH("x", "x", around=-1), ValueError, "'around' must be at least 0"),
        (lambda: SEARCH("x", "x", limit="5"), TypeError, "'limit' must be int, not str"),
        (lambda: CHUNKS("x", 0), ValueError, "'size' must be at least 1"),
        (lambda: CHUNKS("x", 10, 6), ValueError, "'overlap' must be at most half of size = 10, not 6"),
        (lambda: CHUNKS("x", 10.0), TypeError, "'size' must be int, not float"),
        (lambda: CHUNKS([["x"]], 10), TypeError, r"text\[0\] is a list"),
        (lambda: LINES("x", 0), ValueError, "'first' must be at least 1"),
        (lambda: LINES("x", 1, True), TypeError, "'last' must be int, not bool"),
        (lambda: LINES(None), TypeError, "not a NoneType"),
    ],
)
def test_wrong_argument_is_named(call: Any, error: type[Exception], said: str) -> None:
    with pytest.raises(error, match=said):
        call()


@given(st.text("ab \n", max_size=200), st.integers(1, 30), st.data())
def test_chunks_cover_the_text(text: str, size: int, data: st.DataObject) -> None:
    overlap = data.draw(st.integers(0, size // 2))
    cut = chunks(text, size, overlap)
    assert all(0 < len(chunk) <= size and text[chunk.start : chunk.end] == chunk for chunk in cut)
    begins = [0, *(chunk.end - overlap for chunk in cut[:-1])]
    assert [chunk.start for chunk in cut] == begins[: len(cut)]
    assert "".join(chunk[overlap if number else 0 :] for number, chunk in enumerate(cut)) == text
    assert len(cut) == len(list(cut))


def test_chunk_ends_at_line_or_space() -> None:
    """A chunk ends at a line, else at a space of its last quarter, else at its size."""
    assert chunks("aaaaaa\nb cdef", 8)[0] == "aaaaaa\n"
    assert chunks("aaaaaa bcdef", 8)[0] == "aaaaaa "
    assert chunks("a\naaaaaabcdef", 8)[0] == "a\naaaaaa"


def test_chunks_are_a_sequence_of_texts() -> None:
    cut = chunks({"a": "x" * 25, "empty": "", "b": "y" * 5}, 10)
    assert [(chunk.part, chunk.start, chunk.end) for chunk in cut] == [
        ("a", 0, 10),
        ("a", 10, 20),
        ("a", 20, 25),
        ("b", 0, 5),
    ]
    assert (cut[-1], cut[1:3], len(cut)) == ("yyyyy", ["x" * 10, "x" * 5], 4)
    assert isinstance(cut[0], str)
    assert repr(cut) == "<4 chunks of at most 10 characters>"
    assert repr(chunks("x" * 3000, 1500, 10)) == "<3 chunks of at most 1,500 characters, overlap 10>"
    assert list(chunks("", 5)) == []
    with pytest.raises(IndexError, match="there are 4 chunks"):
        cut[4]


@given(st.lists(st.sampled_from(["", "a", "b" * STEP_CHARS, "\r"]), max_size=6), st.integers(1, 8), st.integers(0, 8))
def test_lines_are_those_of_a_split(given_lines: list[str], first: int, last: int) -> None:
    text = "\n".join(given_lines)
    every = text.split("\n")
    kept = [f"{line}\n" for line in every[:-1]] + every[-1:]
    assert lines(text, first, last) == "".join(kept[first - 1 : last])
    assert lines(text, first) == "".join(kept[first - 1 :])


def test_lines_far_into_a_text() -> None:
    text = "".join(f"line {number}\n" for number in range(1, 100_001))
    assert lines(text, 99_999, 99_999) == "line 99999\n"
    assert lines(text, 100_002) == ""
    (match,) = search("line 54321\n", text)
    assert lines(text, match.line, match.line) == match.text


def test_lines_keep_the_shape_of_the_texts() -> None:
    assert lines({"a": "1\n2\n3", "b": "x"}, 1, 2) == {"a": "1\n2\n", "b": "x"}
    assert lines(["1\n2", "x"], 2, 2) == ["2", ""]


def test_large_text_is_not_copied() -> None:
    text = "some words and a line\n" * 400_000
    tracemalloc.start()
    found = search(r"w[o]rds", text)
    cut = chunks(text, 20_000)
    assert (found.total, len(cut)) == (400_000, 441)
    assert cut[400].start > 1000
    assert lines(text, 399_999, 399_999) == "some words and a line\n"
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < len(text) // 10
