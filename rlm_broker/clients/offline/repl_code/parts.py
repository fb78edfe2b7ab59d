"""The context as text: its parts, the place of an offset, and the occurrences of words."""

import bisect
from collections.abc import Iterator
from typing import Any

BLOCK = 1 << 20
"""Characters that are lowered and searched at a time, so that no lower-case copy of the whole text is made."""
OVERLAP = 1_000
"""Characters that a block shares with the next, so that no word is cut in two."""


def look(context: object) -> str:
    """Return type, size and beginning of the context, in lines."""
    if isinstance(context, dict):
        some = [f"{key}: {beginning(context[key])}" for key in list(context)[:3]]
    elif isinstance(context, (list, tuple)):
        some = [beginning(item) for item in context[:3]]
    else:
        some = [beginning(context)]
    size = f" of length {len(context)}" if isinstance(context, (str, dict, list, tuple)) else ""
    return "\n  ".join([f"context: {type(context).__name__}{size}, begins with", *some])


def beginning(value: object) -> str:
    """Return the first 200 characters of a text, or the type of another value, which may be large or deep."""
    return repr(value[:200]) if isinstance(value, str) else type(value).__name__


def pieces(context: object) -> list[tuple[str, str]]:
    """Return (name, text) of each part of the context: a file, a message or an item."""
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
    """Return the text itself, or a line `path: value` for each value inside."""
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
    """Return one text, and the offset of each part in it. A single part is not copied."""
    starts, end = [], 0
    for _, text in parts:
        starts.append(end)
        end += len(text) + 1
    return (parts[0][1] if len(parts) == 1 else "\n".join(text for _, text in parts)), starts


def place(text: str, parts: list[tuple[str, str]], starts: list[int], offset: int) -> str:
    """Return the place of an offset for people: file or item, line from 1, character from 0."""
    i = bisect.bisect_right(starts, offset) - 1
    name = f"{parts[i][0]}, " if parts[i][0] else ""
    return f"{name}line {text.count(chr(10), starts[i], offset) + 1}, character {offset - starts[i]}"


def lines_with(text: str, needle: str, start: int, end: int) -> Iterator[tuple[int, int]]:
    """Yield (begin, end) of each line with the needle. Other lines are not looked at."""
    while (hit := text.find(needle, start, end)) >= 0:
        stop = text.find("\n", hit + len(needle), end)
        stop = end if stop < 0 else stop
        yield text.rfind("\n", 0, hit) + 1, stop
        start = stop + 1


def term_counts(text: str, terms: list[dict[str, Any]]) -> list[list[tuple[int, int]]]:
    """Return for each term (occurrences, offset of the block) of each block that has it, regardless of case."""
    counts: list[list[tuple[int, int]]] = [[] for _ in terms]
    for begin in range(0, len(text), BLOCK):
        block = lowered(text[begin : begin + BLOCK + OVERLAP])
        for k, term in enumerate(terms):
            # Unless both ends are bound, hits inside words count: `count` is many times faster than checking each hit.
            is_bound = term["bound"] == "both"
            number = sum(1 for _ in hits(block, term)) if is_bound else sum(map(block.count, term["needles"]))
            if number:
                counts[k].append((number, begin))
    return counts


def hits(block: str, term: dict[str, Any]) -> Iterator[int]:
    """Yield the offsets of a term in a lower-case block, bound as the term says: anywhere, word start or whole word."""
    for needle in term["needles"]:
        hit = -1
        while (hit := block.find(needle, hit + 1)) >= 0:
            end = hit + len(needle)
            if term["bound"] != "none" and hit > 0 and block[hit - 1].isalnum():
                continue
            if term["bound"] != "both" or not block[end : end + 1].isalnum():
                yield hit


def lowered(block: str) -> str:
    """Return the block in lower case, unless that changes its length ("İ" becomes two characters) and so offsets."""
    lower = block.lower()
    return lower if len(lower) == len(block) else block
