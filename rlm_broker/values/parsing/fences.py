"""The fenced blocks of a reply: their places and their contents.

The rules are CommonMark's, bent where models break them. A list marker or words (`Okay! `) may precede the opening
fence.
Code may have the fence's own characters inside a triple-quoted string. A fence that was never closed ends where the
next block to run begins. Every look ahead is bounded, so that the time for a reply grows with its length alone.
"""

import re
from itertools import islice
from typing import NamedTuple

from msgspec import Struct

from rlm_broker.values.parsing.source import Inspector, StringScanner

RUNNABLE_TAGS = frozenset({"repl", "python", "py", "python3"})
"""Tags of fences with code to run."""

_DOCUMENT_TAGS = frozenset({"markdown", "md", "mdx", "text", "txt", "rst"})
"""Tags of fences that may show other fences. Nothing inside is run, whether the fence is closed or not."""

_LOOKAHEAD_LINES = 32
"""Fence lines looked at beyond the first possible end of a fence."""

_MAX_FENCE_LINES = 10_000
"""Most fence lines read. The rest of a reply is neither run nor read as prose."""

_MAX_MENTIONS = 32
"""Lines that end with the opening of a fence and open none, beyond which words open no more. Each looks at all that
follows."""

_FENCE_LINE = re.compile(
    r"""
    ^(?P<indent>[ \t]*+)
    (?:
        (?P<marker>(?:[-*+]|\d{1,3}[.)])[ \t]++)
      | (?P<words>(?!>|`{3})                                         # words, and closed spans of code
          (?>(?:[^\n`]++|```[^\n`]++```(?!`)|``[^\n`]++``(?!`)|`[^\n`]++`(?!`))+)(?<!`))
        (?=`{3,}+[ \t]*+[\w.+#:{}-]*+(?:[ \t]++\w++=[^\n`]*+)?[ \t]*+$)
    )?  # not possessive: CPython before 3.11.5 forgets the groups within a possessive one
    (?P<mark>`{3,}+(?=[^`\n]*+$)|~{3,}+)
    (?P<info>[^\n]*+)$
    """,
    re.MULTILINE | re.VERBOSE | re.IGNORECASE,
)
"""Line that may open or close a fence: indentation, a list marker or words, the mark, and the info string."""
_TAG = re.compile(r"[\s{.]*+([\w.+#-]{0,24})")
"""First word of an info string, also in the forms `{python}` and `.python`."""


class Fence(Struct, frozen=True):
    """One fenced block.

    Attributes:
        tag: First word of its info string in lower case, or an empty text.
        text: Its content, without the fence's own indentation and without the end of the last line.
        start, end: Offsets in the reply: of its opening line, or of its mark if words precede that; and behind its
            closing fence, if it has one.
    """

    tag: str
    text: str
    start: int
    end: int

    @property
    def is_runnable(self) -> bool:
        """Whether it is code for the REPL."""
        return self.tag in RUNNABLE_TAGS


class _FenceLine(NamedTuple):
    """A line that could open or close a fence."""

    start: int
    end: int
    width: int
    marker: str
    words: str
    mark: str
    info: str

    @property
    def tag(self) -> str:
        match = _TAG.match(self.info)
        return match[1].lower() if match else ""

    @property
    def is_mention(self) -> bool:
        """Whether it may be only mentioned at the end of a line: it is not code that the words before announce."""
        return bool(self.words) and not (self.tag in RUNNABLE_TAGS and self.words.rstrip().endswith(":"))

    def belongs_to(self, opener: "_FenceLine") -> bool:
        """Whether it is of the opener's kind and at least as long: a closing fence, or the next opening one."""
        return not self.marker and not self.words and self.mark.startswith(opener.mark)


def split_fences(text: str, inspector: Inspector) -> list[Fence]:
    """Return the outermost fences of `text`, in order. Lines must end with a line feed."""
    lines = [_line(match) for match in islice(_FENCE_LINE.finditer(text), _MAX_FENCE_LINES)]
    fences: list[Fence] = []
    number = mentions = 0
    while number < len(lines):
        opener = lines[number]
        if opener.is_mention and mentions == _MAX_MENTIONS:
            number += 1
            continue
        find_end = _code_end if opener.tag in RUNNABLE_TAGS else _other_end
        end_number = find_end(text, lines, number, inspector)
        closer = lines[end_number] if end_number < len(lines) else None
        end = len(text) if closer is None else closer.start
        inside = _inside(text, opener, end)
        is_closed = closer is not None and not closer.info
        is_open = opener.is_mention and not is_closed
        if is_open and (opener.tag not in RUNNABLE_TAGS or inspector.tree(inside) is None):
            mentions += 1
            number += 1
            continue
        if closer is not None and is_closed:
            end = closer.end
            end_number += 1
        fences.append(Fence(opener.tag, inside, opener.start, end))
        number = end_number
    if len(lines) == _MAX_FENCE_LINES:
        end = max(lines[-1].end, fences[-1].end if fences else 0)
        fences.append(Fence("", "", end, len(text)))
    return fences


def _line(match: re.Match[str]) -> _FenceLine:
    indent, marker, words, mark, info = match.groups("")
    start = match.start("mark") if words else match.start()
    return _FenceLine(start, match.end(), len(indent) + len(marker), marker, words, mark, info.strip())


def _code_end(text: str, lines: list[_FenceLine], number: int, inspector: Inspector) -> int:
    """Return the index of the line that ends the code of `lines[number]`; `len(lines)` for the end of the reply.

    Outside of a triple-quoted string, a line with a fence at its start is not Python. So the first one in no string
    ends the code. If that passes over a closing fence, the string may be a slip of the model's; then it counts
    only if the code up to there is Python.
    """
    opener = lines[number]
    strings = StringScanner(text, opener.end)
    passed: int | None = None
    looked_at = opener.end
    for index in range(number + 1, len(lines)):
        line = lines[index]
        if not line.belongs_to(opener):
            continue
        if passed is not None and (index - passed > _LOOKAHEAD_LINES or not inspector.spend(line.start - looked_at)):
            return passed
        looked_at = line.start
        if not strings.inside_at(line.start):
            if passed is None or inspector.tree(_inside(text, opener, line.start)) is not None:
                return index
            return passed
        if passed is None and not line.info:
            passed = index
    if passed is None:
        return len(lines)
    is_end = (
        inspector.spend(len(text) - looked_at)
        and not strings.inside_at(len(text))
        and inspector.tree(_inside(text, opener, len(text))) is not None
    )
    return len(lines) if is_end else passed


def _other_end(_text: str, lines: list[_FenceLine], number: int, _inspector: Inspector) -> int:
    """Return the index of the line that ends the fence of `lines[number]`, whose content is not for the REPL.

    Fences inside are counted, so that a document that shows a fence ends with its own closing fence and not with the
    one that it shows. If the count does not come out, the fence was not closed. Then a document ends at the first
    closing fence, and any other fence where the next code begins.
    """
    opener = lines[number]
    depth = 1
    first_closing: int | None = None
    next_code: int | None = None
    for index in range(number + 1, len(lines)):
        if index - number > _LOOKAHEAD_LINES and (first_closing is not None or next_code is not None):
            break
        line = lines[index]
        if not line.belongs_to(opener):
            continue
        depth += 1 if line.info else -1
        if depth == 0:
            return index
        if not line.info:
            first_closing = index if first_closing is None else first_closing
        elif first_closing is None and next_code is None and line.tag in RUNNABLE_TAGS:
            next_code = index
    if next_code is not None and opener.tag not in _DOCUMENT_TAGS:
        return next_code
    return len(lines) if first_closing is None else first_closing


def _inside(text: str, opener: _FenceLine, end: int) -> str:
    """Return the lines between the opening line and `end`, without the opener's indentation.

    The first line decides whether the code was indented with its fence. If it was not, its own indentation is meant,
    and stays. Behind words, for example of a list, the indentation of the first line is the fence's.
    """
    inside = text[opener.end + 1 : end].removesuffix("\n")
    if not opener.width and not opener.words:
        return inside
    first = inside.lstrip("\n \t")
    start_of_first = inside.rfind("\n", 0, len(inside) - len(first)) + 1
    indentation = len(inside) - len(first) - start_of_first
    width = indentation if opener.words else opener.width
    if not width or indentation < width:
        return inside
    return re.sub(rf"^[ \t]{{1,{width}}}+", "", inside, flags=re.MULTILINE)
