"""A tree of runs as its events tell it so far, as a page for a notebook."""

from collections import Counter, deque
from dataclasses import dataclass, field

from rlm_broker.results import Block
from rlm_broker.trace.events import (
    BlockEnded,
    BlockPrinted,
    BlockStarted,
    CallEnded,
    CallStarted,
    Event,
    IterationStarted,
    Replied,
    RunEnded,
    RunStarted,
    ToolStarted,
)
from rlm_broker.trace.printing import line_of, trouble
from rlm_broker.usage import Tally
from rlm_broker.values.markup import Markup, TextBudget, box, escaped, folded, joined, line, paragraph
from rlm_broker.values.words import counted, how_block_ended, spent

MAX_TURNS = 20
"""Turns of the root that a page shows. Earlier ones are counted."""
MAX_RUNS = 8
"""Child runs that a page names while they go on. Further ones are counted."""
KEPT_CHARS = 4_000
"""Characters that a page keeps: the first of each reply and each code, the last of each output. Others are cut."""
TEXT_CHARS = 20_000
"""Characters of all texts in a page. Each update sends the whole page to the browser."""

MAX_BLOCKS = 10
"""Blocks of a turn that a page shows. Later ones are counted."""
MAX_NOTES = 10
"""Notes of failures that a page shows. Earlier ones go."""


@dataclass(slots=True)
class _Block:
    """A block of the root: its code, its output so far, what it asked, and how it ended."""

    code: str
    output: str = ""
    asked: Counter[str] = field(default_factory=Counter)
    outcome: Block | None = None


@dataclass(slots=True)
class _Turn:
    """A turn of the root. `reply` is empty as long as the model is being asked."""

    number: int
    reply: str = ""
    blocks: dict[int, _Block] = field(default_factory=dict)
    later_blocks: int = 0


class TreeView:
    """The state of one tree of runs, as far as its events have told it.

    The root is shown with its turns. Of the runs below it those are named that go on.
    """

    def __init__(self) -> None:
        self._model = ""
        self._turns: deque[_Turn] = deque(maxlen=MAX_TURNS)
        self._children: dict[str, int] = {}
        self._children_ended = 0
        self._in_flight = 0
        self._tally = Tally()
        self._notes: deque[str] = deque(maxlen=MAX_NOTES)
        self._end: str | None = None

    def take(self, event: Event) -> None:
        """Take one event."""
        if note := trouble(event):
            self._notes.append(line_of(event, note))
        self._count(event)
        if "." not in event.run:
            self._take_of_root(event)
        elif isinstance(event, RunStarted):
            self._children[event.run] = 0
            if event.run.count(".") == 1:  # it was started by a block of the root
                self._asked(event.block, "child run")
        elif isinstance(event, IterationStarted):
            self._children[event.run] = event.number
        elif isinstance(event, RunEnded):
            self._children.pop(event.run, None)
            self._children_ended += 1

    def headline(self) -> str:
        """Return where the tree is, in a line."""
        state = self._end or (f"turn {self._turns[-1].number}" if self._turns else "starting")
        parts = [*([self._model] if self._model else []), state]
        used = self._tally.usage
        parts += [spent(used)] if used.total_calls else []
        parts += [f"{counted(self._in_flight, 'call')} open"] if self._in_flight and self._end is None else []
        children = len(self._children) + self._children_ended
        parts += [f"{counted(children, 'child run')}, {len(self._children)} open"] if children else []
        return ", ".join(parts)

    def page(self) -> Markup:
        """Return the page: the last turn is open while the tree goes on, and all are closed when it has ended."""
        texts = TextBudget(TEXT_CHARS, sum(1 + 2 * len(turn.blocks) for turn in self._turns))
        parts = [_turn(turn, texts, is_open=self._end is None and turn is self._turns[-1]) for turn in self._turns]
        if self._turns and (earlier := self._turns[0].number - 1):
            parts.insert(0, paragraph(escaped(f"{counted(earlier, 'earlier turn')} not shown")))
        running = [f"run {run}: turn {number}" for run, number in list(self._children.items())[:MAX_RUNS]]
        parts += [paragraph(line(each)) for each in running]
        parts += [paragraph(line(note)) for note in self._notes]
        return folded(line(self.headline()), joined(parts), is_open=self._end is None)

    def _count(self, event: Event) -> None:
        match event:
            case CallStarted():
                self._in_flight += 1
            case CallEnded():
                self._in_flight -= 1
                self._tally.add(event.usage)

    def _take_of_root(self, event: Event) -> None:
        match event:
            case RunStarted(model=model):
                self._model = model
            case IterationStarted(number=number):
                self._turns.append(_Turn(number))
            case Replied(text=text) if self._turns:
                self._turns[-1].reply = text[:KEPT_CHARS]
            case RunEnded():
                self._end = f"{event.how} after {event.duration_s:.1f} s"
            case _:
                self._take_of_block(event)

    def _take_of_block(self, event: Event) -> None:
        match event:
            case BlockStarted(block=number, code=code) if self._turns:
                turn = self._turns[-1]
                if len(turn.blocks) < MAX_BLOCKS:
                    turn.blocks[number] = _Block(code[:KEPT_CHARS])
                else:
                    turn.later_blocks += 1
            case BlockPrinted(block=number, text=text) if block := self._block(number):
                block.output = (block.output + text)[-KEPT_CHARS:]
            case BlockEnded(block=number, outcome=outcome) if block := self._block(number):
                block.outcome = outcome
            case CallStarted(block=number):
                self._asked(number, "call")
            case ToolStarted(block=number):
                self._asked(number, "tool call")

    def _asked(self, number: int, what: str) -> None:
        if block := self._block(number):
            block.asked[what] += 1

    def _block(self, number: int) -> _Block | None:
        return self._turns[-1].blocks.get(number) if self._turns else None


class FurtherTrees:
    """Many trees that share a page: how many there are, what they used, and what failed."""

    def __init__(self) -> None:
        self._open: set[str] = set()
        self._ended = 0
        self._failed = 0
        self._tally = Tally()

    def take(self, event: Event) -> None:
        """Take one event of any of the trees."""
        match event:
            case RunStarted(depth=0):
                self._open.add(event.tree)
            case CallEnded():
                self._tally.add(event.usage)
            case RunEnded(depth=0):
                self._open.discard(event.tree)
                self._ended += 1
                self._failed += event.error is not None

    def headline(self) -> str:
        """Return the state of all of them, in a line."""
        counts = f"{counted(len(self._open) + self._ended, 'further run')}: {len(self._open)} open, {self._ended} ended"
        return f"{counts}, {self._failed} of them failed; {spent(self._tally.usage)}"

    def page(self) -> Markup:
        """Return the same as a page."""
        return paragraph(line(self.headline()))


def _turn(turn: _Turn, texts: TextBudget, *, is_open: bool) -> Markup:
    """Return a turn: the reply, and each block with its code, its output and what it asked."""
    parts = [box(texts.fitted(turn.reply)) if turn.reply else paragraph(escaped("the model is being asked"))]
    states = []
    for block in turn.blocks.values():
        states.append("running" if block.outcome is None else how_block_ended(block.outcome))
        asked = [counted(number, what) for what, number in block.asked.items()]
        parts += [paragraph(line("; ".join([states[-1], *asked]))), box(texts.fitted(block.code))]
        parts += [box(texts.fitted(block.output))] if block.output else []
        if block.outcome is not None and block.outcome.error:
            parts.append(box(line(block.outcome.error), "error"))
    if turn.later_blocks:
        parts.append(paragraph(escaped(f"{counted(turn.later_blocks, 'later block')} not shown")))
    return folded(line(f"turn {turn.number}: {'; '.join(states) or 'no code'}"), joined(parts), is_open=is_open)
