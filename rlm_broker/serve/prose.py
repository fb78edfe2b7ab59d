"""Prose of a reply while it arrives: its text without code that is run, and without the answer."""

import re
from typing import Final

from rlm_broker.values.parsing.fences import RUNNABLE_TAGS

MOST_HELD: Final = 200
"""Characters of a line that are held back while it may still become a fence. A longer line is shown."""
_OPENS = re.compile(r"^[ \t]*+(?:(?:[-*+]|\d{1,3}[.)])[ \t]+)?(?P<mark>`{3,}+|~{3,}+)[ \t]*+(?P<info>[^`\n]*+)$")
_OPENS_AFTER_WORDS = re.compile(r"(?P<mark>`{3,}+)[ \t]*+(?P<info>repl|python3?|py)[ \t]*+$", re.IGNORECASE)
_MAY_OPEN = re.compile(r"^[ \t]*+(?:(?:[-*+]|\d{1,3}[.)]?)[ \t]*+)?(?:`{0,2}|~{0,2}|`{3,}+[^`\n]*+|~{3,}+[^\n]*+)$")
_MAY_OPEN_AFTER_WORDS = re.compile(r"(?<!`)(?:`{1,2}|`{3,}+[ \t]{0,3}\w{0,7})$")
_TAG = re.compile(r"[\s{.]*+([\w+#-]{0,24})")
_FINALS: Final = ("FINAL(", "FINAL:", "FINAL_VAR(", "SUBMIT(")


class LiveProse:
    """Splits the prose off one reply that arrives in pieces. What it has returned stands.

    `parsing.parse_reply` is the judge of a whole reply. This one sees no further than the line that arrives, so it may
    show code that follows an unusual fence; such code is harmless text.
    """

    def __init__(self) -> None:
        self._line = ""
        self._shown = 0
        """Characters of the line that were returned already."""
        self._mark = ""
        self._hides = False
        self._is_over = False

    def feed(self, piece: str) -> str:
        """Take a piece of the reply; return the prose that is certain now."""
        out: list[str] = []
        *whole, rest = piece.replace("\r", "").split("\n")
        for part in whole:
            self._line += part
            out.append(self._ended_line())
        self._line += rest
        out.append(self._certain())
        return "".join(out)

    def end(self) -> str:
        """Return the prose that was held back, at the end of the reply."""
        return self._ended_line().removesuffix("\n")

    def _ended_line(self) -> str:
        line, shown = self._line, self._shown
        self._line, self._shown = "", 0
        if self._is_over:
            return ""
        if self._mark:
            if (closes := line.strip()).startswith(self._mark) and not closes.strip(self._mark[0]):
                hid, self._mark, self._hides = self._hides, "", False
                return "" if hid else f"{line[shown:]}\n"
            return "" if self._hides else f"{line[shown:]}\n"
        if _is_final(line):
            self._is_over = True
            return ""
        if (opened := _OPENS.match(line) or _OPENS_AFTER_WORDS.search(line)) is not None:
            self._mark = opened["mark"]
            tag = _TAG.match(opened["info"])
            self._hides = tag is not None and tag[1].lower() in RUNNABLE_TAGS
            if self._hides:
                before = line[: opened.start("mark")] if opened.re is _OPENS_AFTER_WORDS else ""
                return f"{before[shown:]}\n" if before.strip() else ""
        return f"{line[shown:]}\n"

    def _certain(self) -> str:
        """Return what of the unended line is prose however the line goes on."""
        line = self._line
        if self._is_over or self._hides or (not self._shown and len(line) < MOST_HELD and self._may_be_else(line)):
            return ""
        if not self._shown and _is_final(line):
            return ""
        said, self._shown = line[self._shown :], len(line)
        if not self._mark and (may_open := _MAY_OPEN_AFTER_WORDS.search(said)) is not None:
            self._shown -= len(said) - may_open.start()
            return said[: may_open.start()]
        return said

    def _may_be_else(self, line: str) -> bool:
        if self._mark:
            return line.strip(" \t") == "" or line.strip().startswith(self._mark[0])
        head = line.strip()
        is_final = any(final.startswith(head) for final in _FINALS)
        return is_final or _MAY_OPEN.match(line) is not None


def _is_final(line: str) -> bool:
    return line.strip().startswith(_FINALS)
