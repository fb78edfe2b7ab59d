"""Head and tail of output: the same is kept however the text is cut into pieces."""

import random
import re
import time
from collections.abc import Iterable

import msgspec
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from sandbox_worker.init.usage_watch import NOTHING
from sandbox_worker.wire.bounds import PIECE, WATCHED, HeadTail, OutputBounds, ReplBounds, Text
from tests.support.tables import table

PIECES = st.lists(st.text("ab\N{GREEK SMALL LETTER ALPHA}\n", max_size=30), max_size=30)
LIMITS = st.integers(0, 40)


def text_of(limit: int, lines: int | None = None) -> HeadTail[str]:
    return HeadTail(OutputBounds(max_output_bytes=limit, max_output_lines=lines), "")


def through(kept: HeadTail[Text], pieces: Iterable[Text], empty: Text) -> Text:
    head = empty.join(map(kept.add, pieces))
    return head + kept.finish()


def cut(text: str, limit: int) -> str:
    """Return the same result in one step, for a text that is complete."""
    if len(text) <= limit:
        return text
    tail = limit // 2
    return f"{text[: limit - tail]}\n... [{len(text) - limit:,} more cut] ...\n{text[len(text) - tail :]}"


@given(PIECES, LIMITS)
def test_kept_output_is_the_same_in_any_pieces(pieces: list[str], limit: int) -> None:
    assert through(text_of(limit), pieces, "") == cut("".join(pieces), limit)
    whole, kept = "".join(pieces).encode(), HeadTail[bytes](OutputBounds(max_output_bytes=limit), b"")
    assert through(kept, map(str.encode, pieces), b"") == cut(whole.decode("latin-1"), limit).encode("latin-1")


@given(PIECES, LIMITS)
def test_head_is_passed_on_at_once(pieces: list[str], limit: int) -> None:
    """The head is passed on at once, and is never more than its half."""
    kept, seen = text_of(limit), ""
    for number, piece in enumerate(pieces, 1):
        seen += kept.add(piece)
        assert seen == "".join(pieces[:number])[: limit - limit // 2]


def test_flood_is_not_collected() -> None:
    kept = text_of(1000)
    for _ in range(2000):
        kept.add("x" * 100)
        assert sum(map(len, kept._pieces)) + kept._small_length <= 1000 + 2 * PIECE
    assert "[199,000 more cut]" in kept.finish()


def test_add_costs_the_same_at_any_size() -> None:
    def add(limit: int) -> tuple[float, HeadTail[str]]:
        kept = text_of(limit)
        started = time.process_time()
        for _ in range(60_000):
            kept.add("a line of forty characters or so it is\n")
        return time.process_time() - started, kept

    (little_s, _), (much_s, kept) = add(2 << 10), add(2 << 20)
    assert much_s < 20 * little_s, "a copy of the tail for each would be hundreds of times as much"
    assert len(kept._pieces) + len(kept._small) < 1000


NOTE = re.compile(r"\n\.\.\. \[([\d,]+) more cut(?:, lines: ([\d,]+))?\] \.\.\.\n")
NUMBERS = "".join(f"{number}\n" for number in range(10))


def lines_of(text: str) -> int:
    return text.count("\n") + (text != "" and not text.endswith("\n"))


def within_lines(pieces: Iterable[str], limit: int, lines: int) -> str:
    return through(text_of(limit, lines), pieces, "")


@table(
    "text, limit, lines, kept",
    [
        (NUMBERS, 10_000, 10, NUMBERS),
        (NUMBERS + "end", 10_000, 11, NUMBERS + "end"),
        (NUMBERS, 10_000, 4, "0\n1\n\n... [12 more cut, lines: 6] ...\n8\n9\n"),
        (NUMBERS, 10_000, 5, "0\n1\n2\n\n... [10 more cut, lines: 5] ...\n8\n9\n"),
        (NUMBERS + "end", 10_000, 4, "0\n1\n\n... [14 more cut, lines: 7] ...\n9\nend"),
        (NUMBERS, 10_000, 1, "0\n\n... [18 more cut, lines: 9] ...\n"),
        ("no line at all" * 100, 10_000, 1, "no line at all" * 100),
        ("\n" * 10, 10_000, 2, "\n\n... [8 more cut, lines: 8] ...\n\n"),
        ("a\n01234567", 10, 2, "a\n01234567"),
        ("a\n012345678", 10, 2, "a\n\n... [1 more cut] ...\n12345678"),
        ("abcdefg\nhi", 10, 2, "abcdefg\nhi"),
        ("abcdef\nh\ni", 10, 2, "abcde\n... [4 more cut, lines: 2] ...\ni"),
    ],
)
def test_lines_past_the_bound_keep_both_ends(text: str, limit: int, lines: int, kept: str) -> None:
    """Past the bound of lines, the first and the last are kept, and the cut is named."""
    for pieces in ([text], text, [text[:3], text[3:]]):
        assert within_lines(pieces, limit, lines) == kept


@given(PIECES, st.integers(1, 40), st.integers(1, 12))
def test_byte_and_line_bounds_hold_in_any_pieces(pieces: list[str], limit: int, lines: int) -> None:
    whole = "".join(pieces)
    kept = within_lines(pieces, limit, lines)
    assert kept == within_lines([whole], limit, lines)
    note = NOTE.search(kept)
    if note is None:
        assert kept == whole
        assert len(whole) <= limit
        assert lines_of(whole) <= lines
        return
    head, tail = kept[: note.start()], kept[note.end() :]
    assert len(whole) > limit or lines_of(whole) > lines
    assert len(head) + len(tail) <= limit
    assert lines_of(head) + lines_of(tail) <= lines
    gone = whole[len(head) : len(whole) - len(tail)]
    assert whole == head + gone + tail
    assert int(note[1]) == len(gone)
    assert int(note[2] or 0) == gone.count("\n")


def test_byte_output_is_bounded_in_lines() -> None:
    kept = HeadTail[bytes](OutputBounds(max_output_bytes=1000, max_output_lines=2), b"")
    assert through(kept, [NUMBERS.encode()], b"") == b"0\n\n... [16 more cut, lines: 8] ...\n9\n"


def test_head_ends_with_its_lines() -> None:
    """When the first lines are through, no more text goes through until the end."""
    kept = text_of(1000, 2)
    assert (kept.add("one\n"), kept.head_left) == ("one\n", 0)
    assert kept.add("two\n") == ""
    assert kept.finish() == "two\n"


@given(PIECES, PIECES, st.integers(1, 8), st.randoms(use_true_random=False))
def test_bounds_both_ways_hold_for_mixed_output(
    printed: list[str], written: list[str], lines: int, chance: random.Random
) -> None:
    bounds = OutputBounds(max_output_bytes=10_000, max_output_lines=lines)
    ways = [(HeadTail[str](bounds, ""), pieces) for pieces in (printed, written)]
    sent = [iter([*map(kept.add, pieces), *map(HeadTail.finish, [kept])]) for kept, pieces in ways]
    together = []
    while sent:
        way = chance.choice(sent)
        piece = next(way, None)
        if piece is None:
            sent.remove(way)
        else:
            together.append(piece)
    assert through(HeadTail(bounds.both_ways(), ""), together, "") == "".join(together)


def test_bounds_both_ways_double_and_add_notes() -> None:
    """Both ways together may have twice the bounds, and two lines for each note."""
    bounds = OutputBounds(max_output_bytes=10, max_output_lines=3)
    assert bounds.both_ways() == OutputBounds(max_output_bytes=20, max_output_lines=10)
    assert OutputBounds(max_output_bytes=10).both_ways() == OutputBounds(max_output_bytes=20)


# -- pieces as long as those that are joined -------------------------------------------------------------------------

LONG_PIECES = st.lists(st.sampled_from([1, 8_190, 8_191, 8_192, 8_193, 20_000]), max_size=8)


@given(LONG_PIECES, st.sampled_from([16_383, 16_384, 32_767, 32_768, 49_152]))
@example([16_384, 8_192, 8_192, 8_191], 32_768)
@example([16_384, 8_192, 8_192, 8_192], 32_768)
@example([16_384, 8_192, 20_000, 8_192], 65_536)
def test_long_pieces_are_kept_without_excess(sizes: list[int], limit: int) -> None:
    whole = "".join(f"{number:06}" for number in range(sum(sizes) // 6 + 1))[: sum(sizes)]
    kept, head, start = text_of(limit), "", 0
    for size in sizes:
        head += kept.add(whole[start : start + size])
        start += size
        behind_the_first = sum(map(len, list(kept._pieces)[1:])) + kept._small_length
        assert not kept._pieces or behind_the_first < limit // 2
        assert kept._small_length == sum(map(len, kept._small)) < 8_192
    assert head + kept.finish() == cut(whole, limit)


def test_pieces_are_put_together_when_they_have_8192_characters() -> None:
    kept = text_of(100_000)
    kept.add("x" * 50_000)
    for _ in range(2):
        pieces = len(kept._pieces)
        kept.add("x" * 8_191)
        assert len(kept._pieces) == pieces
        kept.add("x")
        assert len(kept._pieces) == pieces + 1


def test_output_after_finish_is_its_own_tail() -> None:
    kept = text_of(8, 8)
    assert kept.add("abcd\n\nefgh") + kept.finish() == "abcd\n... [2 more cut, lines: 2] ...\nefgh"
    assert kept.add("uv\nwxyz") == ""
    assert kept.finish() == "\n... [3 more cut, lines: 1] ...\nwxyz"
    assert kept.finish() == ""


def test_watched_limits_are_bounds_that_init_sees() -> None:
    assert set(ReplBounds.__struct_fields__) >= WATCHED.keys()
    for watched in WATCHED.values():
        assert getattr(NOTHING, watched.usage) == 0
        assert watched.divisor == (1 << 20 if watched.unit.startswith("MiB") else 1)


def test_later_contexts_have_no_address_space_unless_it_is_given() -> None:
    names = set(ReplBounds.__struct_fields__) - {"later_context_bytes", "max_output_lines"}
    fields = dict.fromkeys(names, 1)
    assert msgspec.convert({**fields, "later_context_bytes": 0}, ReplBounds) == msgspec.convert(fields, ReplBounds)
    with pytest.raises(msgspec.ValidationError, match="later_context_bytes"):
        msgspec.convert({**fields, "later_context_bytes": -1}, ReplBounds)
