"""The observation of a turn: what its blocks printed, repeated lines folded, cut to one bound for all of them."""

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import NamedTuple

from rlm_broker.results import Block, Variable
from rlm_broker.values.display import picture_in
from rlm_broker.values.parsing.notes import NotRun
from rlm_broker.values.text import shorten

FOLDED_FROM = 3
"""Equal lines in a row from which they are shown as one line and their number."""
LEAST_SHOWN = 1_000
"""Characters of output that a model is shown at least, however small its window."""
NOTHING_TO_DO = "There was no code to run and no answer in your reply."
"""Observation of a reply that has neither code nor an answer."""
_FIRST = re.compile(
    r"(?<![\w.])(?:(?:list|tuple|sorted)\(\s*(\w{1,60})(?:\.(?:items|keys|values)\(\))?\s*\)|([^\W\d]\w{0,59}))"
    r"\[\s*0?\s*:\s*([\d_]{1,9})\s*\]"
)
"""The first items of a variable: `names[:20]`, `list(context.items())[:20]`."""
_STATUS = {
    "ok": "ran",
    "error": "raised an exception",
    "exited": "called sys.exit",
    "interrupted": "was interrupted",
    "killed": "was killed",
}


def most_shown(max_chars: int, window_tokens: int | None) -> int:
    """Return how many characters of a turn's output a model is shown: `max_chars`, but at most a quarter of its window.

    A token is taken for 3 characters, so a quarter of the window is 3/4 of a character for each of its tokens.
    """
    return max_chars if window_tokens is None else max(LEAST_SHOWN, min(max_chars, window_tokens * 3 // 4))


def observation(
    blocks: Sequence[Block], not_run: Sequence[NotRun], max_chars: int, then: str, *, has_answer: bool = False
) -> str:
    """Return the user message after a turn: its outcome, and then what is asked now.

    Args:
        max_chars: Characters of what all blocks printed together.
        has_answer: Whether the reply gave an answer. `then` says why it was not taken.
    """
    outputs = [folded(text) for block in blocks for text in (block.stdout, block.stderr)]
    shares = iter(shared(map(len, outputs), max_chars))
    texts = iter(outputs)
    parts = []
    for number, block in enumerate(blocks, 1):
        printed = {name: shorten(next(texts), next(shares)) for name in ("stdout", "stderr")}
        parts.append(_outcome(number, block, printed))
    parts += [f"Not run: {item.what}. {item.reason}" for item in not_run]
    return "\n\n".join([*(parts or ([] if has_answer else [NOTHING_TO_DO])), then])


class FirstOfMany(NamedTuple):
    """The first of many items that code asked models about: their number, the number of all, and the variable."""

    taken: int
    total: int
    name: str


def first_of_many(
    blocks: Sequence[Block], asked: Mapping[int, int], sizes: Callable[[str], int | None]
) -> FirstOfMany | None:
    """Return what code took the first of, if it asked as many prompts in these blocks; None if it asked about all, or
    that is not known.

    Args:
        asked: Size of a batch → number of such batches.
        sizes: Returns the number of items in a variable; None if it has no items, or they were not counted.
    """
    for block in blocks:
        for found in _FIRST.finditer(block.code):
            name, taken = found[1] or found[2], int(found[3].replace("_", "") or 0)
            is_asked = taken > 1 and (taken in asked or asked.get(1) == taken)
            if is_asked and (total := sizes(name) or 0) > taken:
                return FirstOfMany(taken, total, name)
    return None


def folded(text: str) -> str:
    """Return a text in which equal lines in a row are one line and their number."""
    lines = text.split("\n")
    if len(lines) < FOLDED_FROM:
        return text
    kept: list[str] = []
    times = 0
    for number, line in enumerate(lines):
        times += 1
        if number + 1 < len(lines) and lines[number + 1] == line and line:
            continue
        kept += [line] * times if times < FOLDED_FROM else [f"{line}  [{times:,} equal lines]"]
        times = 0
    return "\n".join(kept)


def shared(lengths: Iterable[int], most: int) -> list[int]:
    """Divide an amount: short texts get all that they need, and the rest is divided equally among the long ones."""
    wanted = list(lengths)
    shares = [0] * len(wanted)
    left, waiting = most, sorted(range(len(wanted)), key=wanted.__getitem__)
    for position, index in enumerate(waiting):
        shares[index] = min(wanted[index], left // (len(waiting) - position))
        left -= shares[index]
    return shares


def _outcome(number: int, block: Block, printed: dict[str, str]) -> str:
    lines = [f"Block {number}: {_STATUS[block.status]}"]
    if block.status != "ok" and block.error:
        lines[0] += f" ({block.error})"
    if block.status == "killed":
        lines.append(_after_kill(block.blocks_undone))
    if block.status == "error" and block.limit == "memory_bytes":
        lines.append("The memory of this REPL was full: `del` what you no longer need, or work on smaller parts.")
    if block.status == "interrupted":
        lines.append("Your variables are still there.")
    lines += [f"{name}:\n{text}" for name, text in printed.items() if text]
    lines += [f"[picture: {each}]" for display in block.displays if (each := picture_in(display))]
    if block.displays_omitted:
        lines.append(f"[{block.displays_omitted:,} more shown than are kept, or larger]")
    if not block.stdout and not block.stderr and not block.displays:
        lines.append("(no output)")
    if block.variables:
        lines.append(f"Variables made or changed: {', '.join(map(_variable, block.variables))}")
    return "\n".join(lines)


def _after_kill(blocks_undone: int | None) -> str:
    """Return what a kill has left of the variables."""
    if blocks_undone is None:
        return "The REPL was killed and started afresh: `context` is in place, all your variables are lost."
    if blocks_undone == 1:
        return "The REPL was killed. Your variables are as they were before this block."
    return (
        f"The REPL was killed. Your variables are as they were {blocks_undone} blocks ago: what this block and the "
        f"{blocks_undone - 1:,} before it did to them is lost."
    )


def _variable(variable: Variable) -> str:
    size = variable.size
    if size is None:
        return f"{variable.name} ({variable.type})"
    shown = f"{size:,}" if isinstance(size, int) else " x ".join(f"{each:,}" for each in size)
    return f"{variable.name} ({variable.type}, {shown})"
