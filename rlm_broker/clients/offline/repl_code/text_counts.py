"""Exact counts and rankings of texts over the whole context."""

import collections
import re

from rlm_broker.clients.offline.repl_code.parts import join, lines_with, pieces, place, term_counts

MASKED = "with every number as #"
"""Way of ranking in which texts that differ only in numbers count as one."""


def count(context: object, texts: list[str], unit: str, joined: str, note: str) -> str:
    """Return exact counts of texts, in lines, occurrences or whole words; without texts, of the lines."""
    parts = pieces(context)
    text, starts = join(parts)
    total = sum(part.count("\n") + (part != "" and not part.endswith("\n")) for _, part in parts)
    if not texts:
        number = f"{total} {'line' if total == 1 else 'lines'}"
        sure = (
            "exact" if unit == "lines" else "LOW CONFIDENCE (these are lines: no table was found whose rows to count)"
        )
        return f"{number}\nCounted over all of the context ({len(text)} characters).\nConfidence: {sure}\n{note}"
    if unit == "words":
        return count_word(text, texts[0], note)
    answer = joined_lines(text, texts, joined, total)
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
        elif any(term_counts(text, [{"needles": [wanted.lower()], "bound": "none"}])):
            answer.append("  only in other upper and lower case, which does not count here")
        if len(parts) > 1:
            each = sorted(((part.count(wanted), name) for name, part in parts), reverse=True)[:10]
            answer += [f"  {number} in {name}" for number, name in each if number]
    counted = f"Counted over all of the context ({len(text)} characters), upper and lower case as written."
    return "\n".join([*answer, counted, "Confidence: exact", note])


def joined_lines(text: str, texts: list[str], joined: str, total: int) -> list[str]:
    """Return the first line of the answer, if lines with several texts, or without a text, are asked for."""
    if joined == "each":
        return []
    needed = all if joined == "all" else any
    found = {
        begin
        for wanted in (texts[:1] if joined == "all" else texts)
        for begin, end in lines_with(text, wanted, 0, len(text))
        if needed(each in text[begin:end] for each in texts)
    }
    number = total - len(found) if joined == "none" else len(found)
    which = {"all": "with all of", "any": "with any of", "none": "without"}[joined]
    return [f"{number} {'line' if number == 1 else 'lines'} {which} {', '.join(map(repr, texts))}"]


def count_word(text: str, word: str, note: str) -> str:
    """Return the count of a whole word, regardless of case."""
    number = sum(1 for _ in re.finditer(rf"(?<!\w){re.escape(word)}(?!\w)", text, re.IGNORECASE))
    times = f"{number} {'occurrence' if number == 1 else 'occurrences'} of the word {word!r}"
    counted = f"Counted over all of the context ({len(text)} characters), upper and lower case aside, no other forms."
    return f"{times}\n{counted}\nConfidence: exact\n{note}"


def tally(context: object, attempts: list[tuple[list[str], str]], top: int, note: str) -> str | None:
    """Return the ranking of the first pattern that matches; None if none matches."""
    parts = pieces(context)
    text, starts = join(parts)
    for needles, pattern in attempts:
        search = re.compile(pattern)
        found = captured(text, needles, search)
        if not found:
            continue
        kind = "as written"
        if len(found) * 2 > sum(found.values()):
            # Most texts differ: they are likely messages, each with a number or an identifier of its own.
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
        folded: collections.Counter[str] = collections.Counter()
        for value, number in found.items():
            folded[value.lower()] += number
        is_clear = folded.most_common(1)[0][0] == best.lower() and not (" " in best and "=" in best)
        confidence = (
            "exact" if is_clear else "LOW CONFIDENCE (upper and lower case or single fields make a difference),"
        )
        return "\n".join([*ranks[:top], *runners, counted, f"Confidence: {confidence} for the pattern {pattern}", note])
    return None


def captured(text: str, needles: list[str], search: re.Pattern[str]) -> collections.Counter[str]:
    """Return how often the pattern's group has each text, in lines with a needle or, without needles, everywhere."""
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
    """Return the first offset of a text counted as `wanted`, in lines with the needle; else the text's end."""
    lines = lines_with(text, needle, 0, len(text)) if needle else iter([(0, len(text))])
    for begin, end in lines:
        for match in search.finditer(text, begin, end):
            if named(match.group(1).strip(), kind) == wanted:
                return match.start(1)
    return len(text)


def named(value: str, kind: str) -> str:
    """Return the name under which a text is counted. A single word, such as an address, is never masked."""
    return re.sub(r"\d+", "#", value) if kind == MASKED and " " in value else value
