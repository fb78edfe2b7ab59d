"""The terms of a question: the words and quotations that an answer must or should contain."""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from rlm_broker.clients.offline.languages import STOP, beginning, language_of, synonyms

MAX_TERMS = 32
"""Maximum terms of a question; further ones are ignored."""
MAX_CHARS = 4_000
"""Maximum characters of a question that are read; of a longer one its first and last half of this.

A child run's question is its whole prompt, which may be a document. People put the task at its beginning or its end.
"""

NOTE = (
    "This is the offline model, a retrieval stand-in without reasoning: it finds words and synonyms, and computes "
    "what its rules for tables and logs take. Name a real model with --model NAME (or RLM(model=...))."
)

CJK = "\u3040-\u30ff\u3400-\u9fff\uac00-\ud7af"
"""Character ranges of scripts without spaces between words. Each character counts as a word."""

_WORD = re.compile(rf"[{CJK}]|[^\W{CJK}]+(?:[-.:/@'\u2019][^\W{CJK}]+)*")
QUOTED = re.compile(
    r"\"([^\"]+)\"|\u201c([^\u201d]+)\u201d|\u00ab([^\u00bb]+)\u00bb|`+([^`]+)`+"
    r"|(?<!\w)'([^']+(?:'\w[^']*)*)'(?!\w)|\u2018([^\u2019]+)\u2019(?!\w)"
)
_HOW = re.compile(r"(?i)\bhow (?:long|much|many|old|far|big|tall|high|expensive)\b")
"""Questions for a number. "long" or "old" need not occur in the answer."""


@dataclass(frozen=True, slots=True)
class Term:
    """One word or quotation of a question.

    Attributes:
        text: Text as the question writes it.
        is_required: Whether it is a name, a number or a quotation. A text without it answers another question.
        is_literal: Whether it is quoted, so that it must occur exactly, except for case.
        language: Language of the question, whose rules give the forms of the word.
    """

    text: str
    is_required: bool = False
    is_literal: bool = False
    language: str = "english"

    @property
    def is_exact_only(self) -> bool:
        """Whether stemming would change the word's meaning, as for quotations, numbers and short names ("Fes",
        "Fe")."""
        return self.is_literal or (self.is_required and (len(self.text) <= 4 or not self.text.isalpha()))

    @property
    def bound(self) -> Literal["none", "start", "both"]:
        """Place of a needle: anywhere ("none"), at the start of a word ("start"), or as a whole word ("both")."""
        if self.is_literal or re.fullmatch(rf"[{CJK}]", self.text):
            return "none"
        return "both" if self.is_exact_only else "start"

    @property
    def needles(self) -> list[str]:
        """Lower-case texts for `str.find`: each form of the term or of a synonym contains one of them."""
        text = self.text.lower()
        if self.is_exact_only:
            return [text]
        longest = max(re.findall(r"[^\W_]+", text), key=len, default=text)
        return list(dict.fromkeys([self._start(longest), *(self._start(word) for word in self.synonyms)]))

    @property
    def synonyms(self) -> tuple[str, ...]:
        """Words that may stand for the term in a text."""
        return () if self.is_required or self.language != "english" else synonyms(self.text)

    def _start(self, word: str) -> str:
        if self.language != "english":
            return beginning(word, self.language)
        stem = re.sub(r"(?:ations?|ings?|ed|ies|es|s|ly|ers?|ions?|ments?|e|y)$", "", word)
        return stem if len(stem) >= 3 else word

    def occurs_in(self, text: str) -> bool:
        """Whether the term occurs in `text` as a whole word, regardless of case."""
        if self.is_literal:
            return self.text.lower() in text.lower()
        if re.fullmatch(rf"[{CJK}]", self.text):
            return self.text in text
        # "3.5" does not occur in "13.5", "3.51" or "1.3.5".
        pattern = rf"(?<!\w)(?<!\d[.,]){re.escape(self.text)}(?!\w)(?![.,]\d)"
        return re.search(pattern, text, re.IGNORECASE) is not None


def quoted(question: str) -> list[str]:
    """Return the quotations of a question in order, without quotation marks."""
    found = (next(text for text in match.groups() if text) for match in QUOTED.finditer(question))
    return list(dict.fromkeys(text for text in found if text.strip()))


def terms(question: str) -> list[Term]:
    """Return the terms of a question in order, at most `MAX_TERMS`; empty if it has only small words."""
    question = _HOW.sub("how", readable(question))
    language = language_of(question)
    small = STOP["english"] | STOP[language]
    found = {text.lower(): Term(text, is_required=True, is_literal=True) for text in quoted(question)}
    rest = QUOTED.sub(lambda match: " " * len(match.group()), question)
    for text, is_first in _words(rest):
        word = re.sub(r"['\u2019]s$", "", text)
        if word.lower() in small or (len(word) == 1 and word.isascii() and not word.isdigit()):
            continue
        # German nouns all begin with a capital letter, so it does not mark a name there.
        is_name = word[0].isupper() and not is_first and not question.isupper() and language != "german"
        term = Term(word, is_required=is_name or any(char.isdigit() for char in word), language=language)
        known = found.setdefault(word.lower(), term)
        if term.is_required and not known.is_required:
            found[word.lower()] = term
    return list(found.values())[:MAX_TERMS]


def readable(question: str) -> str:
    """Return the question, or both ends of one longer than `MAX_CHARS`."""
    half = MAX_CHARS // 2
    return question if len(question) <= MAX_CHARS else f"{question[:half]}\n{question[-half:]}"


def _words(text: str) -> Iterator[tuple[str, bool]]:
    """Yield each word, and whether it begins a sentence, where a capital letter does not mark a name."""
    end = 0
    for match in _WORD.finditer(text):
        between = text[end : match.start()]
        yield match.group(), end == 0 or re.search(r"[.!?:\n]", between) is not None
        end = match.end()
