"""The shape of a question, by regular expressions: an exact count of texts, a ranking by frequency, or a search."""

import re
from dataclasses import dataclass
from typing import Literal

from rlm_broker.clients.offline.question import QUOTED, quoted, readable


@dataclass(frozen=True, slots=True)
class Count:
    """A question for an exact count of texts.

    Attributes:
        texts: Texts to count; empty counts the lines.
        unit: Unit that the question asks for. Rows are those of a table, or lines if there is no table.
        joined: Whether lines must have all, any or none of the texts; "each" counts the texts one by one.
    """

    texts: tuple[str, ...]
    unit: Literal["lines", "rows", "occurrences", "words"]
    joined: Literal["each", "all", "any", "none"] = "each"


@dataclass(frozen=True, slots=True)
class Attempt:
    """One way to collect texts for a ranking.

    Attributes:
        needles: Only lines with one of these are read; if there are none, all of the text is.
        pattern: Regular expression with one group, whose matches are counted.
    """

    needles: tuple[str, ...]
    pattern: str


@dataclass(frozen=True, slots=True)
class Ranking:
    """A question for the most frequent texts. The first attempt that finds a text decides."""

    top: int
    attempts: tuple[Attempt, ...]


@dataclass(frozen=True, slots=True)
class Find:
    """A question for the sentence or line that has the answer."""


def shape(question: str) -> Count | Ranking | Find:
    """Return the shape of a question. A word that no rule takes makes it a `Find`."""
    text = readable(question)
    if len(text) > 600:  # a child's prompt, whose task stands at its end or its beginning
        text = text[-300:].rpartition("\n")[2] if "\n" in text[-300:] else _last_sentence(text)
    return _count(text) or _tally(text) or Find()


def _last_sentence(text: str) -> str:
    """Return the last question of a long text, from the word that begins it."""
    found = list(re.finditer(r"(?i)\b(?:how (?:many|often)|number of|count)\b", text))
    return text[found[-1].start() :] if found else text


_SUBJECT = (
    r"(?:the |this |that |given |whole |entire |my |our )*"
    r"(?:file|text|log|logs|context|document|data|input|files|table|csv|book)"
)
_WRAP = re.compile(
    r"^(?:please |can you |could you |tell me |show me |give me |what is |the |exact |total )+", re.IGNORECASE
)
_PLACE = re.compile(
    rf"\s+(?:in|of|from|within|across)(?: all(?: of)?)? {_SUBJECT}$|\s+(?:in total|overall|altogether)$", re.IGNORECASE
)
_LINE = r"(?:lines?|rows?|entries|entry|records?|log lines?)"
_MANY = r"(?:how many|count(?: the| of| all| how many)*|number of|total number of)"
_HOLD = (
    r"(?:that |which |do |does |are |is |there )*(?:contain(?:s|ing)?|have|has|having|with|includ(?:e|es|ing)|"
    r"mention(?:s|ing)?)"
    r"(?: the)?(?: text| word| string| phrase)?"
)
_NOT_HOLD = (
    r"(?:that |which )?(?:do not|don't|does not|doesn't) (?:contain|have|include|mention)"
    r"(?: the)?(?: text| word| string| phrase)?|"
    r"without(?: the)?(?: text| word| string| phrase)?|not containing"
)
_BE = r"(?: (?:are|is|there|in it|does it have|do we have|occur|appear|are there|does (?:it|that|this) have))*"
_Q = r"Q(?:(?:,? (?:and|or) |, )(?:the )?Q)*"
_COUNTS: tuple[tuple[str, str, str], ...] = (
    (rf"{_MANY} {_LINE}(?: of text)?(?: are(?: there)?| is| does| has| have|{_BE})(?: {_SUBJECT})?"
     r"(?: have| has| contain)?", "lines", "each"),
    (rf"{_MANY} {_LINE} (?:{_NOT_HOLD}) {_Q}", "lines", "none"),
    (rf"{_MANY} {_LINE} {_HOLD} Q(?:,? and (?:how many|how often) Q)+", "lines", "each"),
    (rf"{_MANY} {_LINE} {_HOLD} (?:both )?{_Q}", "lines", "all"),
    (rf"{_MANY} {_LINE} {_HOLD} (?:either )?{_Q}", "lines", "any"),
    (rf"(?:how many times|how often|number of times) (?:do |does |is |are |the |word |text |string |phrase )*{_Q}"
     r"(?: (?:in|of|the|lines?|occurs?|appears?|mentioned|there|used|written|said|come up))*", "occurrences", "each"),
    (rf"{_MANY} (?:occurrences?|times|mentions?) (?:of |the |word |text )*{_Q}{_BE}", "occurrences", "each"),
    (rf"{_MANY} {_Q}{_BE}", "occurrences", "each"),
    (r"(?:how many times|how often|number of times) (?:do |does |is |the )*"
     r"(?:word |name |(?=(?-i:[A-Z])))(?P<word>[^\W\d_]+)"
     r" (?:occur|appear|mentioned|used)", "words", "each"),
)  # fmt: skip


def _count(question: str) -> Count | None:
    texts = quoted(question)
    rest = " ".join(QUOTED.sub(" Q ", question).split()).rstrip(" ?.!")
    rest = _WRAP.sub("", _PLACE.sub("", rest))
    code = None
    if not texts:
        # Without quotation marks, only a log level or a code in capital letters is clear enough to count.
        code = re.fullmatch(
            rf"{_MANY} (?P<code>[A-Z][A-Z0-9_]{{2,}}) (?:{_LINE}|(?P<times>occurrences?)){_BE}|"
            r"(?:how many times|how often) (?:do |does |is |are )?(?P<often>[A-Z][A-Z0-9_]{2,})"
            r"(?: (?:occur|appear|mentioned))?",
            re.sub(r"^How\b|^Count\b|^Number\b", lambda match: match[0].lower(), rest),
        )
    if code:
        unit: Literal["lines", "occurrences"] = "occurrences" if code["times"] or code["often"] else "lines"
        return Count((code["code"] or code["often"],), unit)
    for pattern, kind, joined in _COUNTS:
        match = re.fullmatch(pattern, rest, re.IGNORECASE)
        if match is None or (bool(texts) != ("Q" in rest)):
            continue
        if not texts and kind == "lines" and not re.search(r"\blines?\b", rest, re.IGNORECASE):
            return Count((), "rows")
        if kind == "words":
            return Count((match["word"],), "words")
        if "Q" in rest and " or " in match[0] and joined == "all":
            continue
        if len(texts) == 1 and joined != "none":
            joined = "each"
        return Count(tuple(texts), kind, joined)  # type: ignore[arg-type]
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
_N = r"(?P<n>\d{1,3}|two|three|four|five|ten)"
_NOUNS = r"(?P<noun>[\w-]+(?: (?:address(?:es)?|codes?|messages?|levels?|lines?))?)"
_RANKED = (
    rf"(?:(?:what|which|list|show|name) )?(?:(?:is|are|the) )*top {_N} {_NOUNS}(?: messages?)?(?: (?:is|are|there))*",
    rf"(?:(?:what|which|list|show|name) )?(?:(?:is|are|the) )*(?:{_N} )?most (?:common|frequent)(?:ly used| used)? "
    rf"{_NOUNS}(?: messages?)?(?: (?:is|are|there))*",
    rf"(?:which|what) {_NOUNS} (?:is |are |occurs? |appears? |seen |comes up )?(?:the )?most "
    r"(?:often|frequently|frequent|common)",
)


def _tally(question: str) -> Ranking | None:
    if QUOTED.search(question):
        return None
    rest = _PLACE.sub("", " ".join(question.split()).rstrip(" ?.!"))
    match = next((found for form in _RANKED if (found := re.fullmatch(form, rest, re.IGNORECASE))), None)
    if match is None:
        return None
    groups = match.groupdict()
    number = groups.get("n")
    top = _NUMBERS.get(number.lower()) or int(number) if number else 1
    attempts: list[Attempt] = []
    for noun in re.findall(r"[\w-]+", groups["noun"].lower()):
        attempts += next((known for pattern, known in _KNOWN if re.fullmatch(pattern, noun)), ())
        key = noun.removesuffix("s")
        needles = (f"{key}=", f"{key}:", f"{key}s=", f"{key}s:")
        attempts.append(Attempt(needles, rf"\b{key}s?[=:] ?[\"']?([^\s\"',;&)\]]+)"))
    return Ranking(max(1, top), tuple(attempts)) if attempts else None
