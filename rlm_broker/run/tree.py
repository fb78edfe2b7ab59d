"""State shared by all runs of one tree, and the progress of each."""

from collections import Counter
from collections.abc import Callable
from typing import NamedTuple

from msgspec import Struct, field

from rlm_broker.broker.transport.connection import QueryHandler
from rlm_broker.concurrency.turns import FairSemaphore
from rlm_broker.events.event import TreeEvents
from rlm_broker.limits import Limits
from rlm_broker.results import Block, ChatMessage, ChildTrace, Iteration
from rlm_broker.run.calls import TreeCalls
from rlm_broker.run.ledger import Ledger
from rlm_broker.run.prompts.instructions import Instructions
from rlm_broker.sandbox.blocks.record import ReplRecord
from rlm_broker.sandbox.sandbox import Sandbox

QueryHandlerFactory = Callable[[str, int, QueryHandler], QueryHandler]
"""From a run's name, its depth and its default handler, makes the handler of its REPL's queries."""


class ChildPlaces(Struct, frozen=True):
    """Places of the children at one depth of a tree. Each depth has its own: a waiting parent holds none of them.

    Attributes:
        runs: One place for each running child.
        completions: One place for each completion in place of a child: its prompt is in memory as long as its call.
        kept: One place for each REPL that is kept for further tasks of a child, busy or not.
    """

    runs: FairSemaphore
    completions: FairSemaphore
    kept: FairSemaphore


class Tree(Struct, frozen=True):
    """State shared by all runs of one tree. Without a sandbox none of them has a REPL made here.

    Attributes:
        is_auto: Whether a child gets a REPL only if it needs one, see `recursion`.
    """

    calls: TreeCalls
    ledger: Ledger
    sandbox: Sandbox | None
    events: TreeEvents
    instructions: Instructions
    query_handler: QueryHandlerFactory | None = None
    is_auto: bool = False
    _child_places: dict[int, ChildPlaces] = field(default_factory=dict)

    def child_places(self, depth: int) -> ChildPlaces:
        """Return the places of the children at a depth."""
        if depth not in self._child_places:
            runs, completions = self.limits.max_concurrent_children, self.limits.max_concurrent_calls
            self._child_places[depth] = ChildPlaces(
                FairSemaphore(runs), FairSemaphore(completions), FairSemaphore(runs)
            )
        return self._child_places[depth]

    @property
    def limits(self) -> Limits:
        """The limits of the tree."""
        return self.ledger.limits


class Mark(NamedTuple):
    """The end of a turn: a list of messages that only grows, its length then, the number of messages that summaries had
    replaced; and the number of blocks, the draft and the last text."""

    messages: list[ChatMessage]
    length: int
    replaced: int
    blocks: int
    draft: str | None
    said: str | None


class Progress(Struct):
    """Progress of a run, and its partial results if it is ended from outside.

    Attributes:
        replaced: Messages before `messages`, which a summary has replaced.
        marks: Turn → its end, for each turn that the run went on from.
        record: Blocks that the REPL runs again when it opens; None if the run begins anew.
        said: The last text of the model outside of code.
        turns_left: Turns after the present one; None if the loop is the user's own.
        draft: Value of `answer["content"]` at the end of the last block, except a block cut short.
        errors_in_a_row: Turns in a row with a failed block.
        failures: Beginnings of the failures that code was handed since the last turn, as answers of its calls.
        late_failures: Beginnings of the failures of children in the background, which code may be handed in any turn.
        failed_batch: Size of the last batch since then whose every slot failed; 0 for none.
        asked: Sizes of the batches of prompts since then, and how many had that size; 1 is a single prompt.
    """

    messages: list[ChatMessage] = field(default_factory=list)
    replaced: list[ChatMessage] = field(default_factory=list)
    marks: dict[int, Mark] = field(default_factory=dict)
    record: ReplRecord | None = None
    trajectory: list[Iteration] = field(default_factory=list)
    child_traces: list[ChildTrace] = field(default_factory=list)
    said: str | None = None
    draft: str | None = None
    blocks: int = 0
    turns_left: int | None = None
    errors_in_a_row: int = 0
    failures: set[str] = field(default_factory=set)
    late_failures: set[str] = field(default_factory=set)
    failed_batch: int = 0
    asked: Counter[int] = field(default_factory=Counter)

    def mark(self, turn: int) -> None:
        """Keep what there is at the end of a turn."""
        conversation = self.messages, len(self.messages), len(self.replaced)
        self.marks[turn] = Mark(*conversation, self.blocks, self.draft, self.said)

    def take_draft(self, block: Block) -> None:
        """Take the draft of an ended block. A block that was cut short has none, and leaves the one before."""
        if block.draft is not None or block.status in ("ok", "error", "exited"):
            self.draft = block.draft

    @property
    def partial_answer(self) -> str | None:
        """The best answer so far: the draft in `answer`, else the model's last text."""
        return self.said if self.draft is None else self.draft
