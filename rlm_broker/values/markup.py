"""HTML for notebooks. Every text from outside is escaped, and cut to its share of the page.

`Markup` is the type of text that a page may hold. Only the functions of this module make it, so that a type checker
finds a text that was not escaped.
"""

import base64
import functools
import html
from collections.abc import Iterable, Iterator, Sequence
from typing import NewType

from rlm_broker.values.text import cut_note, printable

Markup = NewType("Markup", str)
"""HTML without tags, attributes or addresses of a model or a worker."""
LINE_CHARS = 200
"""Characters of a text with one line. The middle of a longer one is cut."""
_BOX = "white-space:pre-wrap;overflow:auto;max-height:24em;margin:0.2em 0;padding:0.3em;border-left:3px solid"
_COLOURS = {"": "#8888", "error": "#c44", "answer": "#484"}


class TextBudget:
    """Characters for the texts of a page together, counted as they stand in the page. Notes of cuts come on top.

    A text may take an equal share of what is left. What a short text leaves is for the texts after it.
    """

    def __init__(self, chars: int, texts: int) -> None:
        self._chars = chars
        self._texts = texts

    def fitted(self, text: str) -> Markup:
        """Return the text, escaped and cut to its share."""
        share = self._chars // max(self._texts, 1)
        shown = fitted(text, share)
        self._texts -= 1
        self._chars -= min(len(shown), share)
        return shown


def escaped(text: str) -> Markup:
    """Return the text as HTML. What is not printable, other than line breaks and tabs, is written as `\\x1b`."""
    return Markup(html.escape(printable(text, keep="\n\t")))


def fitted(text: str, chars: int) -> Markup:
    """Return the text, escaped. If that has more than `chars` characters, a note takes the place of its middle."""
    if len(text) <= chars and len(whole := escaped(text)) <= chars:
        return whole
    head = list(_within(text, chars - chars // 2))
    tail = list(_within(reversed(text[len(head) :]), chars // 2))
    note = f"{cut_note(len(text) - len(head) - len(tail))} ..."
    return Markup("".join([*head, note, *reversed(tail)]))


def line(text: str) -> Markup:
    """Return the text in one line of at most `LINE_CHARS` escaped characters, without the note of a cut."""
    return fitted(" ".join(text.split()), LINE_CHARS)


def joined(parts: Iterable[Markup], between: str = "") -> Markup:
    """Return the parts one after the other, with a text `between` them."""
    return Markup(escaped(between).join(parts))


def paragraph(content: Markup) -> Markup:
    """Return a paragraph in smaller letters, for facts and notes."""
    return Markup(f'<div style="font-size:90%;opacity:0.8">{content}</div>')


def box(content: Markup, kind: str = "") -> Markup:
    """Return lines of text in letters of equal width. `kind` is "", "error" or "answer" and gives the colour."""
    return Markup(f'<pre style="{_BOX} {_COLOURS[kind]}">{content}</pre>')


def folded(summary: Markup, content: Markup, *, is_open: bool = False) -> Markup:
    """Return a part that the reader opens and closes by its summary."""
    start = "<details open>" if is_open else "<details>"
    return Markup(f'{start}<summary>{summary}</summary><div style="margin-left:1em">{content}</div></details>')


def table(head: Sequence[str], rows: Iterable[Sequence[Markup]]) -> Markup:
    """Return a table with a row of titles."""
    titles = "".join(f"<th>{escaped(title)}</th>" for title in head)
    cells = ("".join(f"<td>{cell}</td>" for cell in row) for row in rows)
    return Markup(f"<table><tr>{titles}</tr>{''.join(f'<tr>{row}</tr>' for row in cells)}</table>")


def picture(mime: str, data: bytes, description: str) -> Markup:
    """Return a picture, as a part of the page."""
    source = f"data:{html.escape(mime)};base64,{base64.b64encode(data).decode()}"
    return Markup(f'<img style="max-width:100%" alt="{line(description)}" src="{source}">')


@functools.lru_cache(4096)
def _escaped_character(character: str) -> Markup:
    return escaped(character)


def _within(characters: Iterable[str], chars: int) -> Iterator[str]:
    """Yield characters, escaped each, as long as they have at most `chars` characters together."""
    for character in characters:
        shown = _escaped_character(character)
        chars -= len(shown)
        if chars < 0:
            return
        yield shown
