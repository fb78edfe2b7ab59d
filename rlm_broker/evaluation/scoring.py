"""Scores of answers: each compares the text of an answer with its key, and is a number from 0 to 1.

Models wrap an answer in words. A text is therefore read leniently where that cannot turn a wrong answer into a right
one: numbers, choices and codes are found within it, and the last line counts if the whole names several.
"""

import json
import math
import re
import unicodedata
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Final, Literal

Scoring = Literal["exact", "contains", "number", "near", "choice", "set", "absent"]
"""Way in which an answer is compared with its key.

- `exact`: the same text, apart from case, white space and enclosing punctuation. 0 or 1.
- `contains`: the expected text occurs as whole words. 0 or 1.
- `number`: the same number. 0 or 1.
- `near`: 0.75 to the power of the distance between both numbers, as OOLONG scores counts.
- `choice`: the one choice that the answer names. 0 or 1.
- `set`: F1 of the expected elements and those of the answer, in any order.
- `absent`: the answer says that the context does not have it. 0 or 1.
"""
GRADED: Final = ("near", "set")
"""Ways whose scores may lie between 0 and 1."""
NEAR: Final = 0.75
"""Score of a count that is off by one. Each further one multiplies it again."""

_CONCLUSION = re.compile(r"\banswer\b\**(?:\s+is\b)?\s*[:=]?\**", re.IGNORECASE)
_NUMBER = re.compile(r"(?<![\w.])(?<!\w-)[-+\u2212]?(?:\d{1,3}(?:[,'\u2019\u00a0\u202f]\d{3})+(?!\d)|\d+)(?:\.\d+)?")
_ABSENT = re.compile(
    r"(?:\bnot|n['\u2019]t)[ _](?:be )?(?:found|there|present|stated|mentioned|given|provided|specified|listed"
    r"|available|known|in the|contained|included|determined|say|mention|state|contain|include|give|list|find|have"
    r"|appear|occur)\b"
    r"|\bcannot (?:be )?(?:found|find|determined|answered)\b|\bno (?:such|mention|information|record|entry)\b"
    r"|\b(?:there is|there are|has|have|contains?) no\b|\bunknown\b|^\W*(?:none|n/a)\W*$",
    re.IGNORECASE,
)
_BULLET = re.compile(r"^\s*(?:[-*\u2022]|\d{1,3}[.)])\s+")
_EDGES = " \t\r\n.,;:!?\"'`*_()[]{}\u201c\u201d\u2018\u2019\u00ab\u00bb"


@dataclass(frozen=True, slots=True)
class Key:
    """Expected answer of a question, and how an answer is compared with it.

    Attributes:
        scoring: Way of the comparison.
        expected: Text, number or texts; None for `absent`.
        pattern: For `set` and `absent`, a regular expression of an element in an answer. Its groups, or else the whole
            match, are the element. Empty: for `set`, elements are separated by commas, semicolons or lines.
        choices: For `choice`, all texts that an answer may name.
    """

    scoring: Scoring
    expected: str | float | tuple[str, ...] | None
    pattern: str = ""
    choices: tuple[str, ...] = ()

    @property
    def is_graded(self) -> bool:
        """Whether scores between 0 and 1 occur."""
        return self.scoring in GRADED


def score(answer: str | None, key: Key) -> float:
    """Return the score of an answer, from 0 to 1. No answer has the score 0.

    Examples:
        >>> score("The answer is 1,204.", Key("number", 1204))
        1.0
        >>> score("41", Key("near", 42))
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
    """Return the number that an answer gives; None without any.

    It is the one with which the first line begins, if that line has no other; else the last one.
    """
    conclusion = concluding(answer).strip(_EDGES)
    found = _NUMBER.findall(conclusion)
    first = _NUMBER.findall(conclusion.partition("\n")[0])
    begins = bool(first) and conclusion.startswith(first[0]) and len(set(first)) == 1
    return _as_number(first[0] if begins else found[-1]) if found else None


def elements_in(answer: str, pattern: str = "") -> set[str]:
    """Return the elements that an answer lists, normalised.

    Args:
        pattern: Regular expression of one element, see `Key`.
    """
    if pattern:
        found = re.finditer(pattern, answer, re.IGNORECASE)
        return {normalised(" ".join(match.groups()) if match.groups() else match.group()) for match in found}
    return {element for element in map(normalised, _listed(concluding(answer))) if element}


# -- one function for each way of scoring ----------------------------------------------------------------------------


def _exact(answer: str, key: Key) -> float:
    wanted = normalised(str(key.expected))
    return float(wanted in (normalised(answer), normalised(concluding(answer))))


def _contains(answer: str, key: Key) -> float:
    wanted = normalised(str(key.expected))
    return float(re.search(rf"(?<!\w){re.escape(wanted)}(?!\w)", normalised(answer)) is not None)


def _number(answer: str, key: Key) -> float:
    given = number_in(answer)
    return float(given is not None and math.isclose(given, _expected_number(key), rel_tol=1e-9, abs_tol=1e-9))


def _near(answer: str, key: Key) -> float:
    given = number_in(answer)
    return 0.0 if given is None else NEAR ** abs(given - _expected_number(key))


def _choice(answer: str, key: Key) -> float:
    """Compare the one choice that the conclusion, or else its last line, names."""
    conclusion = concluding(answer).strip()
    for text in (conclusion, conclusion.splitlines()[-1]):
        named = [choice for choice in key.choices if _contains(text, Key("contains", choice))]
        if len(named) == 1:
            return float(named[0] == key.expected)
    return 0.0


def _set(answer: str, key: Key) -> float:
    assert isinstance(key.expected, tuple)
    wanted, given = set(map(normalised, key.expected)), elements_in(answer, key.pattern)
    both = len(wanted & given)
    return 2 * both / (len(wanted) + len(given)) if wanted or given else 1.0


def _absent(answer: str, key: Key) -> float:
    """Look for words of absence. An answer that also gives an element is a guess."""
    gives_one = bool(key.pattern and elements_in(answer, key.pattern))
    return float(not gives_one and _ABSENT.search(answer) is not None)


_SCORES: dict[Scoring, Callable[[str, Key], float]] = {
    "exact": _exact,
    "contains": _contains,
    "number": _number,
    "near": _near,
    "choice": _choice,
    "set": _set,
    "absent": _absent,
}


def _expected_number(key: Key) -> float:
    assert isinstance(key.expected, int | float)
    return key.expected


def _as_number(text: str) -> float:
    return float(re.sub(r"[,'\u2019\u00a0\u202f]", "", text).replace("\u2212", "-"))


def _listed(text: str) -> Iterable[str]:
    """Return the parts of a list in an answer: a JSON list, or parts between commas, semicolons, lines and "and"."""
    start, end = text.find("["), text.rfind("]")
    if 0 <= start < end:
        try:
            values = json.loads(text[start : end + 1])
        except (ValueError, RecursionError):
            pass
        else:
            return [str(value) for value in values]
    lines = (_BULLET.sub("", line) for line in text.splitlines())
    return [part for line in lines for part in re.split(r"[,;]|\band\b", line)]
