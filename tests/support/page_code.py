"""Finds the code of a Markdown page, with the marks that say how it is run.

A mark is an HTML comment on the line before a fence:

- `<!-- output -->`: the block is what the Python block before it printed. `...` matches any text.
- `<!-- file: NAME -->`: the block is the content of a file in the folder of the page.
- `<!-- exits: CODE -->`: the last command of the block ends with this code.
- `<!-- not run: REASON -->`: the block is only compiled.

A comment that begins with a line `<!-- hidden` holds Python code that is run and not shown.
"""

import re
import textwrap
from collections.abc import Iterator
from dataclasses import dataclass

_PIECE = re.compile(
    r"^<!-- hidden\n(?P<hidden>.*?)^-->$"
    r"|^(?:(?P<indent>[ \t]*)<!-- (?P<mark>output|file|exits|not run)(?:: (?P<value>.*?))? -->\n)?"
    r"^(?P<fence>[ \t]*```+)(?P<language>\w*)[^\n]*\n(?P<text>.*?)^(?P=fence)[ \t]*$",
    re.MULTILINE | re.DOTALL,
)
_MARK = re.compile(r"^[ \t]*<!-- (output|file|exits|not run|hidden)\b", re.MULTILINE)
_COMMAND = re.compile(r"(^|[|;&(]\s*)rlm-broker\b")


@dataclass(frozen=True)
class Piece:
    """One block of code.

    Attributes:
        line: Line of the page on which the text begins, from 1.
        language: Word behind the fence; "hidden" for a hidden block.
        text: Code, without its indentation.
        mark: "output", "file", "exits", "not run" or "".
        value: Text behind the mark's colon, or "".
    """

    line: int
    language: str
    text: str
    mark: str = ""
    value: str = ""


def pieces(page: str) -> list[Piece]:
    """Return the blocks of a page in their order.

    Raises:
        ValueError: A mark does not stand before a fence.
    """
    found = []
    marks = 0
    for match in _PIECE.finditer(page):
        name = "hidden" if match["hidden"] is not None else "text"
        line = page.count("\n", 0, match.start(name)) + 1
        language = "hidden" if name == "hidden" else match["language"]
        found.append(Piece(line, language, textwrap.dedent(match[name]), match["mark"] or "", match["value"] or ""))
        marks += bool(match["mark"]) or name == "hidden"
    if marks != len(_MARK.findall(page)):
        raise ValueError("a mark does not stand on the line before a fence, or a hidden block does not end with -->")
    return found


def commands(text: str) -> Iterator[tuple[str, str]]:
    """Yield each command of a console block that calls rlm-broker, with the output that is shown below it."""
    for each in re.split(r"^\$ ", text, flags=re.MULTILINE)[1:]:
        lines = each.split("\n")
        length = 1
        while length < len(lines) and lines[length - 1].endswith("\\"):
            length += 1
        command = "\n".join(lines[:length])
        if _COMMAND.search(command):
            yield command, "\n".join(line for line in lines[length:] if not line.startswith("# "))


def difference(shown: str, printed: str) -> str | None:
    """Return how the output that a page shows differs from what was printed; None if it does not."""
    pattern = ".*?".join(re.escape(part) for part in shown.strip().split("..."))
    if re.fullmatch(pattern, printed.strip(), re.DOTALL):
        return None
    return f"the page shows:\n{textwrap.indent(shown.strip(), '    ')}\nprinted was:\n{textwrap.indent(printed.strip(), '    ')}"
