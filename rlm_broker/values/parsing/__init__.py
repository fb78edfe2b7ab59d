"""Reading a model's reply: code to run, or an answer to end with. Pure functions; they run no code of it.

A reply is untrusted text. No function here raises, however it looks, and the time grows with its length alone: patterns
have possessive quantifiers, without backtracking, and every look ahead is bounded.

The stations of `parse_reply`: thoughts are split off; fences are found (`fences`); answers are looked for outside of
them (`finals`); and what looks like code or an answer, but is not used, becomes a note for the model (`notes`).
"""

import re

from msgspec import Struct

from rlm_broker.values.parsing.fences import Fence, split_fences
from rlm_broker.values.parsing.finals import FinalText, FinalVar, find_final
from rlm_broker.values.parsing.notes import (
    CODE_IN_THOUGHTS,
    FINAL_WITHIN_A_LINE,
    Note,
    NotRun,
    fence_notes,
    markup_notes,
    shown_to_model,
)
from rlm_broker.values.parsing.source import Inspector

__all__ = ["FinalText", "FinalVar", "NotRun", "ParsedReply", "parse_reply"]

_THOUGHTS = re.compile(r"\s*+<(think|thinking|reasoning)>")
"""Opening tag of some models' reasoning before their reply."""
_MENTION = re.compile(r"\b(FINAL|FINAL_VAR|SUBMIT)[(:]")
"""Name of a final answer anywhere in a line. If a reply has no other answer, the model is informed how to write one."""
_NOT_A_LINE_END = re.compile(r"[^\n]+")


class ParsedReply(Struct, frozen=True):
    """Actions that a reply asks for. It may have both code and an answer; the run decides which of them counts.

    Attributes:
        code: Code blocks to run, in the reply's order.
        final: Final answer in the reply's text, or None.
        not_run: What looks like code or an answer and is not used; the model is informed.
        prose: Text of the reply without its thoughts and the code to run: its words to people.
    """

    code: tuple[str, ...]
    final: FinalText | FinalVar | None
    not_run: tuple[NotRun, ...]
    prose: str = ""


def parse_reply(reply: str | None) -> ParsedReply:
    """Read a model's reply. No text raises an error; None is an empty reply."""
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
    """Return the reasoning that some models put first, and the rest. A draft in the reasoning is not part of the
    reply."""
    opening = _THOUGHTS.match(text)
    if opening is None:
        return "", text
    closing = f"</{opening[1]}>"
    thoughts, found, rest = text[opening.end() :].partition(closing)
    return (thoughts, rest) if found else ("", text)


def _thought_notes(fences: list[Fence]) -> list[Note]:
    return [Note(-1, CODE_IN_THOUGHTS, is_quiet=True)] if any(fence.is_runnable for fence in fences) else []


def _without(text: str, spans: list[tuple[int, int]]) -> str:
    """Return `text` without `spans`, which are in order."""
    pieces = []
    at = 0
    for start, end in spans:
        pieces.append(text[at:start])
        at = end
    return "".join([*pieces, text[at:]])


def _blanked(text: str, spans: list[tuple[int, int]]) -> str:
    """Return `text` with `spans`, which are in order, blanked. Line ends stay, so positions and lines stay the same."""
    pieces = []
    at = 0
    for start, end in spans:
        pieces += [text[at:start], _NOT_A_LINE_END.sub(lambda run: " " * len(run[0]), text[start:end])]
        at = end
    return "".join([*pieces, text[at:]])
