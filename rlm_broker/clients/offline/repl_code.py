"""What the offline model writes in the REPL: `strategy` sends the source of these functions, so tools see them too.

They use the standard library and each other, and what model code may use: the names of the REPL are arguments. They
run on contexts of any size: nothing here loops over lines or characters of all of a text, only `str` methods do.
"""

import bisect
import collections
import heapq
import json
import math
import re
from collections.abc import Callable, Iterator
from typing import Any

CHUNK = 18_000
OVERLAP = 1_000
MAX_CHUNKS = 12
BLOCK = 1 << 20
MASKED = "with every number as #"
MAX_HITS = 50_000
WORTH_READING = 0.4
LEAST_COVERED, WELL_COVERED = 0.2, 0.55


def look(context: object) -> str:
    """The context's type, size and beginning, in one line each."""
    if isinstance(context, dict):
        some = [f"{key}: {beginning(context[key])}" for key in list(context)[:3]]
    elif isinstance(context, (list, tuple)):
        some = [beginning(item) for item in context[:3]]
    else:
        some = [beginning(context)]
    size = f" of length {len(context)}" if isinstance(context, (str, dict, list, tuple)) else ""
    return "\n  ".join([f"context: {type(context).__name__}{size}, begins with", *some])


def beginning(value: object) -> str:
    """Of a text its first characters; of anything else, which may be large or deep, its type."""
    return repr(value[:200]) if isinstance(value, str) else type(value).__name__


def pieces(context: object) -> list[tuple[str, str]]:
    """(name, text) of each part of the context: a file, a message, an item."""
    if isinstance(context, str):
        return [("", context)]
    if isinstance(context, dict):
        return [(str(key), "\n".join(leaves(value))) for key, value in context.items()]
    if not isinstance(context, (list, tuple)):
        return [("", str(context))]
    parts = []
    for i, item in enumerate(context):
        if isinstance(item, dict) and {"role", "content"} <= set(item):
            parts.append((f"context[{i}] ({item['role']})", "\n".join(leaves(item["content"]))))
        else:
            parts.append((f"context[{i}]", "\n".join(leaves(item))))
    return parts


def leaves(value: object) -> list[str]:
    """The text itself, or a line `path: value` for each value inside."""
    if isinstance(value, str):
        return [value]
    lines, todo = [], [("", value)]
    while todo:
        path, inner = todo.pop()
        if isinstance(inner, dict):
            todo += [(f"{path}.{key}" if path else str(key), inner[key]) for key in reversed(inner)]
        elif isinstance(inner, (list, tuple)):
            todo += [(f"{path}[{i}]", inner[i]) for i in reversed(range(len(inner)))]
        else:
            lines.append(f"{path}: {inner}" if path else str(inner))
    return lines


def join(parts: list[tuple[str, str]]) -> tuple[str, list[int]]:
    """One text, and where each part begins in it. A single text is not copied."""
    starts, end = [], 0
    for _, text in parts:
        starts.append(end)
        end += len(text) + 1
    return (parts[0][1] if len(parts) == 1 else "\n".join(text for _, text in parts)), starts


def place(text: str, parts: list[tuple[str, str]], starts: list[int], offset: int) -> str:
    """Where an offset is, for people: file or item, line from 1, character from 0."""
    i = bisect.bisect_right(starts, offset) - 1
    name = f"{parts[i][0]}, " if parts[i][0] else ""
    return f"{name}line {text.count(chr(10), starts[i], offset) + 1}, character {offset - starts[i]}"


def lines_with(text: str, needle: str, start: int, end: int) -> Iterator[tuple[int, int]]:
    """(begin, end) of each line that contains the needle, found without looking at the others."""
    while (hit := text.find(needle, start, end)) >= 0:
        stop = text.find("\n", hit + len(needle), end)
        stop = end if stop < 0 else stop
        yield text.rfind("\n", 0, hit) + 1, stop
        start = stop + 1


def count(context: object, texts: list[str], unit: str, note: str) -> str:
    """Count texts exactly, in lines or in occurrences; without texts, the lines."""
    parts = pieces(context)
    text, starts = join(parts)
    if not texts:
        total = sum(part.count("\n") + (part != "" and not part.endswith("\n")) for _, part in parts)
        number = f"{total} {'line' if total == 1 else 'lines'}"
        return f"{number}\nCounted over all of the context ({len(text)} characters).\nConfidence: exact\n{note}"
    answer = []
    for wanted in texts:
        lines = sum(1 for _ in lines_with(text, wanted, 0, len(text)))
        times = text.count(wanted)
        numbers = {
            "lines": f"{lines} {'line' if lines == 1 else 'lines'}",
            "occurrences": f"{times} {'occurrence' if times == 1 else 'occurrences'}",
        }
        other = "occurrences" if unit == "lines" else "lines"
        answer.append(f"{numbers[unit]} of {wanted!r} ({numbers[other]})")
        if (first := text.find(wanted)) >= 0:
            answer.append(f"  first at {place(text, parts, starts, first)}")
        elif any(term_counts(text, [{"needle": wanted.lower(), "bound": "none"}])):
            answer.append("  only in other upper and lower case, which does not count here")
        if len(parts) > 1:
            each = sorted(((part.count(wanted), name) for name, part in parts), reverse=True)[:10]
            answer += [f"  {number} in {name}" for number, name in each if number]
    counted = f"Counted over all of the context ({len(text)} characters), upper and lower case as written."
    return "\n".join([*answer, counted, "Confidence: exact", note])


def tally(context: object, attempts: list[tuple[list[str], str]], top: int, note: str) -> str | None:
    """Rank what the first fruitful pattern captures; None if none captures anything."""
    parts = pieces(context)
    text, starts = join(parts)
    for needles, pattern in attempts:
        search = re.compile(pattern)
        found = captured(text, needles, search)
        if not found:
            continue
        kind = "as written"
        if len(found) * 2 > sum(found.values()):
            # Nearly each is different: messages with a number or an identifier of their own.
            masked: collections.Counter[str] = collections.Counter()
            for value, number in found.items():
                masked[named(value, MASKED)] += number
            if len(masked) < len(found):
                found, kind = masked, MASKED
        ranks = [f"{number}  {value}" for value, number in found.most_common(max(top, 3))]
        best = found.most_common(1)[0][0]
        first = min(first_of(text, needle, search, best, kind) for needle in needles or [""])
        where = f"The first stands at {place(text, parts, starts, first)}."
        runners = ["Then:", *ranks[top:]] if top < len(ranks) and top < 3 else []
        counted = (
            f"{where} Counted over all of the context, {kind}: {len(found)} different, {sum(found.values())} in all."
        )
        return "\n".join([*ranks[:top], *runners, counted, "Confidence: exact for the pattern " + pattern, note])
    return None


def captured(text: str, needles: list[str], search: re.Pattern[str]) -> collections.Counter[str]:
    """What the pattern's group holds and how often, in the lines with a needle or, without needles, everywhere."""
    found: collections.Counter[str] = collections.Counter()
    for i, needle in enumerate(needles):
        for begin, end in lines_with(text, needle, 0, len(text)):
            line = text[begin:end]
            if not any(earlier in line for earlier in needles[:i]):
                found.update(map(str.strip, search.findall(line)))
    if not needles:
        found.update(map(str.strip, search.findall(text)))
    return found


def first_of(text: str, needle: str, search: re.Pattern[str], wanted: str, kind: str) -> int:
    """Where the pattern first captures what is tallied as `wanted`, in lines with the needle; else the text's end."""
    lines = lines_with(text, needle, 0, len(text)) if needle else iter([(0, len(text))])
    for begin, end in lines:
        for match in search.finditer(text, begin, end):
            if named(match.group(1).strip(), kind) == wanted:
                return match.start(1)
    return len(text)


def named(value: str, kind: str) -> str:
    """The name under which a value is tallied. A value of one word, such as an address, is itself in any case."""
    return re.sub(r"\d+", "#", value) if kind == MASKED and " " in value else value


def term_counts(text: str, terms: list[dict[str, Any]]) -> list[list[tuple[int, int]]]:
    """For each term (occurrences, where the block begins) of each block that holds it, upper and lower case aside."""
    counts: list[list[tuple[int, int]]] = [[] for _ in terms]
    for begin in range(0, len(text), BLOCK):
        block = lowered(text[begin : begin + BLOCK + OVERLAP])
        for k, term in enumerate(terms):
            # Inside words too, unless both ends are bound: counting is many times faster than looking at each.
            number = sum(1 for _ in hits(block, term)) if term["bound"] == "both" else block.count(term["needle"])
            if number:
                counts[k].append((number, begin))
    return counts


def hits(block: str, term: dict[str, Any]) -> Iterator[int]:
    """Where a lower-case block holds the term, as it is bound: anywhere, at the start of a word, as a whole word."""
    needle, bound, hit = term["needle"], term["bound"], -1
    while (hit := block.find(needle, hit + 1)) >= 0:
        end = hit + len(needle)
        if bound != "none" and hit > 0 and block[hit - 1].isalnum():
            continue
        if bound != "both" or not block[end : end + 1].isalnum():
            yield hit


def best_chunks(
    text: str,
    names: list[str],
    edges: list[int],
    terms: list[dict[str, Any]],
    counts: list[list[tuple[int, int]]],
    weights: list[float],
) -> list[tuple[int, int]]:
    """(begin, end) of the chunks where the rarest terms stand close together, best first; all, if they are few."""
    if len(text) <= CHUNK * MAX_CHUNKS and len(edges) <= MAX_CHUNKS:
        everywhere = {chunk_at(text, edges, at) for at in [*range(0, len(text), CHUNK), *edges] if at < len(text)}
        if len(everywhere) <= MAX_CHUNKS:
            return sorted((begin, end) for begin, end in everywhere if begin < end)
    scores: dict[tuple[int, int], float] = {}
    budget = MAX_HITS
    # A term that alone exceeds the budget tells nothing about the place; the rarest is tried in any case.
    for k in sorted(range(len(terms)), key=lambda k: sum(number for number, _ in counts[k])):
        total = sum(number for number, _ in counts[k])
        if total > budget and scores:
            break
        budget -= total
        stride = max(1, -(-total // MAX_HITS))
        for _, begin in counts[k][::stride]:
            block = lowered(text[begin : begin + BLOCK + OVERLAP])
            for hit in hits(block, terms[k]):
                window = block[max(0, hit - 250) : hit + 250]
                window += names[bisect.bisect_right(edges, begin + hit) - 1].lower()
                score = sum(weight for weight, term in zip(weights, terms, strict=True) if holds(window, term))
                chunk = chunk_at(text, edges, begin + hit)
                scores[chunk] = max(score, scores.get(chunk, 0.0))
    best = heapq.nlargest(MAX_CHUNKS, scores, key=lambda chunk: scores[chunk])
    return [chunk for chunk in best if scores[chunk] >= scores[best[0]] * WORTH_READING]


def lowered(block: str) -> str:
    """In lower case, unless that changes its length: 'İ' becomes two characters, and offsets must hold."""
    lower = block.lower()
    return lower if len(lower) == len(block) else block


def holds(lower: str, term: dict[str, Any]) -> bool:
    """Whether a lower-case text holds the term: a short name or a number only as a whole word."""
    return term["needle"] in lower and (term["bound"] != "both" or next(hits(lower, term), -1) >= 0)


def chunk_at(text: str, edges: list[int], offset: int) -> tuple[int, int]:
    """The chunk around an offset: within one file, from and to the end of a line where one is near."""
    i = bisect.bisect_right(edges, offset) - 1
    first, last = edges[i], (edges[i + 1] - 1 if i + 1 < len(edges) else len(text))
    core = first + (offset - first) // CHUNK * CHUNK
    begin, end = max(first, core - OVERLAP), min(last, core + CHUNK + OVERLAP)
    if begin > first:
        begin = text.find("\n", begin, begin + OVERLAP // 2) + 1 or begin
    if end < last and (newline := text.rfind("\n", end - OVERLAP // 2, end)) > 0:
        end = newline
    return begin, end


def find(context: object, terms: list[dict[str, Any]], ask: Callable[[list[str]], list[str]], note: str) -> str:
    """Choose the chunks worth reading, ask about each, keep the best quotation."""
    parts = pieces(context)
    text, starts = join(parts)
    if not text or text.isspace():
        return f"NOT FOUND\nThe context is empty.\n{note}"
    if not terms:
        return f"NOT FOUND\nThe question has only small words: nothing to look for.\n{note}"
    is_named = isinstance(context, dict)
    names, edges = ([name for name, _ in parts], starts) if is_named else ([""], [0])
    all_names = "\n".join(names).lower()
    counts = term_counts(text, terms)
    totals = [sum(number for number, _ in found) for found in counts]
    weights = [math.log(1 + len(text) / 100 / (1 + total)) + 0.1 for total in totals]
    print("occurrences:", {term["text"]: total for term, total in zip(terms, totals, strict=True)})
    absent = [
        term["text"]
        for term, total in zip(terms, totals, strict=True)
        if term["required"] and not total and term["needle"] not in all_names
    ]
    if absent or not any(totals):
        words = ", ".join(absent) if absent else "any word of the question"
        return f"NOT FOUND\nNowhere in all of the context: {words}.\n{note}"
    chunks = best_chunks(text, names, edges, terms, counts, weights)
    print(f"asking about {len(chunks)} chunks at {[begin for begin, _ in chunks]}")
    prompts = []
    for begin, end in chunks:
        name = names[bisect.bisect_right(edges, begin) - 1].replace("\n", " ")
        prompts.append(f"[characters {begin} to {end}] {name}\n{text[begin:end]}")
    return merge(ask(prompts), terms, weights, lambda offset: place(text, parts, starts, offset), note)


def merge(
    replies: list[str], terms: list[dict[str, Any]], weights: list[float], where: Callable[[int], str], note: str
) -> str:
    """The best of what the sub-calls quoted: by the share of the question's weight it covers, then by its score."""
    weight_of = {term["text"]: weight for term, weight in zip(terms, weights, strict=True)}
    found, failed = [], []
    for reply in replies:
        if reply.startswith("NOT FOUND"):
            continue
        try:
            for quote in json.loads(reply):
                covered = sum(weight_of[word] for word in quote["matched"]) / sum(weights)
                found.append((covered * quote["discount"], quote["score"], quote))
        except (ValueError, TypeError, KeyError):  # an error, or another model's words
            failed.append(reply)
    trouble = f"{len(failed)} of {len(replies)} sub-calls failed: {failed[0][:200]}\n" if failed else ""
    found.sort(key=lambda rated: rated[:2], reverse=True)
    if not found or found[0][0] < LEAST_COVERED:
        return f"NOT FOUND\nNo line of the context says enough of the question.\n{trouble}{note}"
    covered, _, best = found[0]
    is_high = best["confidence"] == "high" and covered >= WELL_COVERED and not failed
    confidence = f"{'high' if is_high else 'LOW CONFIDENCE'} (words found: {', '.join(best['matched'])})"
    return f"{best['quote']}\nFound at {where(best['offset'])}.\nConfidence: {confidence}\n{trouble}{note}"
