"""Hooks of mkdocs: documents of the repository's top folder become pages, and marked places are filled from the code.

A line `<!-- generated: NAME ARGUMENT -->` of a page, or one without an argument, is replaced by what the function of
that name in `generated.py` returns.
"""

import re
from posixpath import dirname, normpath, relpath
from typing import TYPE_CHECKING

from scripts.site import generated

if TYPE_CHECKING:
    from mkdocs.config.defaults import MkDocsConfig
    from mkdocs.structure.files import Files
    from mkdocs.structure.pages import Page

TOP = {
    "ARCHITECTURE.md": "project/architecture.md",
    "SECURITY.md": "project/security.md",
    "CHANGELOG.md": "project/changelog.md",
    "CONTRIBUTING.md": "project/contributing.md",
    "tests/README.md": "project/tests.md",
}
"""Document of the top folder: the page that it is. A document that does not exist is left out."""
IN_THE_REPOSITORY = re.compile(r"\[[^]]*\]\((?:[\w./]*/)?(faults|walkthrough)\.md(?:#[\w-]*)?\)")
"""Links to documents of the repository that are no pages (`exclude_docs` in mkdocs.yml): their readers have a clone."""
MARK = re.compile(r"^<!-- generated: (\w+)(?: (\w+))? -->$", re.MULTILINE)
ITEM = re.compile(r"^( *)(?:[-*]|\d+\.) ")
LINK = re.compile(r"(?<=\]\()(?![a-z]+:|#|/)([^)#\s]+)(?=[)#])")
"""Target of a Markdown link within the repository, without its anchor."""


def on_files(files: "Files", config: "MkDocsConfig") -> "Files":
    """Add the documents of the top folder as pages."""
    from mkdocs.structure.files import File  # mkdocs is there when it calls, and not where tests only import this

    for name, page in TOP.items():
        if (generated.PROJECT / name).exists():
            files.append(File.generated(config, page, content=(generated.PROJECT / name).read_text()))
    return files


def on_page_markdown(markdown: str, page: "Page", config: "MkDocsConfig", files: "Files") -> str:  # noqa: ARG001
    """Return the text of a page with its marked places filled, and with links that hold within the site."""
    filled = MARK.sub(lambda mark: getattr(generated, mark[1])(*filter(None, [mark[2]])), markdown)
    filled = IN_THE_REPOSITORY.sub(r"`docs/\1.md`", filled)
    return with_blank_lines(LINK.sub(lambda link: _within_site(link[1], page.file.src_uri), filled))


def with_blank_lines(text: str) -> str:
    """Return Markdown as GitHub reads it in the form that Python-Markdown needs for the same meaning.

    Python-Markdown wants a blank line before a list or a table, and four spaces before what belongs to a list item.
    """
    lines: list[str] = []
    is_code = False
    has_paragraphs = False  # whether the current list item has a blank line in it
    offset = 0  # spaces that what belongs to the current list item has in the source; 0 outside of lists
    for line in text.split("\n"):
        indent = len(line) - len(line.lstrip())
        item = None if is_code else ITEM.match(line)
        follows_text = bool(lines and lines[-1].strip())
        if item and not item[1]:
            if follows_text and (not offset or has_paragraphs):
                lines.append("")
            has_paragraphs = False
            offset = len(item[0])
        elif not is_code and not indent and line.strip() and (not offset or not follows_text):
            offset = 0
        has_paragraphs |= not line.strip()
        if not is_code and line.startswith("|") and follows_text and not lines[-1].startswith("|"):
            lines.append("")
        is_nested = offset and indent >= min(offset, 2) and not (item and not item[1])
        lines.append(" " * max(0, 4 - offset) + line if is_nested and line.strip() else line)
        is_code ^= line.lstrip().startswith("```")
    return "\n".join(lines)


def _within_site(target: str, page: str) -> str:
    """Return what a link of `page` leads to, as a path from that page within the site.

    The documents of the top folder lie beside `docs` in the repository, and below `project/` in the site.
    """
    top = {site: name for name, site in TOP.items()}
    written = top.get(page, f"docs/{page}")
    named = normpath(f"{dirname(written)}/{target}" if dirname(written) else target)
    there = TOP.get(named, named.removeprefix("docs/"))
    return relpath(there, dirname(page) or ".")
