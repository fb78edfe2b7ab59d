"""Judgement whether a child needs a REPL, for `recursion="auto"`. It goes by size and form: a task may be in any
language."""

import re
from collections import Counter
from typing import Final

from rlm_broker.broker.clients.base import estimate_tokens

INSTRUCTION_CHARS: Final = 300
"""Characters at the beginning, and at the end, of a prompt that are taken for the instruction. Between them is the
data."""
LOOKED_AT_CHARS: Final = 20_000
"""Characters of the data that are looked at."""
MOST_DIGITS: Final = 0.25
"""Share of digits among the characters other than spaces, above which a text is data. Prose with many dates and amounts
has a tenth."""
FEWEST_LINES: Final = 8
"""Lines that a table or a list has at least."""
MOST_LINES_APART: Final = 0.2
"""Share of the lines of a table that may have another number of separators than the rest."""
LIST_LINE_CHARS: Final = 40
"""Largest mean length, in characters, of the lines of a list. Lines of prose are longer, or a paragraph is one long
line."""
_SEPARATORS: Final = ",;\t|"
_JSON: Final = re.compile(r"""\s*[\[{]\s*(["\d{\[\-\]}]|true|false|null)""")
"""Beginning of a JSON object or array. A bracket alone may begin a Markdown link or a citation."""


def needs_repl(task: str, document: str, chars: int, window_tokens: int) -> bool:
    """Whether a child gets a REPL: its context is long for its model, or is data that code reads better than a model.

    Args:
        task: Instruction. A code fence in it asks for code.
        document: Data that the instruction is about, or its beginning.
        chars: Characters of all the data.
        window_tokens: Tokens that the child's model reads.
    """
    return estimate_tokens(chars) > window_tokens / 2 or "```" in task or looks_like_data(document[:LOOKED_AT_CHARS])


def divided(prompt: str) -> tuple[str, str]:
    """Return the instruction and the data of a prompt: the first and the last line, and what is between them.

    Both lines are taken from `INSTRUCTION_CHARS` characters. A prompt shorter than two of these is all instruction.
    """
    if len(prompt) <= 2 * INSTRUCTION_CHARS:
        return prompt, ""
    first = prompt[:INSTRUCTION_CHARS].partition("\n")[0]
    last = prompt[-INSTRUCTION_CHARS:].rpartition("\n")[2]
    return f"{first}\n{last}", prompt[len(first) : len(prompt) - len(last)]


def looks_like_data(text: str) -> bool:
    """Whether a text is numbers, a table, a list or JSON, rather than prose."""
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
    """Whether nearly all lines have the same number of separators: two at least, since a sentence often has one."""
    counts = Counter(line.count(separator) for line in lines)
    number, times = counts.most_common(1)[0]
    return number >= 2 and times >= (1 - MOST_LINES_APART) * len(lines)
