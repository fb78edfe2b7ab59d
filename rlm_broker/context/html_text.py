"""Text of a page of HTML, in one pass over its markup.

`html.parser` takes a time that grows with the square of an unclosed comment or tag, in releases of Python that are in
use. Here each search for an end goes forward once: what has no end is skipped to the end of the page, as browsers do
it. At most `_HELD_CHARS` are looked at again when more of the page comes.
"""

import re
from collections.abc import Iterator
from html import unescape
from typing import Final

from rlm_broker.context.text import DecodedText

_PAGE: Final = re.compile(
    rb"(?:\xef\xbb\xbf)?\s*+(?>(?:<\?xml[^>]*+>\s*+|<!--(?>(?:(?!-->).)*)-->\s*+)*)<(?:!doctype\s++html|html)\b",
    re.I | re.S,
)
_CHARSET: Final = re.compile(rb"<meta\s[^>]*?charset\s*=\s*[\"']?([\w-]+)", re.I)
_HELD_CHARS: Final = 1 << 18
"""Characters of a tag, or of a text without a tag behind it, that wait for more of the page. Most of a longer tag is
an address with a whole picture in it; it is skipped."""
_TAG: Final = re.compile(r"<(/?)([a-zA-Z][\w:-]*+)((?>(?:[^>=]++|=\s*+(?:\"[^\"]*+\"|'[^']*+'|(?![\"'])))*))>")
_ATTRIBUTE: Final = re.compile(r"(?<![\w-])(href|alt)\s*+=\s*+(?:\"([^\"]*)\"|'([^']*)'|([^\s\"'>]++))", re.I)
_ATTRIBUTES_CHARS: Final = 4_000
"""Characters of a tag's attributes that are looked at."""
_SPACES: Final = re.compile(r"[ \t\r\n\f]+")
_COMMENT_END: Final = re.compile("-->")
_TAG_END: Final = re.compile(">")
_LONGEST_END: Final = 16
"""Characters kept of what is skipped, since its end may be cut."""
_WITHOUT_TEXT: Final = {name: re.compile(f"</{name}", re.I) for name in ("script", "style")}
"""Elements whose content is no text, and the beginning of their ends."""
_CELLS: Final = frozenset({"td", "th"})
_LINES: Final = frozenset(
    {"address", "article", "aside", "blockquote", "body", "br", "dd", "div", "dl", "dt", "fieldset", "figcaption"}
    | {"figure", "footer", "form", "h1", "h2", "h3", "h4", "h5", "h6", "head", "header", "hr", "li", "main", "nav"}
    | {"ol", "option", "p", "pre", "section", "table", "tbody", "tfoot", "thead", "title", "tr", "ul"}
)
"""Elements that begin and end a line."""


def is_page(beginning: bytes, name: str) -> bool:
    """Whether a file with this beginning and name is a page of HTML. Parts of pages, such as templates, are plain
    texts."""
    return name.lower().endswith((".html", ".htm", ".xhtml")) and _PAGE.match(beginning) is not None


def charset_of(beginning: bytes) -> str | None:
    """Return the encoding that a page states for itself, or None. Browsers read Latin-1 as Windows-1252."""
    found = _CHARSET.search(beginning)
    stated = found[1].decode("ascii").lower() if found else None
    return "cp1252" if stated in ("iso-8859-1", "latin1", "us-ascii") else stated


class PageText(DecodedText):
    """The text that a reader of a page sees: a line for each block, tabs between cells, and targets of links in angle
    brackets."""

    def __iter__(self) -> Iterator[str]:
        page = _Markup()
        for piece in super().__iter__():
            yield page.feed(piece if isinstance(piece, str) else piece.decode("ascii"))
        yield page.feed("", is_end=True)


class _Markup:
    """Reader of the markup of one page, piece by piece."""

    def __init__(self) -> None:
        self._left = ""
        self._skips_to: re.Pattern[str] | None = None
        self._link = ""
        self._last = "\n"  # last character of the text so far
        self._depth_of_pre = 0
        self._said: list[str] = []

    def feed(self, piece: str, *, is_end: bool = False) -> str:
        """Return the text of a further piece, as far as it is certain. All is certain at the end."""
        markup, at = self._left + piece, 0
        while at < len(markup):
            after = self._step(markup, at, is_end or len(markup) - at > _HELD_CHARS)
            if after is None:
                break
            at = after
        if is_end:
            self._break("\n")
        self._left = markup[at:] if self._skips_to is None else markup[max(at, len(markup) - _LONGEST_END) :]
        said, self._said = "".join(self._said), []
        return said

    def _step(self, markup: str, at: int, is_certain: bool) -> int | None:
        """Read the next text, tag or comment; return its end, or None if more of the page is needed."""
        if self._skips_to is not None:
            if (end := self._skips_to.search(markup, at)) is None:
                return None
            self._skips_to = _TAG_END if end[0].startswith("</") else None
            return end.end()
        begin = markup.find("<", at)
        if begin < 0 and not is_certain:
            return None
        if begin != at:
            end_of_text = begin if begin >= 0 else len(markup)
            self._say(markup[at:end_of_text])
            return end_of_text
        if tag := _TAG.match(markup, at):
            self._tag(tag[2].lower(), tag[3][:_ATTRIBUTES_CHARS], closes=bool(tag[1]))
            return tag.end()
        return self._unfinished(markup, at, is_certain)

    def _unfinished(self, markup: str, at: int, is_certain: bool) -> int | None:
        """Read a "<" that begins a comment, a tag whose end has not come, or nothing; return as `_step` does."""
        first = markup[at + 1 : at + 4]
        if len(first) < 3 and not is_certain:
            return None
        if first == "!--":
            self._skips_to = _COMMENT_END
            return at + 2
        if first[:1] in ("!", "?"):
            self._skips_to = _TAG_END
        elif first.isascii() and first.lstrip("/")[:1].isalpha():  # a tag whose end has not come
            if not is_certain:
                return None
            self._skips_to = _TAG_END
            return len(markup)  # looked at once: each of its tags might have no end
        else:
            self._say("<")
        return at + 1

    def _tag(self, name: str, attributes: str, *, closes: bool) -> None:
        if name in _WITHOUT_TEXT and not closes:
            self._skips_to = _WITHOUT_TEXT[name]
        elif name in _LINES:
            self._break("\n")
            if name == "pre":
                self._depth_of_pre = max(0, self._depth_of_pre + (-1 if closes else 1))
            elif not closes and name[0] == "h" and name[1:].isdigit():
                self._say("#" * int(name[1:]) + " ")
            elif not closes and name == "li":
                self._say("- ")
        elif name in _CELLS and not closes:
            self._break("\t")
        elif name == "img":
            self._say(_value(attributes, "alt"))
        elif name == "a":
            if closes and self._link:
                self._say(f" <{self._link}>")
            link = "" if closes else _value(attributes, "href").strip()
            self._link = "" if link.startswith(("#", "javascript:", "data:")) else link

    def _break(self, character: str) -> None:
        if self._last not in ("\n", character):
            self._said.append(character)
            self._last = character

    def _say(self, text: str) -> None:
        text = unescape(text)
        if not self._depth_of_pre:
            text = _SPACES.sub(" ", text)
            if self._last.isspace():
                text = text.lstrip(" ")
        if text:
            self._said.append(text)
            self._last = text[-1]


def _value(attributes: str, name: str) -> str:
    """Return the value of an attribute, or an empty text."""
    for found in _ATTRIBUTE.finditer(attributes):
        if found[1].lower() == name:
            return unescape(found[2] or found[3] or found[4] or "")
    return ""
