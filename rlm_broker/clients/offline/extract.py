"""Answers of sub-calls: the line of a text that shares most with the question, or NOT FOUND.

Each unit of the text (a sentence, or a line) is rated by the question's words that it holds. SQLite's FTS5 finds
English words with their forms and ranks units by BM25; rules of `languages` find forms in other languages.
"""

import contextlib
import itertools
import json
import re
import sqlite3
from collections.abc import Iterator
from dataclasses import dataclass, replace

from rlm_broker.clients.offline import question as asked
from rlm_broker.clients.offline.languages import stem
from rlm_broker.clients.offline.question import Term
from rlm_broker.clients.offline.sure import computing, is_sure

LOW_COVERAGE = 0.2
"""Minimum share of the question's words in a unit; below it the unit is not a candidate.

It is low, because a paraphrase shares only one or two words. The merge weighs words by how rare they are in the whole
context.
"""

RIVAL = 0.85
"""Share of the best unit's worth from which another unit counts as another answer, which lowers the confidence."""

NEIGHBOURS = 2
"""Units before and after a unit in which a name or number of the question may stand; the confidence is then low."""

_DISCOUNTS = {
    (False, False, False): 1.0,
    (False, True, True): 0.5,
    # Two units hold more words than one by chance alone, so their worth is lower.
    (True, False, False): 0.8,
    (True, True, False): 0.6,
    (True, False, True): 0.4,
    (True, True, True): 0.4,
}
"""Factor of a candidate's worth, by three facts: it has two units, its first unit asks, its last unit asks."""

_HEADER = re.compile(r"\[characters (\d+) to \d+\] ?([^\n]*)\n")
_ENDS = ".!?\u3002\uff01\uff1f\u2026"
_ABBREVIATIONS = ("Dr", "Mr", "Mrs", "Ms", "St", "No", "[A-Z]", r"e\.g", r"i\.e")
_CUT = re.compile(
    rf"(?<=[{_ENDS}])"
    + "".join(rf"(?<!\b{short}\.)" for short in _ABBREVIATIONS)
    + r"[\"'\u201d\u2019)\]]*(?:\s+|(?<=[\u3002\uff01\uff1f]))(?=\S)"
)
_LONG = re.compile(r".{1,600}(?:\s+|$)|.{600}", re.DOTALL)
_ONE_CHARACTER_WORD = re.compile(rf"[{asked.CJK}]")


@dataclass(frozen=True, slots=True)
class Quote:
    """A quotation that may answer the question, judged by its words alone.

    Attributes:
        quote: Text of one unit or of two neighbours.
        offset: Offset in characters: in the context if the prompt's header says where it stands, else in the prompt.
        line: Line within the prompt's text, from 1.
        matched: Words of the question that it holds.
        confidence: `high` or `LOW CONFIDENCE`.
        discount: Factor of its worth: below 1 if it asks, or if two units hold the words together.
        score: BM25, larger is better. It can be compared within one prompt.
    """

    quote: str
    offset: int
    line: int
    matched: tuple[str, ...]
    confidence: str
    discount: float
    score: float


def complete(prompt: str, question: str) -> str:
    """Answer `question` from the text of `prompt`.

    Returns:
        For a chunk with the header that `repl_code.search` writes: a JSON list of up to three objects with the fields
        of `Quote`, best first. For any other prompt: the answer, its place and its confidence, in lines. `NOT FOUND`
        and a reason if no unit answers.
    """
    # SQLite refuses lone surrogates. The replacement is one character, too, so offsets stay right.
    text = prompt.encode("utf-8", "replace").decode("utf-8")
    header = _HEADER.match(text)
    if header is None:
        return _in_words(quotes(text, question, base=0, name=""), question)
    found = quotes(text[header.end() :], question, base=int(header.group(1)), name=header.group(2))
    if not found:
        return "NOT FOUND"
    fields = ("quote", "offset", "line", "matched", "confidence", "discount", "score")
    return json.dumps([{field: getattr(quote, field) for field in fields} for quote in found])


def _in_words(found: list[Quote], question: str) -> str:
    wanted = computing(question)
    refusal = f"I cannot {wanted} that: it has to be computed, and this is one prompt without code.\n" if wanted else ""
    if not found:
        return f"NOT FOUND\n{refusal}No line of the prompt says enough of the question.\n{asked.NOTE}"
    best = found[0]
    rival = any(
        len(other.matched) * other.discount >= RIVAL * len(best.matched) * best.discount
        and other.quote not in best.quote
        and best.quote not in other.quote
        for other in found[1:]
    )
    confidence = "LOW CONFIDENCE" if rival else best.confidence
    place = f"Found at line {best.line}, character {best.offset} of the prompt."
    quote, words = " ".join(best.quote.split("\n")), ", ".join(best.matched)
    return f"{quote}\n{place}\nConfidence: {confidence} (words found: {words})\n{refusal}{asked.NOTE}"


def quotes(text: str, question: str, base: int, name: str) -> list[Quote]:
    """Return up to three candidates, best first.

    A candidate holds the question's names and numbers, itself or near it, and enough of the other words.

    Args:
        text: Text to search.
        question: Question to answer.
        base: Offset of `text` in the context.
        name: Name of the file that `text` is from. Its words count as part of every unit.
    """
    terms = asked.terms(question)
    units = list(_units(text))
    if not terms or not units:
        return []
    holds, scores = _index([unit for _, unit in units], terms)
    again = _normal(question)
    asks = [_asks(unit, again) for _, unit in units]
    in_name = {k for k, term in enumerate(terms) if term.occurs_in(name)}
    found = []
    for first, last in _spans(holds, asks):
        near = "\n".join(unit for _, unit in units[max(0, first - NEIGHBOURS) : last + 1 + NEIGHBOURS])
        start = units[first][0]
        quote = text[start : units[last][0] + len(units[last][1])].strip()
        numbers = holds[first] | holds[last] | in_name
        held = [term for k, term in enumerate(terms) if k in numbers]
        required = [term for k, term in enumerate(terms) if term.is_required and k not in in_name]
        coverage = len(held) / len(terms)
        if coverage < LOW_COVERAGE or not all(term in held or term.occurs_in(near) for term in required):
            continue
        is_high = first == last and not asks[first] and is_sure(question, quote)
        found.append(
            Quote(
                quote=quote,
                offset=base + start,
                line=0,
                matched=tuple(term.text for term in held),
                confidence="high" if is_high else "LOW CONFIDENCE",
                discount=_DISCOUNTS[first < last, asks[first], asks[last]],
                score=round(sum(scores.get(i, 0.0) for i in range(first, last + 1)), 3),
            )
        )
    found.sort(key=lambda quote: (len(quote.matched) * quote.discount, quote.score), reverse=True)
    # Lines are counted for these three alone: counting for each candidate would take quadratic time.
    return [replace(quote, line=text.count("\n", 0, quote.offset - base) + 1) for quote in found[:3]]


def _asks(unit: str, again: str) -> bool:
    """Whether a unit asks instead of answering: it ends in a question mark, or equals the question `again`."""
    words = _normal(unit).removeprefix("q ").removeprefix("question ")
    return unit.rstrip().endswith(("?", "\uff1f")) or words == again


def _normal(text: str) -> str:
    return " ".join(re.findall(r"\w+", text.lower()))


def _units(text: str) -> Iterator[tuple[int, str]]:
    """Yield offset and text of each sentence, at most about 600 characters long. A line end also ends a sentence."""
    for line in re.finditer(r"[^\r\n]+", text):
        cuts = [0, *(cut.end() for cut in _CUT.finditer(line.group())), len(line.group())]
        for begin, end in itertools.pairwise(cuts):
            for piece in _LONG.finditer(line.group(), begin, end):
                if piece.group().strip():
                    yield line.start() + piece.start(), piece.group()


def _spans(holds: list[set[int]], asks: list[bool]) -> Iterator[tuple[int, int]]:
    """Yield first and last index of the units to judge: each with a word, and two neighbours that belong together.

    Neighbours belong together if each holds a word that the other lacks, since a sentence may go on in the next line;
    or if the first asks what the second may answer, as two messages of a chat do.
    """
    for i, held in enumerate(holds):
        if held:
            yield i, i
        if i + 1 < len(holds) and ((held - holds[i + 1] and holds[i + 1] - held) or (held and asks[i])):
            yield i, i + 1


def _index(units: list[str], terms: list[Term]) -> tuple[list[set[int]], dict[int, float]]:
    """Return for each unit the numbers of the terms that it holds, and the BM25 score by unit, larger is better."""
    holds: list[set[int]] = [set() for _ in units]
    scores: dict[int, float] = {}
    phrases = {k: " OR ".join(map(_phrase, (term.text, *term.synonyms))) for k, term in enumerate(terms)}
    with contextlib.closing(sqlite3.connect(":memory:")) as database:
        database.execute("CREATE VIRTUAL TABLE unit USING fts5(body, tokenize = 'porter unicode61')")
        spaced = (_ONE_CHARACTER_WORD.sub(r" \g<0> ", unit) for unit in units)
        database.executemany("INSERT INTO unit(rowid, body) VALUES (?, ?)", enumerate(spaced))
        for k, term in enumerate(terms):
            if term.is_exact_only:
                rows = [i for i, unit in enumerate(units) if term.occurs_in(unit)]
            elif term.language != "english":
                rows = [i for i, unit in enumerate(units) if _has_form(unit, term)]
            else:
                rows = [row for (row,) in database.execute("SELECT rowid FROM unit WHERE unit MATCH ?", (phrases[k],))]
            for row in rows:
                holds[row].add(k)
        matching = database.execute(
            "SELECT rowid, bm25(unit) FROM unit WHERE unit MATCH ?", (" OR ".join(phrases.values()),)
        )
        scores.update((row, -rank) for row, rank in matching)
    return holds, scores


def _phrase(text: str) -> str:
    return '"' + text.replace('"', '""').replace("\0", " ") + '"'


def _has_form(unit: str, term: Term) -> bool:
    """Whether a unit has a form of the term, by the stemming rules of the question's language."""
    begin = term.needles[0]
    words = re.findall(r"[^\W\d_]+", unit) if begin in unit.lower() else []
    wanted = stem(term.text, term.language)
    return term.occurs_in(unit) or any(
        stem(word, term.language) == wanted for word in words if word.lower().startswith(begin)
    )
