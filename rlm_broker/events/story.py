"""The story of a run for people: each event as a passage, with a title and the texts below it.

Terminals, notebooks, traces and HTTP replies show passages, each in its own form. A call is shown at its end, with its
prompt: the calls of a batch overlap, and their prompts and replies would stand apart. So a story keeps the prompts of
the calls under way, and forgets them when they, or their root run, end.
"""

from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

from rlm_broker.events.event import (
    BlockEnded,
    BlockStarted,
    CallEnded,
    CallRetried,
    CallStarted,
    Event,
    IterationStarted,
    Replied,
    ReplReady,
    RunEnded,
    RunStarted,
    ToolEnded,
    ToolStarted,
)
from rlm_broker.results import Block
from rlm_broker.values.parsing import parse_reply
from rlm_broker.values.text import printable, shorten
from rlm_broker.values.words import how_block_ended, tokens

MOST_LINES = 40
"""Lines of one text of a passage: half from its beginning, half from its end."""
MOST_CHARS = 4_000
"""Characters of one text of a passage."""
MAX_ERROR_CHARS = 300
"""Characters of an error in a title."""
SHOWN_OF_A_BATCH = 4
"""Calls of one batch with a passage each. Of the others, each tenth has a title, and each failure a passage."""
TITLES_OF_A_BATCH = 10
"""Maximum titles about the progress of one batch: one for each tenth of its calls."""
READ_CHARS = 5_000
"""Characters of a reply parsed for its prose, which takes at most 25 ms. Of a longer one, only the text before
its first code is shown."""
CANCELLED = "cancelled"
"""Error of a call cancelled by its caller."""

Detail = Literal["titles", "texts", "all"]
"""Detail of a story: titles alone; texts below them, cut, and a few calls of each batch; or everything, uncut."""
Kind = Literal["run", "repl", "turn", "reply", "block", "output", "call", "tool", "end"]
"""Kind of a passage. `block` is the beginning of a block, and `output` its end; `end` is the end of a run."""
PieceKind = Literal["text", "code", "error", "label"]
"""Form of a text: `code` is Python, and a `label` names the text after it."""


class PassageText(NamedTuple):
    """One text of a passage."""

    kind: PieceKind
    text: str


@dataclass(frozen=True, slots=True)
class Passage:
    """The form in which one event is shown. Its texts are a model's or a worker's, and may hold control characters.

    Attributes:
        kind: Kind of its event.
        run: Name of the run in its tree.
        depth: Depth of the run.
        title: One line.
        pieces: Texts below it, in this order.
        is_trouble: Whether it is about a failure or a retry.
    """

    kind: Kind
    run: str
    depth: int
    title: str
    pieces: tuple[PassageText, ...] = ()
    is_trouble: bool = False

    @property
    def line(self) -> str:
        """Title with its depth, as a line without control characters."""
        return f"[depth {self.depth}] {printable(self.title)}"


class _Asked(NamedTuple):
    """A call or a tool under way."""

    block: int
    text: str


class Story:
    """Makes passages of the events of any number of run trees.

    Example:
        ```python
        story = Story()
        rlm = RLM("offline", on_event=lambda event: print(story.passage(event)))
        ```

    Args:
        detail: Titles alone, texts below them, or everything.
        tells_answer: Whether the answer of a root run is shown. `ask` prints it itself.
        trees: Number of run trees to come. Of several, each title begins with the number of its tree.
    """

    def __init__(self, detail: Detail = "texts", *, tells_answer: bool = True, trees: int = 1) -> None:
        self._detail = detail
        self._tells_answer = tells_answer
        self._trees = trees
        self._numbers: dict[str, int] = {}
        self._calls: dict[tuple[str, int], _Asked] = {}
        self._tools: dict[tuple[str, str, int], _Asked] = {}
        self._turns: dict[tuple[str, str], str] = {}
        """Tree and run -> model, time and tokens of the call of its turn."""

    def passage(self, event: Event) -> Passage | None:
        """Return the passage of an event; None if it has none."""
        trouble = _trouble(event)
        pieces: tuple[PassageText, ...] = ()
        has_failed = False
        if self._detail == "titles":
            title = trouble or _milestone(event)
        else:
            title = self._title(event, trouble)  # before the pieces, which forget the call
            pieces = self._pieces(event)
            has_failed = isinstance(event, ToolEnded | RunEnded) and event.error is not None
            if isinstance(event, RunEnded) and event.depth == 0:
                self._forget(event.tree)
        if title is None:
            return None
        if self._trees > 1:
            number = self._numbers.setdefault(event.tree, len(self._numbers) + 1)
            title = f"{number}/{self._trees} {title}"
        return Passage(_KINDS[type(event)], event.run, event.depth, title, pieces, trouble is not None or has_failed)

    def _title(self, event: Event, trouble: str | None) -> str | None:
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
        return trouble or _milestone(event)

    def _pieces(self, event: Event) -> tuple[PassageText, ...]:
        match event:
            case RunStarted(question=question, metadata=facts):
                remarks = facts.get("context", {}).get("remarks", ())
                return self._texts(("text", question or ""), *(("text", f"context: {each}") for each in remarks))
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
            case ToolEnded():
                return self._of_tool(event)
            case RunEnded(response=str(response)) if event.depth or self._tells_answer:
                return self._texts(("text", response))
        return ()

    def _of_call(self, event: CallEnded) -> tuple[PassageText, ...]:
        is_shown = self._is_shown(event)
        asked = self._calls.pop((event.tree, event.call), _Asked(0, ""))
        if not asked.block:  # a turn of the run's own loop: `Replied` has its text
            self._turns[event.tree, event.run] = _spent(event)
            return ()
        if event.error == CANCELLED or not (is_shown or event.error):
            return ()
        came = ("text", event.response) if event.error is None else ("error", event.error)
        return self._texts(("label", "asked"), ("text", asked.text), ("label", "replied"), came)

    def _of_tool(self, event: ToolEnded) -> tuple[PassageText, ...]:
        asked = self._tools.pop((event.tree, event.run, event.call), _Asked(0, ""))
        came = ("text", event.result) if event.error is None else ("error", event.error)
        return self._texts(("label", "arguments"), ("text", asked.text), ("label", "result"), came)

    def _output(self, event: BlockEnded) -> tuple[PassageText, ...]:
        shown = printed(event.outcome)
        if event.displays:
            shown.append(PassageText("label", f"shown beside the output: {len(event.displays):,}"))
        if event.outcome.final_answer is not None:
            shown += [PassageText("label", "submitted"), PassageText("text", event.outcome.final_answer)]
        return self._texts(*shown)

    def _is_shown(self, event: CallEnded) -> bool:
        asked = self._calls.get((event.tree, event.call))
        if asked is not None and not asked.block:
            return False
        return self._detail == "all" or not event.batch or event.done <= SHOWN_OF_A_BATCH

    def _texts(self, *given: tuple[Any, str]) -> tuple[PassageText, ...]:
        return tuple(PassageText(kind, self._cut(text.strip("\n"))) for kind, text in given if text.strip())

    def _cut(self, text: str) -> str:
        """Return a text with its middle left out, also where characters become longer as escapes."""
        if self._detail == "all":
            return text
        shown = _fitted(text)
        written = printable(shown, keep="\n\t")
        return shown if len(written) == len(shown) else shorten(written, MOST_CHARS)

    def _forget(self, tree: str) -> None:
        self._calls = {key: asked for key, asked in self._calls.items() if key[0] != tree}
        self._tools = {key: asked for key, asked in self._tools.items() if key[0] != tree}
        self._turns = {key: said for key, said in self._turns.items() if key[0] != tree}


def printed(block: Block) -> list[PassageText]:
    """Return what a block has printed, and the reason of its end unless stderr has it already."""
    shown = [PassageText("text", block.stdout), PassageText("text" if block.status == "ok" else "error", block.stderr)]
    if block.error and block.error not in block.stderr:
        shown.append(PassageText("error", block.error))
    return shown


def _trouble(event: Event) -> str | None:
    """Return a title for a failure or a retry, which users should see even in a small space."""
    match event:
        case CallRetried():
            return f"call {event.call} failed, attempt {event.attempt} in {event.wait_s:.1f} s: {event.reason}"
        case CallEnded(error=str(error)) if error != CANCELLED:  # its block or run has a passage of its own
            return f"call {event.call} failed: {_head(error)}"
        case BlockEnded(outcome=outcome) if outcome.status not in ("ok", "exited"):
            return f"block {event.block}: {how_block_ended(outcome)}: {_head(outcome.error or '')}{_left(outcome)}"
        case RunEnded(error=str(error)) if event.depth:  # the root's error is raised, or printed by the command
            return f"run {event.run}: {_head(error)} after {event.duration_s:.2f} s"
    return None


def _milestone(event: Event) -> str | None:
    """Return a title for what goes well."""
    match event:
        case RunStarted():
            goes_on = f", after turn {event.after_turn} of another run" if event.branch_of else ""
            return f"run {event.run} with {event.model}{goes_on}"
        case ReplReady(isolation=isolation):
            layers = f"isolation {isolation.level} ({len(isolation.layers)} layers)"
            return f"REPL ready in {event.duration_s * 1e3:.0f} ms, {layers}"
        case IterationStarted():
            return f"turn {event.number}"
        case CallEnded(batch=batch, done=done, of=of) if (
            batch and TITLES_OF_A_BATCH * done // of > TITLES_OF_A_BATCH * (done - 1) // of
        ):
            return f"batch {batch}: {done:,} of {of:,} calls"
        case BlockEnded(outcome=outcome):
            return f"block {event.block}: {how_block_ended(outcome)}"
        case RunEnded():
            return f"run {event.run}: {event.how} after {event.duration_s:.2f} s"
    return None


_KINDS: dict[type[Event], Kind] = {
    RunStarted: "run",
    ReplReady: "repl",
    IterationStarted: "turn",
    Replied: "reply",
    BlockStarted: "block",
    BlockEnded: "output",
    CallRetried: "call",
    CallEnded: "call",
    ToolEnded: "tool",
    RunEnded: "end",
}


def _fitted(text: str) -> str:
    """Return a text of at most `MOST_LINES` and `MOST_CHARS`."""
    lines = text.split("\n")
    if len(lines) > MOST_LINES:
        half = MOST_LINES // 2
        text = "\n".join([*lines[:half], f"... [{len(lines) - 2 * half:,} lines cut] ...", *lines[-half:]])
    return shorten(text, MOST_CHARS)


def _head(error: str) -> str:
    """Return the first line of an error."""
    return error.partition("\n")[0][:MAX_ERROR_CHARS]


def _left(block: Block) -> str:
    """Return what a kill has left of the variables, as the end of a title; empty for another block."""
    if block.status != "killed":
        return ""
    if (undone := block.blocks_undone) is None:
        return "; all variables are lost"
    return "; variables are as before it" if undone == 1 else f"; variables are as they were {undone:,} blocks ago"


def _spent(event: CallEnded) -> str:
    if event.is_remembered:
        return f"{event.model or '?'}, from memory"
    parts = (event.model or "?", f"{event.duration_s:.2f} s", tokens(event.usage))
    return ", ".join(part for part in parts if part)


def _text_of(prompt: str | list[Any]) -> str:
    """Return a prompt as text; of chat messages, who says each."""
    if isinstance(prompt, str):
        return prompt
    return "\n".join(f"{each.get('role')}: {each.get('content')}" for each in prompt if isinstance(each, dict))
