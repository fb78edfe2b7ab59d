"""The search for a sentence with the answer: choose chunks, ask about each, and keep the best quotation."""

import bisect
import heapq
import json
import math
import re
from collections.abc import Callable
from typing import Any

from rlm_broker.clients.offline.repl_code.parts import BLOCK, OVERLAP, hits, join, lowered, pieces, place, term_counts
from rlm_broker.clients.offline.repl_code.tables import tables

CHUNK = 18_000
"""Characters of one sub-call's text, without overlaps."""
MAX_CHUNKS = 12
"""Maximum sub-calls for one question; further chunks are not read."""
MAX_HITS = 50_000
"""Maximum places of terms that are rated; of a more frequent term every n-th is."""
WORTH_READING = 0.4
"""Share of the best chunk's score below which a chunk is not read."""
LEAST_COVERED = 0.2
"""Share of the question's weight below which a quotation is not an answer."""
RIVAL = 0.85
"""Share of the best quotation's worth from which another counts as another answer."""
MOST_BESIDE = 500
"""Characters of a quotation's object that are shown beside it; longer text is cut."""
STATED_NUMBER = r"\d|\b(?:one|two|three|four|five|six|seven|eight|nine|ten|eleven|twelve|dozen|hundred|thousand|no)\b"
CANNOT = (
    "no rule of mine takes every word of the question as a part of a table, a log or a list of objects. Ask with the "
    "names of its columns and values{ways} or name a model that reasons."
)


def answer(
    context: object,
    question: str,
    terms: list[dict[str, Any]],
    wanted: str,
    ask: Callable[[list[str]], list[str]],
    note: str,
) -> str:
    """Return the sentence with the answer. An operation on the whole context (`wanted`) is named, and not done."""
    is_table = any(table.kind != "log" for table in tables(context))
    found, quote = find(context, terms, ask, note)
    if quote is None:
        if not wanted:
            return found
        return f"I cannot {wanted} that: {CANNOT.format(ways=ways(question))}\n{found}"
    is_stated = all(term["text"] in quote["matched"] for term in terms)
    if wanted == "count" and not re.search(STATED_NUMBER, quote["quote"], re.IGNORECASE):
        is_stated = False
    lines = found.split("\n")
    if wanted or is_table:
        lines[2] = lines[2].replace("Confidence: high", "Confidence: LOW CONFIDENCE")
    if wanted and is_stated:
        lines.insert(3, f"I did not {wanted} anything: the line states it, and others may say more.")
    elif wanted:
        lines = [f"I cannot {wanted} that: {CANNOT.format(ways=ways(question))}", "The nearest line:", *lines]
    return "\n".join(lines)


def ways(question: str) -> str:
    return "" if '"' in question or "'" in question else ", put a text to count into quotation marks,"


def find(
    context: object, terms: list[dict[str, Any]], ask: Callable[[list[str]], list[str]], note: str
) -> tuple[str, dict[str, Any] | None]:
    """Choose the chunks worth reading, ask about each, and return the answer with the best quotation."""
    parts = pieces(context)
    text, starts = join(parts)
    if not text or text.isspace():
        return f"NOT FOUND\nThe context is empty.\n{note}", None
    if not terms:
        return (
            f"NOT FOUND\nThe question has only small words: name what to look for.\n{note}",
            None,
        )
    is_named = isinstance(context, dict)
    names, edges = ([name for name, _ in parts], starts) if is_named else ([""], [0])
    all_names = "\n".join(names).lower()
    counts = term_counts(text, terms)
    totals = [sum(number for number, _ in each) for each in counts]
    weights = [math.log(1 + len(text) / 100 / (1 + total)) + 0.1 for total in totals]
    print("occurrences:", {term["text"]: total for term, total in zip(terms, totals, strict=True)})
    absent = [
        term["text"]
        for term, total in zip(terms, totals, strict=True)
        if term["required"] and not total and term["needles"][0] not in all_names
    ]
    if absent or not any(totals):
        words = ", ".join(absent) if absent else "any word of the question"
        return f"NOT FOUND\nNowhere in all of the context: {words}.\n{note}", None
    chunks, is_all = best_chunks(text, names, edges, terms, counts, weights)
    print(f"asking about {len(chunks)} chunks at {[begin for begin, _ in chunks]}")
    prompts = []
    for begin, end in chunks:
        name = names[bisect.bisect_right(edges, begin) - 1].replace("\n", " ")
        prompts.append(f"[characters {begin} to {end}] {name}\n{text[begin:end]}")
    found, best = merge(ask(prompts), terms, weights, lambda offset: place(text, parts, starts, offset), is_all, note)
    i = bisect.bisect_right(starts, best["offset"]) - 1 if best else 0
    if best and isinstance(context, (list, tuple)) and isinstance(context[i], dict) and "\n" in parts[i][1]:
        lines = found.split("\n")
        found = "\n".join([*lines[:3], f"Beside it: {'; '.join(parts[i][1].split(chr(10)))[:MOST_BESIDE]}", *lines[3:]])
    return found, best


def best_chunks(
    text: str,
    names: list[str],
    edges: list[int],
    terms: list[dict[str, Any]],
    counts: list[list[tuple[int, int]]],
    weights: list[float],
) -> tuple[list[tuple[int, int]], bool]:
    """Return (begin, end) of the chunks where the rarest terms stand close together, best first; all if they are few.

    The second value is whether every place that may answer as well as the best one is in these chunks.
    """
    if len(text) <= CHUNK * MAX_CHUNKS and len(edges) <= MAX_CHUNKS:
        everywhere = {chunk_at(text, edges, at) for at in [*range(0, len(text), CHUNK), *edges] if at < len(text)}
        if len(everywhere) <= MAX_CHUNKS:
            return sorted((begin, end) for begin, end in everywhere if begin < end), True
    scores: dict[tuple[int, int], float] = {}
    budget, is_all = MAX_HITS, True
    # A term that alone exceeds the budget is everywhere, so it does not help. The rarest term is always tried.
    for k in sorted(range(len(terms)), key=lambda k: sum(number for number, _ in counts[k])):
        total = sum(number for number, _ in counts[k])
        if total > budget and scores:
            break
        budget -= total
        stride = max(1, -(-total // MAX_HITS))
        is_all = is_all and stride == 1
        for _, begin in counts[k][::stride]:
            block = lowered(text[begin : begin + BLOCK + OVERLAP])
            for hit in hits(block, terms[k]):
                window = block[max(0, hit - 250) : hit + 250]
                window += names[bisect.bisect_right(edges, begin + hit) - 1].lower()
                score = sum(weight for weight, term in zip(weights, terms, strict=True) if holds(window, term))
                chunk = chunk_at(text, edges, begin + hit)
                scores[chunk] = max(score, scores.get(chunk, 0.0))
    best = heapq.nlargest(MAX_CHUNKS + 1, scores, key=lambda chunk: scores[chunk])
    is_all = is_all and (len(best) <= MAX_CHUNKS or scores[best[-1]] < RIVAL * scores[best[0]])
    worth = [chunk for chunk in best if scores[chunk] >= scores[best[0]] * WORTH_READING]
    return worth[:MAX_CHUNKS], is_all


def holds(lower: str, term: dict[str, Any]) -> bool:
    """Whether a lower-case text has the term; a short name or a number only as a whole word."""
    return any(each in lower for each in term["needles"]) and (
        term["bound"] != "both" or next(hits(lower, term), -1) >= 0
    )


def chunk_at(text: str, edges: list[int], offset: int) -> tuple[int, int]:
    """Return (begin, end) of the chunk around an offset: within one file, and at line ends that are near."""
    i = bisect.bisect_right(edges, offset) - 1
    first, last = edges[i], (edges[i + 1] - 1 if i + 1 < len(edges) else len(text))
    core = first + (offset - first) // CHUNK * CHUNK
    begin, end = max(first, core - OVERLAP), min(last, core + CHUNK + OVERLAP)
    if begin > first:
        begin = text.find("\n", begin, begin + OVERLAP // 2) + 1 or begin
    if end < last and (newline := text.rfind("\n", end - OVERLAP // 2, end)) > 0:
        end = newline
    return begin, end


def merge(
    replies: list[str],
    terms: list[dict[str, Any]],
    weights: list[float],
    where: Callable[[int], str],
    is_all: bool,
    note: str,
) -> tuple[str, dict[str, Any] | None]:
    """Return the best quotation of all sub-calls: by the share of the question's weight it covers, then by score."""
    weight_of = {term["text"]: weight for term, weight in zip(terms, weights, strict=True)}
    found, failed = [], []
    for reply in replies:
        if reply.startswith("NOT FOUND"):
            continue
        try:
            for quote in json.loads(reply):
                covered = sum(weight_of[word] for word in quote["matched"]) / sum(weights)
                found.append((covered * quote["discount"], quote["score"], quote))
        except (ValueError, TypeError, KeyError):  # an error, or the reply of another model
            failed.append(reply)
    trouble = f"{len(failed)} of {len(replies)} sub-calls failed: {failed[0][:200]}\n" if failed else ""
    found.sort(key=lambda rated: rated[:2], reverse=True)
    if not found or found[0][0] < LEAST_COVERED:
        return f"NOT FOUND\nNo line of the context says enough of the question.\n{trouble}{note}", None
    worth, _, best = found[0]
    text = " ".join(best["quote"].split("\n"))
    rivals = [quote for rated, _, quote in found if rated >= RIVAL * worth and is_other(quote["quote"], best["quote"])]
    is_high = best["confidence"] == "high" and is_all and not rivals and not failed
    confidence = f"{'high' if is_high else 'LOW CONFIDENCE'} (words found: {', '.join(best['matched'])})"
    lines = [text, f"Found at {where(best['offset'])}.", f"Confidence: {confidence}"]
    if rivals:
        lines.append(f"Another line says as much: {' '.join(rivals[0]['quote'].split())[:300]}")
    return "\n".join([*lines, f"{trouble}{note}"]), best


def is_other(quote: str, best: str) -> bool:
    """Whether a quotation neither equals, contains, nor is part of the best one."""
    return quote not in best and best not in quote
