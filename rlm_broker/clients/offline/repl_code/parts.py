"""The context as text: its parts, where an offset in it is, and where words stand in it."""

import bisect
from collections.abc import Iterator
from typing import Any

BLOCK = 1 << 20
OVERLAP = 1_000


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


def term_counts(text: str, terms: list[dict[str, Any]]) -> list[list[tuple[int, int]]]:
    """For each term (occurrences, where the block begins) of each block that holds it, upper and lower case aside."""
    counts: list[list[tuple[int, int]]] = [[] for _ in terms]
    for begin in range(0, len(text), BLOCK):
        block = lowered(text[begin : begin + BLOCK + OVERLAP])
        for k, term in enumerate(terms):
            # Inside words too, unless both ends are bound: counting is many times faster than looking at each.
            is_bound = term["bound"] == "both"
            number = sum(1 for _ in hits(block, term)) if is_bound else sum(map(block.count, term["needles"]))
            if number:
                counts[k].append((number, begin))
    return counts


def hits(block: str, term: dict[str, Any]) -> Iterator[int]:
    """Where a lower-case block holds the term, as it is bound: anywhere, at the start of a word, as a whole word."""
    for needle in term["needles"]:
        hit = -1
        while (hit := block.find(needle, hit + 1)) >= 0:
            end = hit + len(needle)
            if term["bound"] != "none" and hit > 0 and block[hit - 1].isalnum():
                continue
            if term["bound"] != "both" or not block[end : end + 1].isalnum():
                yield hit


def lowered(block: str) -> str:
    """In lower case, unless that changes its length: 'İ' becomes two characters, and offsets must hold."""
    lower = block.lower()
    return lower if len(lower) == len(block) else block
