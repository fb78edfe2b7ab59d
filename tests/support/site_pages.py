"""Reads the pages of a built site: what they load, where they link, and which anchors they have."""

from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urldefrag

EXTERNAL = ("http:", "https:", "//")
LOADED = {"link": "href", "use": "href"} | dict.fromkeys(("script", "img", "iframe", "source", "video"), "src")
"""Element: its attribute whose target a browser loads with the page."""
UNLOADED_RELATIONS = {"canonical", "next", "prev", "author", "license"}
"""Relations of `<link>` that a browser does not load."""


class Page(HTMLParser):
    """One page of a site.

    Attributes:
        anchors: Ids and names that a link may lead to.
        links: Targets of its links, as written.
        loaded: Targets that a browser loads with the page, as written.
        code: Texts of its inline code, in order.
    """

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.anchors: set[str] = set()
        self.links: list[str] = []
        self.loaded: list[str] = []
        self.code: list[str] = []
        self._is_in_code = False
        self.feed(path.read_text())

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        """Collect what the element is, links to or loads."""
        given = {name: value or "" for name, value in attrs}
        self.anchors |= {given[name] for name in ("id", "name") if name in given}
        if tag == "a" and "href" in given:
            self.links.append(given["href"])
        target = given.get(LOADED.get(tag, ""))
        if target and given.get("rel") not in UNLOADED_RELATIONS:
            self.loaded.append(target)
        if tag == "code":
            self._is_in_code = True
            self.code.append("")

    def handle_endtag(self, tag: str) -> None:
        """Note the end of inline code."""
        if tag == "code":
            self._is_in_code = False

    def handle_data(self, data: str) -> None:
        """Collect the text of code."""
        if self._is_in_code:
            self.code[-1] += data


def pages(site: Path) -> dict[Path, Page]:
    """Return each page of the site by its file. The page for errors is left out: its links are those of a server."""
    return {path: Page(path) for path in sorted(site.rglob("*.html")) if path.name != "404.html"}


def faults(site: Path) -> list[str]:
    """Return a line for each target that is loaded from elsewhere, and for each link within the site that is broken."""
    read = pages(site)
    found = []
    for path, page in read.items():
        name = path.relative_to(site)
        found += [
            f"{name} loads {target}{why}" for target in page.loaded if (why := _wrong_load(path, target)) is not None
        ]
        found += [f"{name} links to {link}, {why}" for link in page.links if (why := _wrong_link(path, link, read))]
    for style in site.rglob("*.css"):
        text = style.read_text()
        found += [
            f"{style.relative_to(site)} loads {each}" for each in ("url(http", "url(//", "@import") if each in text
        ]
    return found


def _wrong_load(path: Path, target: str) -> str | None:
    """Return what is wrong with a target that `path` loads, after its name; None if it is a file of the site."""
    if target.startswith(EXTERNAL):
        return ""
    is_there = target.startswith(("data:", "#")) or (path.parent / unquote(urldefrag(target)[0])).exists()
    return None if is_there else ", which is not there"


def _wrong_link(path: Path, link: str, read: dict[Path, Page]) -> str | None:
    """Return what is wrong with a link of `path`; None if it leads elsewhere, or to what is there."""
    if link.startswith((*EXTERNAL, "mailto:", "data:")):
        return None
    target, anchor = map(unquote, urldefrag(link))
    file = (path.parent / target).resolve() if target else path
    if file.is_dir():
        file /= "index.html"
    if not file.exists():
        return "which is not there"
    return "and there is no such anchor" if anchor and file in read and anchor not in read[file].anchors else None
