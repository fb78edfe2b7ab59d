"""State shared by all runs of one tree, and the progress of each."""

from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field

from rlm_broker.broker.transport.connection import QueryHandler
from rlm_broker.concurrency.turns import FairSemaphore
from rlm_broker.events.event import TreeEvents
from rlm_broker.limits import Limits
from rlm_broker.results import ChatMessage, ChildTrace, Iteration
from rlm_broker.run.calls import TreeCalls
from rlm_broker.run.ledger import Ledger
from rlm_broker.run.prompts.instructions import Instructions
from rlm_broker.sandbox.sandbox import Sandbox

QueryHandlerFactory = Callable[[str, int, QueryHandler], QueryHandler]
"""From a run's name, its depth and its default handler, makes the handler of its REPL's queries."""


@dataclass(frozen=True, slots=True)
class ChildPlaces:
    """Places of the children at one depth of a tree. Each depth has its own: a waiting parent holds none of them.

    Attributes:
        runs: One place for each running child.
        completions: One place for each completion in place of a child: its prompt is in memory as long as its call.
    """

    runs: FairSemaphore
    completions: FairSemaphore


@dataclass(frozen=True, slots=True)
class Tree:
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
    child_places: defaultdict[int, ChildPlaces] = field(init=False)

    def __post_init__(self) -> None:
        runs, completions = self.limits.max_concurrent_children, self.limits.max_concurrent_calls
        places = defaultdict[int, ChildPlaces](lambda: ChildPlaces(FairSemaphore(runs), FairSemaphore(completions)))
        object.__setattr__(self, "child_places", places)

    @property
    def limits(self) -> Limits:
        """The limits of the tree."""
        return self.ledger.limits


@dataclass(slots=True)
class Progress:
    """Progress of a run, and its partial results if it is ended from outside.

    Attributes:
        said: The last text of the model outside of code.
        turns_left: Turns after the present one; None if the loop is the user's own.
        draft: Value of `answer["content"]` at the end of the last block, except a block cut short.
        errors_in_a_row: Turns in a row with a failed block.
        failures: Beginnings of the failures that code was handed since the last turn, as answers of its calls.
        failed_batch: Size of the last batch since then whose every slot failed; 0 for none.
    """

    messages: list[ChatMessage] = field(default_factory=list)
    trajectory: list[Iteration] = field(default_factory=list)
    child_traces: list[ChildTrace] = field(default_factory=list)
    said: str | None = None
    draft: str | None = None
    blocks: int = 0
    turns_left: int | None = None
    errors_in_a_row: int = 0
    failures: set[str] = field(default_factory=set)
    failed_batch: int = 0

    @property
    def partial_answer(self) -> str | None:
        """The best answer so far: the draft in `answer`, else the model's last text."""
        return self.said if self.draft is None else self.draft
