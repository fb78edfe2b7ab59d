"""Events as passages for people: a title, and the texts that it stands above.

A passage is what `verbose=True`, `ask -v` and `trace show --full` show of one event. A call is shown when it ends, with
its prompt: the calls of a batch overlap, and their prompts and replies would stand apart. So a story keeps the prompts
of the calls that are under way, and forgets them when they, or their root run, end.
"""

from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

from rlm_broker.parsing import parse_reply
from rlm_broker.trace.events import (
    BlockEnded,
    BlockStarted,
    CallEnded,
    CallStarted,
    Event,
    Replied,
    RunEnded,
    RunStarted,
    ToolEnded,
    ToolStarted,
)
from rlm_broker.trace.printing import CANCELLED, milestone, trouble
from rlm_broker.values.text import printable
from rlm_broker.values.words import tokens

MOST_LINES = 40
"""Lines of one text that a passage shows: half from its beginning, half from its end. The title of the gap says how
many are left out."""
MOST_CHARS = 4_000
"""Characters of one text that a passage shows, likewise."""
SHOWN_OF_A_BATCH = 4
"""Calls of one batch that get a passage each. Of the others the title of each tenth and all failures are shown."""
READ_CHARS = 5_000
"""Characters of a reply that is parsed for its prose, which takes at most 25 ms. Of a longer one, only what stands
before its first code is shown."""

Kind = Literal["text", "code", "error", "label"]
"""Ways to show a text: `code` is Python, and a `label` names the text after it."""


class Piece(NamedTuple):
    """One text of a passage."""

    kind: Kind
    text: str


@dataclass(frozen=True, slots=True)
class Passage:
    """The form in which one event is shown.

    Attributes:
        title: One line.
        pieces: Texts below it, in this order.
        is_trouble: Whether it tells of a failure.
    """

    title: str
    pieces: tuple[Piece, ...] = ()
    is_trouble: bool = False


class _Asked(NamedTuple):
    """A call or a tool that is under way."""

    block: int
    text: str


class Story:
    """Makes passages of the events of any number of run trees.

    Args:
        is_whole: Whether texts are shown to their last character, and all calls of a batch.
        tells_answer: Whether the answer of a root run is shown. `ask` prints it itself.
    """

    def __init__(self, *, is_whole: bool = False, tells_answer: bool = True) -> None:
        self._is_whole = is_whole
        self._tells_answer = tells_answer
        self._calls: dict[tuple[str, int], _Asked] = {}
        self._tools: dict[tuple[str, str, int], _Asked] = {}
        self._turns: dict[tuple[str, str], str] = {}
        """Tree and run -> what is said of the call of the turn that it is in."""

    def passage(self, event: Event) -> Passage | None:
        """Return the passage of an event; None if it has none."""
        title = self._title(event)  # before the pieces, which forget the call
        pieces = self._pieces(event)
        if isinstance(event, RunEnded) and event.depth == 0:
            self._forget(event.tree)
        if title is None:
            return None
        return Passage(title, pieces, is_trouble=trouble(event) is not None or _has_failed(event))

    def _title(self, event: Event) -> str | None:
        match event:
            case Replied(number=number):
                said = self._turns.pop((event.tree, event.run), None)
                return f"turn {number}: reply of {said}" if said else f"turn {number}: reply"
            case BlockStarted(block=block):
                return f"block {block}"
            case CallEnded(error=None) if self._is_shown(event):
                return f"call {event.call}: {_spent(event)}"
            case ToolEnded(tool=tool, duration_s=duration_s):
                return f"tool {tool}: {'failed' if event.error else 'returned'} after {duration_s:.2f} s"
        return trouble(event) or milestone(event)

    def _pieces(self, event: Event) -> tuple[Piece, ...]:
        match event:
            case RunStarted(question=str(question)):
                return self._texts(("text", question))
            case Replied(text=text, not_run=not_run):
                prose = parse_reply(text).prose if len(text) <= READ_CHARS else text.partition("```")[0]
                return self._texts(("text", prose), *(("error", f"not run: {each}") for each in not_run))
            case BlockStarted(code=code):
                return self._texts(("code", code))
            case BlockEnded():
                return self._output(event)
            case CallStarted(call=call, prompt=prompt, block=block):
                self._calls[event.tree, call] = _Asked(block, self._cut(_text_of(prompt)))
            case CallEnded():
                return self._of_call(event)
            case ToolStarted(call=call, block=block, arguments=arguments):
                self._tools[event.tree, event.run, call] = _Asked(block, self._cut(arguments))
            case ToolEnded(call=call, result=result, error=error):
                asked = self._tools.pop((event.tree, event.run, call), _Asked(0, ""))
                came = ("text", result) if error is None else ("error", error)
                return self._texts(("label", "arguments"), ("text", asked.text), ("label", "result"), came)
            case RunEnded(response=str(response)) if event.depth or self._tells_answer:
                return self._texts(("text", response))
        return ()

    def _of_call(self, event: CallEnded) -> tuple[Piece, ...]:
        is_shown = self._is_shown(event)
        asked = self._calls.pop((event.tree, event.call), _Asked(0, ""))
        if not asked.block:  # a turn of the run's own loop: `Replied` has its text
            self._turns[event.tree, event.run] = _spent(event)
            return ()
        if event.error == CANCELLED or not (is_shown or event.error):
            return ()
        came = ("text", event.response) if event.error is None else ("error", event.error)
        return self._texts(("label", "asked"), ("text", asked.text), ("label", "replied"), came)

    def _is_shown(self, event: CallEnded) -> bool:
        asked = self._calls.get((event.tree, event.call))
        if asked is not None and not asked.block:
            return False
        return self._is_whole or not event.batch or event.done <= SHOWN_OF_A_BATCH

    def _output(self, event: BlockEnded) -> tuple[Piece, ...]:
        outcome = event.outcome
        shown = [("text", outcome.stdout), ("text" if outcome.status == "ok" else "error", outcome.stderr)]
        if outcome.error and outcome.error not in outcome.stderr:
            shown.append(("error", outcome.error))
        if event.displays:
            shown.append(("label", f"shown beside the output: {len(event.displays):,}"))
        if outcome.final_answer is not None:
            shown += [("label", "submitted"), ("text", outcome.final_answer)]
        return self._texts(*shown)

    def _texts(self, *given: tuple[Any, str]) -> tuple[Piece, ...]:
        return tuple(Piece(kind, self._cut(text.strip("\n"))) for kind, text in given if text.strip())

    def _cut(self, text: str) -> str:
        """Return a text with its middle left out, also where characters become longer as escapes."""
        return text if self._is_whole else cut(printable(cut(text), keep="\n\t"))

    def _forget(self, tree: str) -> None:
        self._calls = {key: asked for key, asked in self._calls.items() if key[0] != tree}
        self._tools = {key: asked for key, asked in self._tools.items() if key[0] != tree}
        self._turns = {key: said for key, said in self._turns.items() if key[0] != tree}


def cut(text: str, most_lines: int = MOST_LINES, most_chars: int = MOST_CHARS) -> str:
    """Return a text with its middle left out where it has more lines or characters than these."""
    lines = text.split("\n")
    if len(lines) > most_lines:
        half = most_lines // 2
        left_out = f"[... {len(lines) - 2 * half:,} lines left out ...]"
        text = "\n".join([*lines[:half], left_out, *lines[-half:]])
    if len(text) <= most_chars:
        return text
    half = most_chars // 2
    return f"{text[:half]}\n[... {len(text) - 2 * half:,} characters left out ...]\n{text[-half:]}"


def _spent(event: CallEnded) -> str:
    parts = (event.model or "?", f"{event.duration_s:.2f} s", tokens(event.usage))
    return ", ".join(part for part in parts if part)


def _has_failed(event: Event) -> bool:
    return isinstance(event, ToolEnded | RunEnded) and event.error is not None


def _text_of(prompt: str | list[Any]) -> str:
    """Return a prompt as text; of chat messages, who says each."""
    if isinstance(prompt, str):
        return prompt
    return "\n".join(f"{each.get('role')}: {each.get('content')}" for each in prompt if isinstance(each, dict))
