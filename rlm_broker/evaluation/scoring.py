"""Scores of answers: each compares the text of an answer with its key, and is a number from 0 to 1.

Models wrap an answer in words, and plain completions use more of them than runs. A text is therefore read leniently
where that cannot turn a wrong answer into a right one, so that no way of asking gains by its form: "42 of 130" is 42,
"There isn't one." says that there is none, and 2024-03 is March 2024.
"""

import math
import re
import unicodedata
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final, Literal

Scoring = Literal["exact", "contains", "number", "near", "choice", "set", "date", "absent"]
"""Way in which an answer is compared with its key.

- `exact`: the same text, apart from case, white space and enclosing punctuation. 0 or 1.
- `contains`: the expected text occurs as whole words. 0 or 1.
- `number`: the same number. 0 or 1.
- `near`: 0.75 to the power of the distance between both numbers, as OOLONG scores counts.
- `choice`: the one choice that the answer names. 0 or 1.
- `set`: F1 of the expected elements and those of the answer, in any order.
- `date`: the same day, written as 2024-03-09, or the same month, written as 2024-03. 0 or 1.
- `absent`: the answer says that the context does not have it. 0 or 1.
"""
NEAR: Final = 0.75
"""Score of a count off by one. Each further one multiplies it again."""

_CONCLUSION = re.compile(r"\banswer\b\**(?:\s+is\b)?\s*[:=]?\**", re.IGNORECASE)
_DIGITS = r"(?:\d{1,3}(?:[,'\u2019\u00a0\u202f]\d{3})+(?!\d)|\d+)(?:\.\d+)?"
_NUMBER = re.compile(rf"(?<![\w.])(?<!\w-)[-+\u2212]?{_DIGITS}")
_TOTALS = (
    re.compile(rf"(?:\bof|\bamong|/)\s*(?:the|all|all the|these)?\s*{_DIGITS}|{_DIGITS}\s*(?:%|percent)", re.I),
    re.compile(rf"\b(?:in|from|all)\s+(?:the|all|all the)?\s*{_DIGITS}", re.I),
)
"""A total of which a count is a part: "of 130", then "in 130 lines"."""
_ZERO = re.compile(r"\b(?:no|none|nobody|zero)\b", re.I)
_TOLD = (
    "found|find|there|present|stated?|mention(?:ed)?|given?|provided?|specified|list(?:ed)?|available|known|in the"
    "|contain(?:ed)?|included?|determined?|say|said|tell|told|have|appear|occur|any\\w*|one|exist|identified|answered|clear"
)
_ABSENT = re.compile(
    rf"(?:\bnot|n['\u2019]t|\bcannot)[ _](?:\w+ ){{0,2}}?(?:{_TOLD})\b"
    r"|\bno[ -]?(?:such|mention|information|record|entry|one|body|answer|person|evidence|indication)\b"
    r"|\b(?:is|are|has|have|contains?|names?|gives?|says?|tells?|mentions?) (?:no|none|nothing)\b|\bunknown\b"
    r"|^\W*(?:none|n/a|no)\b",
    re.IGNORECASE,
)
_GUESS = re.compile(r"\b(?:perhaps|maybe|may|might|could|probably|possibly|likely|guess|presumably|unless)\b", re.I)
_PIECE = re.compile(r"[.;!?\n]+\s*")
_MONTHS: Final = ("Jan", "Feb", "Mar", "Apr", "May", "Jun", "Jul", "Aug", "Sep", "Oct", "Nov", "Dec")
_MONTH = (
    r"\b(Jan(?:uary)?|Feb(?:ruary)?|Mar(?:ch)?|Apr(?:il)?|May|June?|July?|Aug(?:ust)?|Sept?(?:ember)?|Oct(?:ober)?"
    r"|Nov(?:ember)?|Dec(?:ember)?)\b\.?"
)
_DATES = (
    (re.compile(r"\b(\d{4})[-/](\d\d?)(?:[-/](\d\d?))?\b"), (0, 1, 2)),
    (re.compile(r"\b(\d\d?)/(\d\d?)/(\d{4})\b"), (2, 0, 1)),
    (re.compile(rf"\b(\d\d?)(?:st|nd|rd|th)?(?: of)? {_MONTH}(?:,? (\d{{4}}))?"), (2, 1, 0)),
    (re.compile(rf"{_MONTH}(?: (\d\d?)(?:st|nd|rd|th)?\b)?(?:,? (?:of )?(\d{{4}}))?"), (2, 0, 1)),
)
"""Forms of a date, and the groups of its year, month and day."""
_BULLET = re.compile(r"^\s*(?:[-*\u2022]|\d{1,3}[.)])\s+")
_EDGES = " \t\r\n.,;:!?\"'`*_()[]{}\u201c\u201d\u2018\u2019\u00ab\u00bb"


@dataclass(frozen=True, slots=True)
class Key:
    """Expected answer of a question, and how an answer is compared with it.

    Attributes:
        scoring: Way of the comparison.
        expected: Text, number or texts; None for `absent`.
        pattern: For `set`, a regular expression of an element in an answer. Empty: elements are separated by commas,
            semicolons or lines.
        choices: For `choice` and `absent`, all texts that an answer may name.
    """

    scoring: Scoring
    expected: str | float | tuple[str, ...] | None
    pattern: str = ""
    choices: tuple[str, ...] = ()


def score(answer: str | None, key: Key) -> float:
    """Return the score of an answer, from 0 to 1. No answer has the score 0.

    Examples:
        >>> score("The answer is 1,204.", Key("number", 1204))
        1.0
        >>> score("41 of 130", Key("near", 42))
        0.75
    """
    return 0.0 if answer is None or not answer.strip() else _SCORES[key.scoring](answer, key)


def normalised(text: str) -> str:
    """Return a text for comparison: compatible characters, folded case, single spaces, no enclosing punctuation."""
    return " ".join(unicodedata.normalize("NFKC", text).casefold().split()).strip(_EDGES)


def concluding(answer: str) -> str:
    """Return what stands behind the last "answer:" or "answer is" of an answer; the whole without one."""
    ends = [match.end() for match in _CONCLUSION.finditer(answer)]
    rest = answer[ends[-1] :] if ends else ""
    return rest if rest.strip(_EDGES) else answer


def number_in(answer: str) -> float | None:
    """Return the number given by an answer; None if it gives none.

    Totals count only if there is no other number. Of several, it is the one at the beginning of the first
    line, if that line has no other; else the last one. Without any digit, "none" is 0.
    """
    conclusion = concluding(answer).strip(_EDGES)
    for total in _TOTALS:
        parts = total.sub("", conclusion)
        conclusion = parts if _NUMBER.search(parts) else conclusion
    found = _NUMBER.findall(conclusion)
    if not found:
        return 0.0 if _ZERO.search(conclusion) else None
    first = _NUMBER.findall(conclusion.partition("\n")[0])
    begins = bool(first) and conclusion.strip(_EDGES).startswith(first[0]) and len(set(first)) == 1
    return float(re.sub(r"[,'\u2019\u00a0\u202f]", "", first[0] if begins else found[-1]).replace("\u2212", "-"))


def dates_in(text: str) -> list[tuple[int | None, int, int | None]]:
    """Return the years, months and days of the dates in a text; None for a missing year or day."""
    found = {}
    for pattern, places in _DATES:
        for match in pattern.finditer(text):
            year, month, day = (match.groups()[place] for place in places)
            number = int(month) if month.isdigit() else _MONTHS.index(month[:3]) + 1
            found[match.start()] = int(year) if year else None, number, int(day) if day else None
        text = pattern.sub(lambda match: " " * len(match[0]), text)
    return [found[place] for place in sorted(found)]


def elements_in(answer: str, pattern: str = "") -> set[str]:
    """Return the elements listed in an answer, normalised; see `Key.pattern`."""
    if pattern:
        return {normalised(match.group()) for match in re.finditer(pattern, answer, re.IGNORECASE)}
    lines = (_BULLET.sub("", line) for line in concluding(answer).splitlines())
    return {normalised(part) for line in lines for part in re.split(r"[,;]|\band\b", line)} - {""}


# -- one function for each way of scoring ----------------------------------------------------------------------------


def _names(text: str, wanted: str) -> bool:
    """Whether a text has another one as whole words, in the singular or the plural."""
    return re.search(rf"(?<!\w){re.escape(normalised(wanted))}s?(?!\w)", normalised(text)) is not None


def _distance(answer: str, key: Key) -> float:
    """Return how far the number of an answer is from the expected one; infinity without one."""
    assert isinstance(key.expected, int | float)
    given = number_in(answer)
    return math.inf if given is None else abs(given - key.expected)


def _choice(answer: str, key: Key) -> float:
    """Compare the one choice named in the conclusion, or else in its last line, or else in its first sentence."""
    conclusion = concluding(answer).strip()
    for text in (conclusion, conclusion.splitlines()[-1], _PIECE.split(conclusion)[0]):
        named = [choice for choice in key.choices if _names(text, choice)]
        if len(named) == 1:
            return float(named[0] == key.expected)
    return 0.0


def _set(answer: str, key: Key) -> float:
    assert isinstance(key.expected, tuple)
    wanted, given = set(map(normalised, key.expected)), elements_in(answer, key.pattern)
    both = len(wanted & given)
    return 2 * both / (len(wanted) + len(given)) if wanted or given else 1.0


def _date(answer: str, key: Key) -> float:
    """Compare the last date of the conclusion; for a day, the last one with a day. The year may be left out."""
    (year, month, day) = dates_in(str(key.expected))[0]
    given = [each for each in dates_in(concluding(answer)) if day is None or each[2] is not None]
    return float(bool(given) and given[-1][0] in (year, None) and given[-1][1] == month and day in (given[-1][2], None))


def _absent(answer: str, key: Key) -> float:
    """Look for words of absence in the first or the last sentence. A guess beside them is a wrong answer."""
    pieces = [piece for piece in _PIECE.split(concluding(answer)) if piece.strip()]
    guesses = (piece for piece in pieces if _GUESS.search(piece))
    if any(_names(piece, choice) for piece in guesses for choice in key.choices):
        return 0.0
    return float(any(_ABSENT.search(piece) for piece in (pieces[:1] + pieces[-1:])))


_SCORES: dict[Scoring, Callable[[str, Key], float]] = {
    "exact": lambda answer, key: float(normalised(str(key.expected)) in map(normalised, (answer, concluding(answer)))),
    "contains": lambda answer, key: float(_names(answer, str(key.expected))),
    "number": lambda answer, key: float(math.isclose(_distance(answer, key), 0, abs_tol=1e-9)),
    "near": lambda answer, key: NEAR ** _distance(answer, key),
    "choice": _choice,
    "set": _set,
    "date": _date,
    "absent": _absent,
}
