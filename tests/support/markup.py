"""HTML as a browser reads it: which elements there are, and which text."""

from dataclasses import dataclass, field
from html.parser import HTMLParser

ALLOWED = {
    "details": {"open"},
    "div": {"style"},
    "img": {"style", "alt", "src"},
    "pre": {"style"},
    **{name: set[str]() for name in ("summary", "table", "td", "th", "tr")},
}
"""Elements that a page of ours may have, and their attributes."""


@dataclass
class Page:
    """The content of a page as a browser reads it."""

    text: str = ""
    elements: list[str] = field(default_factory=list)
    boxes: list[str] = field(default_factory=list)
    pictures: list[str] = field(default_factory=list)


class _Reader(HTMLParser):
    def __init__(self) -> None:
        super().__init__(convert_charrefs=True)
        self.page = Page()
        self.open: list[str] = []

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        assert {name for name, _ in attributes} <= ALLOWED[tag], (tag, attributes)
        self.page.elements.append(tag)
        if tag == "img":
            self.page.pictures.append(dict(attributes)["src"] or "")
            return
        self.open.append(tag)
        if tag == "pre":
            self.page.boxes.append("")

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.page.text += data
        if self.open[-1:] == ["pre"]:
            self.page.boxes[-1] += data

    def handle_comment(self, data: str) -> None:
        raise AssertionError(f"a comment: {data}")

    def handle_decl(self, decl: str) -> None:
        raise AssertionError(f"a declaration: {decl}")

    def unknown_decl(self, data: str) -> None:
        raise AssertionError(f"a declaration: {data}")

    def handle_pi(self, data: str) -> None:
        raise AssertionError(f"an instruction: {data}")


def read(html: str) -> Page:
    """Read a page. It fails if an element or attribute is not one of ours, or if one is not closed."""
    reader = _Reader()
    reader.feed(html)
    reader.close()
    assert reader.open == []
    return reader.page
