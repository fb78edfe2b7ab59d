"""Texts in a page: escaped, and cut to what they may take."""

from hypothesis import given
from hypothesis import strategies as st

from rlm_broker.values.markup import (
    LINE_CHARS,
    Markup,
    TextBudget,
    box,
    escaped,
    fitted,
    folded,
    joined,
    line,
    paragraph,
    picture,
    table,
)
from tests.support.markup import read

PRINTABLE = st.text(st.characters(exclude_categories=["C", "Z"]) | st.sampled_from(list("<>&\"'`/= \n\t")))
HOSTILE = (
    *("</pre><script>alert(1)</script>", '"><img src=x onerror=alert(1)>', "' style='position:fixed", "<!-- "),
    *("<![CDATA[ ", "<?php ", "&lt;b&gt; &amp;amp; &#60;", "</details></div><iframe srcdoc='<p>'>"),
)


@given(PRINTABLE)
def test_text_is_read_back_as_it_was(text: str) -> None:
    whole = folded(escaped(text), joined([box(escaped(text)), paragraph(escaped(text))]))
    assert read(f"{whole}{table(['t'], [[escaped(text)]])}").text == text + text + text + "t" + text


def test_hostile_text_is_no_markup() -> None:
    for text in HOSTILE:
        parts = [box(fitted(text, 10_000)), picture("image/png", b"1", text), table([text], [[line(text)]])]
        page = read(joined(parts))
        assert (page.boxes, page.elements) == ([text], ["pre", "img", "table", "tr", "th", "tr", "td"])


def test_what_is_not_printable_is_written_out() -> None:
    assert escaped("a\x1b[2J\0\u202eb\ud800\n\tc") == "a\\x1b[2J\\x00\\u202eb\\ud800\n\tc"


@given(PRINTABLE, st.integers(0, 50))
def test_fitted_text_is_bounded_and_has_its_ends(text: str, chars: int) -> None:
    shown = fitted(text, chars)
    if len(escaped(text)) <= chars:
        assert shown == escaped(text)
        return
    head, note, tail = shown.partition("... [")
    count, said, tail = tail.partition(" characters cut] ...")
    assert "" not in (note, said)
    assert len(head) + len(tail) <= chars
    first, last = read(head).text, read(tail).text
    assert (text[: len(first)], text[len(text) - len(last) :]) == (first, last)
    assert len(first) + len(last) + int(count) == len(text)


def test_budget_is_shared_and_what_is_left_is_for_later_texts() -> None:
    """More texts than were announced have no room."""
    budget, small = TextBudget(100, 4), TextBudget(10, 1)
    assert budget.fitted("ab") == "ab"
    lengths = [len(budget.fitted("x" * 1000).replace("... [968 characters cut] ...", "")) for _ in range(3)]
    assert lengths[0] == 32
    assert sum(lengths) < 100 + 2 * len("... [967 characters cut] ...")
    assert [small.fitted("x" * 10), small.fitted("yy")] == ["x" * 10, "... [2 characters cut] ..."]


def test_line_has_no_breaks() -> None:
    assert line("a\n\n b\tc") == "a b c"
    assert line("x" * 300) == f"{'x' * 100}... [100 characters cut] ...{'x' * 100}"
    assert line("x" * 200) == "x" * 200
    assert len(line("&" * 5000)) < LINE_CHARS + 40


def test_picture_is_part_of_the_page() -> None:
    assert read(picture("image/png", b"<png>", "")).pictures == ["data:image/png;base64,PHBuZz4="]


def test_folded_part_is_closed_unless_it_is_open() -> None:
    assert folded(Markup("s"), Markup("c")).startswith("<details><summary>s</summary>")
    assert folded(Markup("s"), Markup("c"), is_open=True).startswith("<details open>")
