"""Whether a child needs a REPL, for `recursion="auto"`: told by size and form, since a task may be in any language."""

import re
from collections import Counter
from typing import Final

from rlm_broker.clients.base import estimate_tokens

INSTRUCTION_CHARS: Final = 300
"""Of the beginning of a prompt, and of its end, where it says what to do. In between is what to do it with."""
LOOKED_AT_CHARS: Final = 20_000
"""Of what to do it with."""
MOST_DIGITS: Final = 0.25
"""Share of the characters that are no spaces. Prose with many dates and amounts has a tenth."""
FEWEST_LINES: Final = 8
"""Of a table, or of a list."""
MOST_LINES_APART: Final = 0.2
"""Share of the lines of a table that have another number of separators than the rest."""
LIST_LINE_CHARS: Final = 40
"""Mean length of the lines of a list; lines of prose are longer, or are one long paragraph."""
_SEPARATORS: Final = ",;\t|"
_JSON: Final = re.compile(r"""\s*[\[{]\s*(["\d{\[\-\]}]|true|false|null)""")


def needs_repl(task: str, document: str, chars: int, window_tokens: int) -> bool:
    """Whether a child gets a REPL: its context is long for its model, or is data that code reads better than a model.

    Args:
        task: What to do. A code fence in it asks for code.
        document: What to do it with, or its beginning.
        chars: Of all of it.
        window_tokens: How much the child's model can read.
    """
    return estimate_tokens(chars) > window_tokens / 2 or "```" in task or looks_like_data(document[:LOOKED_AT_CHARS])


def divided(prompt: str) -> tuple[str, str]:
    """Return what a prompt says to do, and what to do it with, as far as that can be told without reading it."""
    if len(prompt) <= 2 * INSTRUCTION_CHARS:
        return prompt, ""
    first = prompt[:INSTRUCTION_CHARS].partition("\n")[0]
    last = prompt[-INSTRUCTION_CHARS:].rpartition("\n")[2]
    return f"{first}\n{last}", prompt[len(first) : len(prompt) - len(last)]


def looks_like_data(text: str) -> bool:
    """Whether a text is numbers, a table, a list or JSON, and no prose."""
    if _JSON.match(text):
        return True
    solid = sum(not each.isspace() for each in text)
    if solid >= INSTRUCTION_CHARS and sum(map(str.isdigit, text)) > MOST_DIGITS * solid:
        return True
    lines = [line for line in text.splitlines() if line.strip()]
    if len(lines) < FEWEST_LINES:
        return False
    return sum(map(len, lines)) <= LIST_LINE_CHARS * len(lines) or any(_is_table(lines, each) for each in _SEPARATORS)


def _is_table(lines: list[str], separator: str) -> bool:
    """Whether nearly all lines have the same number of separators: two at least, as a sentence often has one."""
    counts = Counter(line.count(separator) for line in lines)
    number, times = counts.most_common(1)[0]
    return number >= 2 and times >= (1 - MOST_LINES_APART) * len(lines)
