"""The final answer of a reply: `FINAL(...)`, `SUBMIT(...)` or `FINAL_VAR(...)` at the start of a line.

The content is prose as often as it is an expression: it has smileys, half-open intervals, enumerations `1) ... 2) ...`
and apostrophes. So its end is looked for in several ways, from strict to lenient, and the first one that ends its line
wins. If in doubt, it is no answer: a mention taken for an answer ends the run with a wrong one, while an answer taken
for a mention costs one more turn.
"""

import keyword
import re
from bisect import bisect_right
from collections.abc import Sequence

from msgspec import Struct

from rlm_broker.values.parsing.notes import EMPTY_FINAL, FINAL_IN_A_SENTENCE, FINAL_VAR_WITHOUT_NAME, Note

_CALL = re.compile(
    r"""
    ^[ \t]*+
    (?P<quotation>(?:>[ \t]*+)*+)
    (?>(?:(?:[-*+•]|\d{1,3}[.)])[ \t]++)?)
    (?>(?:\#{1,6}[ \t]++)?)
    [*_]{0,3}
    (?P<ticks>`{0,3})
    (?P<name>FINAL_VAR|FINAL|SUBMIT)\(
    """,
    re.MULTILINE | re.VERBOSE,
)
"""Beginning of a final answer: at the start of a line, or behind a quotation mark, a list marker, a heading or
emphasis."""
_NOTHING_MORE = re.compile(r"[\s*_`.!;,]*+")
"""Emphasis and punctuation behind an answer on its line."""
_SENTENCE_GOES_ON = re.compile(r"[*_`,]*+[ \t]++[a-z]")
"""Words behind an answer's parenthesis: it is only mentioned in a sentence."""
_QUOTATION_MARK = re.compile(r"^[ \t]*+>[ \t]?", re.MULTILINE)
_PARENTHESIS = re.compile(r"[()]")
_PARENTHESIS_OR_QUOTE = re.compile(r"""[()"']""")
_PLACEHOLDERS = frozenset({"", "...", "…"})
"""Contents without an answer: a model quotes its instructions."""

_MAX_QUOTED_CHARS = 100_000
"""Longest answer, in characters, read with its quotations. A longer one is read by its parentheses alone."""


class FinalText(Struct, frozen=True):
    """The answer itself."""

    text: str


class FinalVar(Struct, frozen=True):
    """Name of the REPL's variable holding the answer. The REPL looks it up, and reports if there is none."""

    name: str


class Finals(Struct, frozen=True):
    """Result of the search for an answer: the first valid one or None, from the start of its line to behind its closing
    parenthesis, and notes on what is almost one."""

    final: FinalText | FinalVar | None
    start: int = 0
    end: int = 0
    notes: tuple[Note, ...] = ()


def find_final(text: str, prose: str, code_starts: Sequence[int]) -> Finals:
    """Return the first valid final answer of a reply.

    Args:
        prose: The reply with its fences blanked; equally long.
        code_starts: Offsets of the fences to run, ascending. An answer with unmatched parentheses ends before the next.
    """
    calls = list(_CALL.finditer(prose))
    search = _EndSearch(prose)
    notes: list[Note] = []
    call_starts = [call.start() for call in calls]
    for call in calls:
        start = call.end()
        stop = min(_next(call_starts, start, len(prose)), _next(code_starts, start, len(prose)))
        end = search.end_of(start, stop)
        if end is None:
            continue
        content = text[start:end].strip()
        if call["quotation"]:
            content = _QUOTATION_MARK.sub("", content)
        found = _final(call["name"], content)
        line_ends = search.ends_its_line(end)
        if found is None and (line_ends or call["name"] == "FINAL_VAR"):
            reason = FINAL_VAR_WITHOUT_NAME if call["name"] == "FINAL_VAR" else EMPTY_FINAL
            notes.append(Note(call.start(), reason))
        elif found is not None and not line_ends and (call["ticks"] or _SENTENCE_GOES_ON.match(prose, end + 1)):
            notes.append(Note(call.start(), FINAL_IN_A_SENTENCE))
        elif found is not None:
            return Finals(found, call.start(), end + 1, tuple(notes))
    return Finals(None, notes=tuple(notes))


def _next(starts: Sequence[int], position: int, default: int) -> int:
    number = bisect_right(starts, position)
    return starts[number] if number < len(starts) else default


def _final(name: str, content: str) -> FinalText | FinalVar | None:
    if name == "FINAL_VAR":
        variable = content[1:-1] if content[:1] in tuple("\"'`") and content[:1] == content[-1:] else content
        return FinalVar(variable) if variable.isidentifier() and not keyword.iskeyword(variable) else None
    answer = _unquoted(content)
    return None if answer.strip() in _PLACEHOLDERS else FinalText(answer)


def _unquoted(content: str) -> str:
    """Return `content` without the one pair of quotes around all of it. Backslashes stay: in prose most are LaTeX."""
    for quote in ('"""', "'''", '"', "'"):
        inner = content[len(quote) : -len(quote)]
        if content == quote + inner + quote:
            return inner if _is_one_quotation(inner, quote) else content
    return content


def _is_one_quotation(inner: str, quote: str) -> bool:
    """Whether quotes around `inner` are a pair, and not, as in `"a" and "b"`, halves of two pairs."""
    at = inner.find(quote)
    while at >= 0:
        before, after = inner[at - 1 : at], inner[at + len(quote) : at + len(quote) + 1]
        is_apostrophe_or_escaped = before == "\\" or (before.isalnum() and after.isalnum())
        if not is_apostrophe_or_escaped:
            return not before.isalnum() and (after.isalnum() or after == quote)  # if it opens a quotation inside
        at = inner.find(quote, at + 1)
    return True


class _EndSearch:
    """Finds the parenthesis that closes a call. Several calls of one text share one budget of characters."""

    def __init__(self, prose: str) -> None:
        self._prose = prose
        self._last_closing = prose.rfind(")")
        self._left = len(prose) + 3 * _MAX_QUOTED_CHARS

    def end_of(self, start: int, stop: int) -> int | None:
        """Return the offset of the parenthesis that closes a call, whose content begins at `start`; None if there is
        none. With unmatched parentheses, the answer may reach to `stop`."""
        if self._last_closing < start or self._left <= 0:
            return None
        end = self._matching_outside_quotations(start)
        if end is not None and self.ends_its_line(end):
            return end
        plain_end = self._matching(start)
        if plain_end is not None and self.ends_its_line(plain_end):
            return plain_end
        end = plain_end if end is None else end
        end_of_line = self._end_of_line(start if end is None else end)
        if end is None:
            last = self._last_before(start, stop)
            return self._last_before(start, min(end_of_line, stop)) if last is None else last
        for bound in (end_of_line, stop):
            last = self._last_before(end + 1, bound)
            if last is not None and self._prose.count(")", end + 1, last + 1) > self._prose.count("(", end + 1, last):
                return last
        return end

    def ends_its_line(self, end: int) -> bool:
        """Whether only emphasis and punctuation follow the parenthesis at `end` on its line."""
        return _NOTHING_MORE.fullmatch(self._prose, end + 1, self._end_of_line(end)) is not None

    def _end_of_line(self, position: int) -> int:
        end = self._prose.find("\n", position)
        return len(self._prose) if end < 0 else end

    def _last_before(self, start: int, bound: int) -> int | None:
        """Return the last closing parenthesis in between, if only emphasis and punctuation follow it before `bound`."""
        last = self._prose.rfind(")", start, bound)
        return last if last >= 0 and _NOTHING_MORE.fullmatch(self._prose, last + 1, bound) else None

    def _matching(self, start: int) -> int | None:
        depth = 1
        bound = self._last_closing + 1
        for token in _PARENTHESIS.finditer(self._prose, start, bound):
            depth += 1 if token[0] == "(" else -1
            if depth == 0:
                bound = token.end()
                break
        self._left -= bound - start
        return None if depth else bound - 1

    def _matching_outside_quotations(self, start: int) -> int | None:
        quotes = _Quotes(self._prose, start)
        depth, at = 1, start
        bound = min(self._last_closing + 1, start + _MAX_QUOTED_CHARS)
        while depth and (token := _PARENTHESIS_OR_QUOTE.search(self._prose, at, bound)):
            at = token.end()
            if token[0] == "(":
                depth += 1
            elif token[0] == ")":
                depth -= 1
            else:
                at = quotes.end_of(token.start())
        self._left -= (at if depth == 0 else bound) - start
        return None if depth else at - 1


class _Quotes:
    """Tells quotations, whose parentheses do not count, from apostrophes and inches."""

    def __init__(self, prose: str, start: int) -> None:
        self._prose = prose
        self._start = start
        self._hopeless_before: dict[str, int] = {}

    def end_of(self, at: int) -> int:
        """Return the offset behind the quotation that the quote at `at` opens; behind the quote itself if it opens
        none.

        A quotation ends on its line, unless it is the first thing of the answer.
        """
        prose, quote = self._prose, self._prose[at]
        if at < self._hopeless_before.get(quote, 0) or prose[at - 1].isalnum():
            return at + 1
        is_first = not prose[self._start : at].strip() if at - self._start < 80 else False
        line_end = len(prose) if is_first else prose.find("\n", at)
        bound = len(prose) if line_end < 0 else line_end
        closing = prose.find(quote, at + 1, bound)
        while closing >= 0:
            if prose[closing - 1] != "\\" and not prose[closing + 1 : closing + 2].isalnum():
                return closing + 1
            closing = prose.find(quote, closing + 1, bound)
        self._hopeless_before[quote] = bound
        return at + 1
