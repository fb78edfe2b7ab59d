"""What a model's reply says to do: run this code, or end with that answer. Pure functions; they run nothing.

A reply is a stranger's text: whatever it is, nothing here raises, and the time grows with its length alone.
"""

import re
from dataclasses import dataclass

from rlm_broker.parsing.fences import Fence, split_fences
from rlm_broker.parsing.finals import FinalText, FinalVar, find_final
from rlm_broker.parsing.notes import (
    CODE_IN_THOUGHTS,
    FINAL_WITHIN_A_LINE,
    Note,
    NotRun,
    fence_notes,
    markup_notes,
    shown_to_model,
)
from rlm_broker.parsing.source import Inspector

__all__ = ["FinalText", "FinalVar", "NotRun", "ParsedReply", "parse_reply"]

_THOUGHTS = re.compile(r"\s*+<(think|thinking|reasoning)>")
_MENTION = re.compile(r"\b(FINAL|FINAL_VAR|SUBMIT)[(:]")
_NOT_A_LINE_END = re.compile(r"[^\n]+")


@dataclass(frozen=True, slots=True)
class ParsedReply:
    """What a reply says to do. A reply may have code and a final answer; which of them counts is the runner's choice.

    Attributes:
        code: The code blocks to run, in the reply's order.
        final: The final answer that stands in the reply's text, or None.
        not_run: What looks as if it were to be run, and is not: to be told to the model.
        prose: The reply without the code that is run, and without its thoughts: what it says to people.
    """

    code: tuple[str, ...]
    final: FinalText | FinalVar | None
    not_run: tuple[NotRun, ...]
    prose: str = ""


def parse_reply(reply: str | None) -> ParsedReply:
    """Read a model's reply. Raises nothing, whatever the text; None is an empty reply."""
    inspector = Inspector()
    thoughts, text = _split_thoughts((reply or "").replace("\r\n", "\n"))
    fences = split_fences(text, inspector)
    prose = _blanked(text, [(fence.start, fence.end) for fence in fences])
    finals = find_final(text, prose, [fence.start for fence in fences if fence.is_runnable])

    # A fence between the parentheses of an answer is part of the answer.
    fences = [fence for fence in fences if not finals.start <= fence.start < finals.end]
    code = tuple(fence.text for fence in fences if fence.is_runnable and fence.text.strip())
    notes = [
        *fence_notes(fences, inspector),
        *markup_notes(_blanked(prose, [(finals.start, finals.end)])),
        *finals.notes,
        *_thought_notes(split_fences(thoughts, inspector)),
    ]
    if finals.final is None and not finals.notes and _MENTION.search(prose):
        notes.append(Note(-1, FINAL_WITHIN_A_LINE, is_quiet=True))
    said = _without(text, [(fence.start, fence.end) for fence in fences if fence.is_runnable])
    not_run = shown_to_model(notes, nothing_else=not code and finals.final is None)
    return ParsedReply(code, finals.final, not_run, said.strip())


def _split_thoughts(text: str) -> tuple[str, str]:
    """The reasoning that some models put first, and the reply: a draft in it is nothing that the reply says to do."""
    opening = _THOUGHTS.match(text)
    if opening is None:
        return "", text
    closing = f"</{opening[1]}>"
    thoughts, found, rest = text[opening.end() :].partition(closing)
    return (thoughts, rest) if found else ("", text)


def _thought_notes(fences: list[Fence]) -> list[Note]:
    return [Note(-1, CODE_IN_THOUGHTS, is_quiet=True)] if any(fence.is_runnable for fence in fences) else []


def _without(text: str, spans: list[tuple[int, int]]) -> str:
    """`text` without `spans`, which are in order."""
    pieces = []
    at = 0
    for start, end in spans:
        pieces.append(text[at:start])
        at = end
    return "".join([*pieces, text[at:]])


def _blanked(text: str, spans: list[tuple[int, int]]) -> str:
    """`text` with spaces for everything but line ends in `spans`, which are in order: positions stay what they are."""
    pieces = []
    at = 0
    for start, end in spans:
        pieces += [text[at:start], _NOT_A_LINE_END.sub(lambda run: " " * len(run[0]), text[start:end])]
        at = end
    return "".join([*pieces, text[at:]])
