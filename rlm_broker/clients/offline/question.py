"""What a question asks for, as far as words tell: which must occur, which count, and what is to be done with them."""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

MAX_TERMS = 32
MAX_CHARS = 4_000
"""More than any question needs. A child run's question is its whole prompt, which may be a document: of a longer one
the first and the last half of this are read, where people put the task."""

NOTE = (
    "This is the offline model, a retrieval stand-in without reasoning: it finds paraphrases only by luck and stems "
    "English only. Name a real model with --model NAME (or RLM(model=...))."
)

CJK = "\u3040-\u30ff\u3400-\u9fff\uac00-\ud7af"
"""Scripts without spaces between words: each character is a word of its own here."""

_WORD = re.compile(rf"[{CJK}]|[^\W{CJK}]+(?:[-.:/@'\u2019][^\W{CJK}]+)*")
_QUOTED = re.compile(
    r"\"([^\"]+)\"|\u201c([^\u201d]+)\u201d|\u00ab([^\u00bb]+)\u00bb|`+([^`]+)`+"
    r"|(?<!\w)'([^']+(?:'\w[^']*)*)'(?!\w)|\u2018([^\u2019]+)\u2019(?!\w)"
)
_SMALL_WORDS = """
a about according all also am an and any anybody anyone anything are as at be been being both but by can could
count did do does doing each either else ever every find for from gave get give given gives had has have
having he her here hers him his how i if in into is it its itself just know let list many may me mention
mentioned mentions might more most much must my name named no not of off often on once one only or other our
out over own please said say says shall she should show so some such tell than that the their theirs them then
there these they this those through to too under until up upon us very was we were what what's when where
whether which while who who's whom whose why will with within would you your der die das den dem des ein eine
einer eines einem einen und oder ist sind war waren wer wie wann wo warum welche welcher welches wessen von
vom zu zum zur im mit für auf bei nach aus hat haben wird le la les un une du de et ou est sont qui que quel
quelle quels quelles où quand comment dans pour sur avec au aux el los las una unos del y es son quién qué
cuál cuándo dónde cómo en por para con al
"""
_STOP = frozenset(_SMALL_WORDS.split())


@dataclass(frozen=True, slots=True)
class Term:
    """One word or quoted text of a question.

    Attributes:
        text: As the question writes it.
        is_required: A name, a number or a quotation: an answer without it answers something else.
        is_literal: Quoted: it must occur as it stands, upper and lower case aside.
    """

    text: str
    is_required: bool = False
    is_literal: bool = False

    @property
    def is_exact_only(self) -> bool:
        """Stemming would make another word of it: quotations, numbers, identifiers, short names ('Fes' and 'Fe')."""
        return self.is_literal or (self.is_required and (len(self.text) <= 4 or not self.text.isalpha()))

    @property
    def bound(self) -> Literal["none", "start", "both"]:
        """Where `needle` must stand: anywhere, at the start of a word, or as a whole word."""
        if self.is_literal or re.fullmatch(rf"[{CJK}]", self.text):
            return "none"
        return "both" if self.is_exact_only else "start"

    @property
    def needle(self) -> str:
        """Lower-case text that every form of the term contains: to search for at the speed of `str.find`."""
        text = self.text.lower()
        if self.is_exact_only:
            return text
        longest = max(re.findall(r"[^\W_]+", text), key=len, default=text)
        stem = re.sub(r"(?:ations?|ings?|ed|ies|es|s|ly|ers?|ions?|ments?|e|y)$", "", longest)
        return stem if len(stem) >= 3 else longest

    def occurs_in(self, text: str) -> bool:
        """Whether it stands in `text` as a whole word, upper and lower case aside."""
        if self.is_literal:
            return self.text.lower() in text.lower()
        if re.fullmatch(rf"[{CJK}]", self.text):
            return self.text in text
        # '3.5' is neither in '13.5' nor in '3.51' nor in '1.3.5'.
        pattern = rf"(?<!\w)(?<!\d[.,]){re.escape(self.text)}(?!\w)(?![.,]\d)"
        return re.search(pattern, text, re.IGNORECASE) is not None


def quoted(question: str) -> list[str]:
    """The texts that the question quotes, in order, without their quotation marks."""
    found = (next(text for text in match.groups() if text) for match in _QUOTED.finditer(question))
    return list(dict.fromkeys(text for text in found if text.strip()))


def terms(question: str) -> list[Term]:
    """What an answer should contain, in the question's order, at most `MAX_TERMS`; empty if it is all small words."""
    question = _readable(question)
    found = {text.lower(): Term(text, is_required=True, is_literal=True) for text in quoted(question)}
    rest = _QUOTED.sub(lambda match: " " * len(match.group()), question)
    for text, is_first in _words(rest):
        word = re.sub(r"['\u2019]s$", "", text)
        if word.lower() in _STOP or (len(word) == 1 and word.isascii() and not word.isdigit()):
            continue
        is_name = word[0].isupper() and not is_first and not question.isupper()
        term = Term(word, is_required=is_name or any(char.isdigit() for char in word))
        known = found.setdefault(word.lower(), term)
        if term.is_required and not known.is_required:
            found[word.lower()] = term
    return list(found.values())[:MAX_TERMS]


def _readable(question: str) -> str:
    half = MAX_CHARS // 2
    return question if len(question) <= MAX_CHARS else f"{question[:half]}\n{question[-half:]}"


def _words(text: str) -> Iterator[tuple[str, bool]]:
    """Each word, and whether it begins a sentence, where a capital letter means nothing."""
    end = 0
    for match in _WORD.finditer(text):
        between = text[end : match.start()]
        yield match.group(), end == 0 or re.search(r"[.!?:\n]", between) is not None
        end = match.end()


@dataclass(frozen=True, slots=True)
class Count:
    """Count texts exactly.

    Attributes:
        texts: What to count; empty counts the lines themselves.
        unit: What the question asks for.
    """

    texts: tuple[str, ...]
    unit: Literal["lines", "occurrences"]


@dataclass(frozen=True, slots=True)
class Attempt:
    """One way to collect what is tallied.

    Attributes:
        needles: Only lines that contain one of them are looked at; none means all of the text.
        pattern: A regular expression with one group, which is tallied.
    """

    needles: tuple[str, ...]
    pattern: str


@dataclass(frozen=True, slots=True)
class Ranking:
    """Rank what occurs most often: the first attempt that finds anything counts."""

    top: int
    attempts: tuple[Attempt, ...]


@dataclass(frozen=True, slots=True)
class Find:
    """Find the sentence or line that says it."""


def shape(question: str) -> Count | Ranking | Find:
    """What the question asks for, by its form."""
    question = _readable(question)
    return _count(question) or _tally(question) or Find()


_COUNTING = re.compile(
    r"\bhow (?:many|often)\b|\bnumber of (?:lines|occurrences|times)\b|\bcount (?:the|of|all|how)\b", re.IGNORECASE
)
_LINES = re.compile(r"\b(?:lines?|rows?|entries|records?)\b", re.IGNORECASE)
_OCCURRENCES = re.compile(r"\b(?:times|occurrences?|often)\b", re.IGNORECASE)


def _count(question: str) -> Count | None:
    if not _COUNTING.search(question):
        return None
    rest = _QUOTED.sub("", question)
    is_lines = _LINES.search(rest) is not None and not re.search(r"\btimes|occurrences?\b", rest, re.IGNORECASE)
    unit: Literal["lines", "occurrences"] = "lines" if is_lines else "occurrences"
    if texts := quoted(question):
        return Count(tuple(texts), unit)
    if re.search(
        r"\b(?:how many|number of) (?:lines|rows)\b(?: of text)?\s*(?:$|\?|(?:are|is|does|has|have|in)\b)",
        rest,
        re.IGNORECASE,
    ):
        bare = [
            term for term in terms(rest) if term.text.lower() not in {"lines", "rows", "text", "file", "context", "log"}
        ]
        if not bare:
            return Count((), "lines")
    # Without quotation marks only what cannot be meant otherwise: a log level or a code, of lines or occurrences.
    codes = [term.text for term in terms(rest) if re.fullmatch(r"[A-Z][A-Z0-9_]{2,}", term.text)]
    if len(codes) == 1 and (is_lines or _OCCURRENCES.search(rest)):
        return Count((codes[0],), unit)
    return None


_IPV4 = Attempt((), r"(?<![\w.])(\d{1,3}\.\d{1,3}\.\d{1,3}\.\d{1,3})(?![\w.]*\d)")
_EMAIL = Attempt(("@",), r"([\w.+-]{1,64}@[\w-]{1,63}(?:\.[\w-]{1,63})+)")
_LEVELS = Attempt((), r"\b(TRACE|DEBUG|INFO|NOTICE|WARN|WARNING|ERROR|CRITICAL|FATAL)\b")
_ERRORS = Attempt(("ERROR", "FATAL", "CRITICAL", "SEVERE"), r"\b(?:ERROR|FATAL|CRITICAL|SEVERE)\b[\]\s:|>-]*(.+)")
_EXCEPTIONS = Attempt(("Error", "Exception"), r"\b([\w.]{0,80}(?:Error|Exception))\b")
_WARNINGS = Attempt(("WARN",), r"\bWARN(?:ING)?\b[\]\s:|>-]*(.+)")
_PATHS = Attempt((), r"\b(?:GET|POST|PUT|PATCH|DELETE|HEAD) (\S+)")
_STATUS = Attempt(("HTTP/",), r"HTTP/[\d.]+\"?\s+(\d{3})\b")
_KNOWN: tuple[tuple[str, tuple[Attempt, ...]], ...] = (
    (r"e-?mails?", (_EMAIL,)),
    (r"ips?|address(?:es)?|clients?", (_IPV4, _EMAIL)),
    (r"exceptions?", (_EXCEPTIONS, _ERRORS)),
    (r"errors?|failures?", (_ERRORS, _EXCEPTIONS, Attempt(("error",), r"\berror\b[\]\s:|>-]*(.+)"))),
    (r"warnings?", (_WARNINGS,)),
    (r"levels?", (_LEVELS,)),
    (r"status|codes?", (_STATUS,)),
    (r"paths?|urls?|endpoints?|pages?", (_PATHS,)),
    (r"words?", (Attempt((), r"([^\W\d_]{2,})"),)),
    (r"lines?", (Attempt((), r"(?m)^[ \t]*(\S.*)$"),)),
)
_NUMBERS = {"two": 2, "three": 3, "four": 4, "five": 5, "ten": 10}
_N = r"(\d{1,3}|two|three|four|five|ten)"
_RANKED = re.compile(
    rf"\btop {_N}\s+(.{{2,40}})"
    rf"|(?:\b{_N} )?\bmost (?:common|frequent|commonly|frequently|often)\b(?: \w+ing| used| seen)?\s+(.{{2,40}})",
    re.IGNORECASE,
)
_WHICH = re.compile(r"\b(?:which|what)\s+(.{2,40}?)\s.*\bmost (?:often|frequently|common)\b", re.IGNORECASE)


def _tally(question: str) -> Ranking | None:
    rest = _QUOTED.sub("", question)
    if ranked := _RANKED.search(rest):
        number, nouns = ranked.group(1) or ranked.group(3), ranked.group(2) or ranked.group(4)
    elif asked := _WHICH.search(rest):
        number, nouns = None, asked.group(1)
    else:
        return None
    top = _NUMBERS.get(number.lower()) or int(number) if number else 1
    attempts: list[Attempt] = []
    for noun in re.findall(r"[\w-]+", nouns.lower())[:3]:
        if noun in _STOP:
            break
        attempts += next((known for pattern, known in _KNOWN if re.fullmatch(pattern, noun)), ())
        key = noun.removesuffix("s")
        needles = (f"{key}=", f"{key}:", f"{key}s=", f"{key}s:")
        attempts.append(Attempt(needles, rf"\b{key}s?[=:] ?[\"']?([^\s\"',;&)\]]+)"))
    return Ranking(max(1, top), tuple(attempts)) if attempts else None
