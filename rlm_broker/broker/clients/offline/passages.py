"""Search for passages, and counts of words, in a context of any kind and size.

The offline model sends this source to the REPL, so it imports the standard library alone. A text is searched in blocks
with `str.find`, and only lines with a word of the question are looked at. BM25 ranks them.
"""

import bisect
import functools
import heapq
import itertools
import math
import re
from collections.abc import Iterator
from typing import Any, NamedTuple

BLOCK = 1 << 20
"""Characters that are lowered and searched at a time, so that no lower-case copy of the whole text is made."""
LONG, NEAR = 400, 200
"""Characters of a line beyond which a sentence of it is quoted; those beside a passage where a name may stand."""
MAX_WORDS, MAX_HITS = 16, 5_000
"""Maximum words of a question, and occurrences whose passages are rated, of the rarest words first."""
SHOWN, ALIKE = 3, 0.7
"""Maximum passages of an answer, and share of the best score that each exceeds. One that asks, or has a name only near
it, gets this share of its own score."""

CJK = "\u3040-\u30ff\u3400-\u9fff\uac00-\ud7af"
"""Character ranges of scripts without spaces between words. Each character counts as a word."""
WORD = re.compile(rf"\d+(?:[.,]\d+)+|[{CJK}]|[^\W_{CJK}]+")
QUOTED = re.compile(r"\"([^\"]+)\"|\u201c([^\u201d]+)\u201d|`+([^`]+)`+|(?<!\w)'([^']+(?:'\w[^']*)*)'(?!\w)")
SENTENCE_END = re.compile(r"[.!?][\"')\]]*\s+|[\u3002\uff01\uff1f]")
SMALL = frozenset(
    WORD.findall(
        "a about all am an and any are as at be because been by can could did do does done for from get give go had "
        "has have he her him his how i if in into is it its many me much my near of often on our out over please s say "
        "says she should so some such t tell that the their them then there these they this those to up us was we were "
        "what when where which while who whom whose why will with would you your"
    )
)
"""Words of a question that its answer need not have."""
COUNTING = re.compile(r"(?is)(?:please |tell me |what is |the )*(?:how many|how often|number of|count)\b")
UNIT = re.compile(
    r"(?i)\b(?:both|(?:context|document|entry|file|item|line|log|message|occurrence|phrase|record|row|string|text|time|"
    r"total|word|appear|contain|include|mention|occur)(?:s|ed|ing)?|entries)\b"
)
"""Words that do not tell what is counted."""
LEVELS = ("TRACE", "DEBUG", "INFO", "NOTICE", "WARN", "ERROR", "SEVERE", "CRITICAL", "FATAL")

Pieces = list[tuple[str, str]]
"""Name and text of each part of a context."""
Target = tuple[str, str, re.Pattern[str]]
"""A text that is counted: its name for people, the lower-case beginning of each occurrence, and its pattern."""
Passage = tuple[float, int, int, int, list[int]]
"""Score of a passage by BM25, number of its piece, begin and end, and how often it has each term."""


class Term(NamedTuple):
    """A word or quotation of a question.

    Attributes:
        text: Text as the question writes it.
        needle: Lower-case text that each form of it has.
        kind: `word` for any of its forms; `name` for a name or number, which is compared as a whole; `quotation`.
    """

    text: str
    needle: str
    kind: str

    def times_in(self, text: str, words: list[str]) -> int:
        """Return how often it occurs in a lower-case text with these words."""
        if self.kind == "quotation":
            return text.count(self.needle)
        return sum((word if self.kind == "name" else stem(word)) == self.needle for word in words)


def look(context: Any) -> str:
    """Return type, size and beginning of the context."""
    size = f" of length {len(context):,}" if isinstance(context, (str, dict, list, tuple)) else ""
    begin = (
        [context[:500]]
        if isinstance(context, str)
        else [f"{name}: {text[:150]}" for name, text in pieces_of(context)[:3]]
    )
    return "\n".join([f"{type(context).__name__}{size}", *begin])


def find(context: Any, question: str) -> str:
    """Return the answer to a question: a count, or the best passages with their places, or NOT FOUND."""
    pieces, asked = pieces_of(context), task(question)
    return count(pieces, asked) or quote(pieces, asked)


def task(question: str) -> str:
    """Return the sentences of a question that end with a question mark; if there are none, its beginning."""
    ends = question if len(question) <= 4_000 else f"{question[:2_000]}\n{question[-2_000:]}"
    asking = [each for each in re.split(r"(?<=[.!?\uff1f])\s+|\n+", ends) if each.endswith(("?", "\uff1f"))]
    return " ".join(asking) or question[:600]


def pieces_of(context: Any) -> Pieces:
    """Return the parts of a context: files of a folder, items of a list, rows of a table."""
    for method, *how in (("to_dicts",), ("to_pylist",), ("to_dict", "records")):  # polars, pyarrow, pandas
        if not isinstance(context, dict) and callable(getattr(context, method, None)):
            context = getattr(context, method)(*how)
    if isinstance(context, dict):
        return [(str(key), "\n".join(leaves(value))) for key, value in context.items()]
    if isinstance(context, (list, tuple)):
        return [(f"context[{number}]", "; ".join(leaves(item))) for number, item in enumerate(context)]
    return [("", context if isinstance(context, str) else str(context))]


def leaves(value: Any, path: str = "") -> list[str]:
    """Return the text itself, or `path: value` for each value inside."""
    if not isinstance(value, (dict, list, tuple)):
        return [f"{path}: {value}" if path else str(value)]
    inner = value.items() if isinstance(value, dict) else enumerate(value)
    return [leaf for key, each in inner for leaf in leaves(each, f"{path}.{key}" if path else str(key))]


def place(name: str, text: str, offset: int) -> str:
    """Return the place of an offset for people: file or item, line from 1, character from 0."""
    return f"{name}{name and ', '}line {text.count(chr(10), 0, offset) + 1}, character {offset}"


def quote(pieces: Pieces, question: str) -> str:
    """Return the best passages with their places, or NOT FOUND and the words that were looked for."""
    terms = terms_of(question)
    if not terms:
        return "NOT FOUND\nThe question has no word to search for."
    best = rank(pieces, terms, WORD.findall(question.lower()))
    if not best:
        return f"NOT FOUND\nNo passage has enough of: {', '.join(term.text for term in terms)}."
    answer: list[str] = []
    for _, piece, begin, end, times in best:
        name, text = pieces[piece]
        has = ", ".join(term.text for term, n in zip(terms, times, strict=True) if n)
        lacks = ", ".join(term.text for term, n in zip(terms, times, strict=True) if not n)
        answer += [("Also: " if answer else "") + text[begin:end].strip()]
        answer += [f"Found at {place(name, text, begin)}, by: {has}{lacks and '; without: '}{lacks}."]
    return "\n".join(answer)


def terms_of(question: str) -> list[Term]:
    """Return the quotations, names, numbers and other words of a question, without small words."""
    found = {text.lower(): Term(text, text.lower(), "quotation") for text in quotations(question)}
    rest = QUOTED.sub(lambda match: " " * len(match[0]), question)
    for match in WORD.finditer(rest):
        word, before = match[0], rest[: match.start()].rstrip(" \"'(")
        if word.lower() in SMALL or (len(word) == 1 and word.isascii() and not word.isdigit()):
            continue
        is_name = word[0].isupper() and before[-1:] not in ("", *".!?:\n") and not question.isupper()
        kind = "name" if is_name or any(char.isdigit() for char in word) else "word"
        if kind == "name" or word.lower() not in found:
            found[word.lower()] = Term(word, word.lower() if kind == "name" else stem(word.lower()), kind)
    return list(found.values())[:MAX_WORDS]


def quotations(question: str) -> list[str]:
    """Return the texts in quotation marks, in order, without the marks."""
    return list(dict.fromkeys(next(filter(None, match.groups())) for match in QUOTED.finditer(question)))


@functools.lru_cache(1 << 16)
def stem(word: str) -> str:
    """Return the beginning that the English forms of a word share, roughly."""
    begin = re.sub(r"(?<=[^\W\d_]{3})(?:ations?|ings?|ied|ies|ed|ers?|ly|es|s|e|y)$", "", word)
    return begin[:-1] if word.endswith(("ed", "ing")) and begin[-1:] == begin[-2:-1] != "s" else begin


def rank(pieces: Pieces, terms: list[Term], question: list[str]) -> list[Passage]:
    """Return up to `SHOWN` passages, best first. `question` has all of its words in lower case."""
    where: list[dict[tuple[int, int], int]] = [{} for _ in terms]  # (piece, block) with a term -> occurrences
    lines, chars = 1, 1
    for piece, (_, text) in enumerate(pieces):
        lines, chars = lines + text.count("\n"), chars + len(text)
        for block in range(0, len(text), BLOCK):
            lower = fold(text[block : block + BLOCK + LONG])
            for blocks, term in zip(where, terms, strict=True):
                if n := lower.count(term.needle):
                    blocks[piece, block] = n
    lines += len(pieces)
    counts = [sum(blocks.values()) for blocks in where]
    weights = [math.log(1 + (max(lines, n) - n + 0.5) / (n + 0.5)) for n in counts]
    hits = (
        (piece, bounds(pieces[piece][1], hit))
        for k in sorted(range(len(terms)), key=counts.__getitem__)
        for piece, block in where[k]
        for hit in hits_in(pieces[piece][1], terms[k].needle, block)
    )
    found: dict[tuple[int, str], Passage] = {}
    for piece, (begin, end) in itertools.islice(hits, MAX_HITS):
        name, text = pieces[piece]
        passage = text[begin:end]
        if (piece, passage) not in found:
            times = times_of(terms, passage, text[max(0, begin - NEAR) : end + NEAR], name, question)
            score = bm25(times, weights, len(passage) * lines / chars)
            has_names = all(n or term.kind == "word" for term, n in zip(terms, times, strict=False))
            score *= 1 if has_names and not passage.rstrip().endswith("?") else ALIKE
            found[piece, passage] = score, piece, begin, end, times
    best = heapq.nlargest(SHOWN, found.values(), key=lambda each: each[0])
    return [each for each in best if each[0] > ALIKE * best[0][0]]


def hits_in(text: str, needle: str, block: int) -> Iterator[int]:
    """Yield the offsets at which a lower-case text occurs in a block, regardless of case."""
    lower = fold(text[block : block + BLOCK + len(needle) - 1])
    hit = lower.find(needle)
    while hit >= 0:
        yield block + hit
        hit = lower.find(needle, hit + len(needle))


def fold(text: str) -> str:
    """Return the text in lower case, unless that changes its length, and so offsets: U+0130 becomes two characters."""
    lower = text.lower()
    return lower if len(lower) == len(text) else text


def bounds(text: str, hit: int) -> tuple[int, int]:
    """Return begin and end of the line at an offset, or of a sentence of a long line."""
    begin = max(text.rfind("\n", max(0, hit - LONG), hit) + 1, hit - LONG)
    end = text.find("\n", hit, hit + LONG)
    end = min(len(text), hit + LONG) if end < 0 else end
    if end - begin > LONG:
        cuts = [begin, *(match.end() for match in SENTENCE_END.finditer(text, begin, end)), end]
        last = bisect.bisect_right(cuts, hit, hi=len(cuts) - 1)
        begin, end = cuts[last - 1], cuts[last]
    return begin, end


def times_of(terms: list[Term], passage: str, near: str, name: str, question: list[str]) -> list[int]:
    """Return how often a passage, or the name of its file, has each term; empty if it is no answer.

    An answer has half of the question's words. Names and quotations count twice, and must stand in it or near it. A
    passage that repeats the question is none.
    """
    lower, words = fold(passage), WORD.findall(fold(passage))
    if words[-len(question) :] == question and len(words) <= len(question) + 1:
        return []
    words += WORD.findall(name.lower())
    times = [term.times_in(lower, words) for term in terms]
    missing = [term for term, n in zip(terms, times, strict=True) if not n and term.kind != "word"]
    around = WORD.findall(near.lower()) if missing else []
    if not all(term.times_in(near.lower(), around) for term in missing):
        return []
    held = sum(1 + (term.kind != "word") for term, n in zip(terms, times, strict=True) if n or term in missing)
    return times if any(times) and 2 * held >= sum(1 + (term.kind != "word") for term in terms) else []


def bm25(times: list[int], weights: list[float], length: float) -> float:
    """Return the score of a passage whose length is a share of the usual one; 0 for one without terms."""
    return sum(w * n * 2.2 / (n + 1.2 * (0.25 + 0.75 * length)) for n, w in zip(times, weights, strict=False))


def count(pieces: Pieces, question: str) -> str | None:
    """Return how many lines have a word, a log level or quotations, or None for any other question."""
    if not (match := COUNTING.match(question)):
        return None
    what = question[match.end() :]
    texts, rest = quotations(what), QUOTED.sub(" ", what)
    words = [word for word in WORD.findall(UNIT.sub(" ", rest)) if word.lower() not in SMALL]
    if not texts and not words and re.search(r"(?i)\b(?:lines|rows|items|files|entries|records|messages)\b", rest):
        lines = sum(text.count("\n") + (text[-1:] not in ("", "\n")) for _, text in pieces)
        return f"{lines:,} line{'s' * (lines != 1)}{f' in {len(pieces):,} parts' if len(pieces) > 1 else ''}"
    targets: list[Target] = [(repr(text), text.lower(), re.compile(re.escape(text))) for text in texts]
    targets += [target_of(pieces, word) for word in words]
    is_clear = len(words) == 0 or len(targets) == 1 or (len(targets) == 2 and targets[-1][0] in LEVELS)
    return count_lines(pieces, targets) if targets and is_clear else None


def target_of(pieces: Pieces, word: str) -> Target:
    """Return what counts a word: a log level of the context in capital letters, any other regardless of case."""
    one = word.lower().removesuffix("s")
    level = one.upper().removesuffix("ING")
    if level in LEVELS and any(level in text for _, text in pieces):
        return (level, level.lower(), re.compile(rf"(?<!\w){level}(?:ING)?(?!\w)"))
    return (f"{one}(s)", one, re.compile(rf"(?i)(?<!\w){re.escape(one)}s?(?!\w)"))


def count_lines(pieces: Pieces, targets: list[Target]) -> str:
    """Return the number of lines with all targets, and the first of these lines with its place."""
    (_, needle, pattern), *others = targets
    lines = times = 0
    first = ""
    for name, text in pieces:
        end = -1
        for hit in (hit for block in range(0, len(text), BLOCK) for hit in hits_in(text, needle, block)):
            if hit <= end:
                continue
            begin, end = text.rfind("\n", max(end, 0), hit) + 1, text.find("\n", hit)
            end = len(text) if end < 0 else end
            n = len(pattern.findall(text, begin, end))
            if n and all(other.search(text, begin, end) for _, _, other in others):
                lines, times = lines + 1, times + n
                first = first or f"\nFirst: {text[begin:end].strip()[:LONG]}\nFound at {place(name, text, begin)}."
    what = " and ".join(label for label, _, _ in targets)
    occurrences = f", {times:,} times in all" if not others and times != lines else ""
    return f"{lines:,} {'line has' if lines == 1 else 'lines have'} {what}{occurrences}.{first}"
