"""Markdown for notebooks. Every text from outside stands in a fence, where no link, picture or tag takes effect."""

import re
from typing import Any

from rlm_broker.notebook.words import facts_of_run, how_block_ended
from rlm_broker.values.text import printable, shorten

FENCED_CHARS = 10_000
"""Characters of a text in a fence. The middle of a longer one is cut."""
_MARKS = re.compile(r"[^\w\s.,:]|_")


def of_completion(run: Any) -> str:
    """Return the answer of a `Completion` and the facts of its run."""
    return f"{fenced('no answer' if run.response is None else run.response)}\n\n{plain(facts_of_run(run))}"


def of_block(block: Any) -> str:
    """Return the code of a `Block` and what came of it."""
    texts = (("code", block.code), ("output", block.stdout), ("stderr", block.stderr), ("error", block.error))
    parts = [f"{name}:\n\n{fenced(text)}" for name, text in texts if text]
    return "\n\n".join([plain(how_block_ended(block)), *parts])


def fenced(text: str) -> str:
    """Return the text in a fence that is longer than each row of backticks in the text, so that none ends it."""
    shown = printable(shorten(text, FENCED_CHARS), keep="\n\t")
    fence = "`" * (1 + max([2, *map(len, re.findall("`+", shown))]))
    return f"{fence}text\n{shown}\n{fence}"


def plain(text: str) -> str:
    """Return the text with a backslash before each mark that Markdown or HTML may read."""
    return _MARKS.sub(lambda found: f"\\{found[0]}", printable(" ".join(text.split())))
