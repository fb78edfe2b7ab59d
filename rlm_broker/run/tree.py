"""What all runs of one tree share, and how far each of them has come."""

import asyncio
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field

from rlm_broker.concurrency.allowance import Allowance
from rlm_broker.concurrency.fair_semaphore import FairSemaphore
from rlm_broker.limits import Limits
from rlm_broker.prompts.instructions import Instructions
from rlm_broker.results import ChatMessage, Iteration
from rlm_broker.run.calls import MOST_DECODED_BYTES, TreeCalls
from rlm_broker.run.ledger import Ledger
from rlm_broker.sandbox.sandbox import Sandbox
from rlm_broker.trace.events import TreeEvents
from rlm_broker.transport.connection import QueryHandler

QueryHandlerFactory = Callable[[str, int, QueryHandler], QueryHandler]
"""From a run's name, its depth and the handler that it would have, what answers its REPL."""


@dataclass(frozen=True, slots=True)
class ChildPlaces:
    """What the children at one depth of a tree share. Each depth has its own: parents that wait for their children hold
    nothing that these need.

    Attributes:
        places: One for each child that runs.
        memory: Bytes for the prompts of large queries, which live as long as their child or call.
        reading: Contexts that are stored and read for completions, one at a time.
    """

    places: FairSemaphore
    memory: Allowance = field(default_factory=lambda: Allowance(MOST_DECODED_BYTES))
    reading: asyncio.Lock = field(default_factory=asyncio.Lock)


@dataclass(frozen=True, slots=True)
class Tree:
    """What all runs of one tree share. Without a sandbox, none of them has a REPL that is made here.

    Attributes:
        is_auto: A child gets a REPL only where it needs one, see `recursion`.
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
        most = self.limits.max_concurrent_children
        object.__setattr__(self, "child_places", defaultdict(lambda: ChildPlaces(FairSemaphore(most))))

    @property
    def limits(self) -> Limits:
        """The bounds of the tree."""
        return self.ledger.limits


@dataclass(slots=True)
class Progress:
    """How far a run has come; what is left of it when it is ended from outside.

    Attributes:
        said: Text of the model's last reply that had any outside of its code.
        turns_left: After the one that is under way; None where the loop is the user's own.
        draft: What code had in `answer["content"]` at the end of the last block that ended by itself.
    """

    messages: list[ChatMessage] = field(default_factory=list)
    trajectory: list[Iteration] = field(default_factory=list)
    said: str | None = None
    draft: str | None = None
    blocks: int = 0
    turns_left: int | None = None
    errors_in_a_row: int = 0

    @property
    def partial_answer(self) -> str | None:
        """The best answer so far: what code has put down as such, else what the model said last."""
        return self.said if self.draft is None else self.draft
