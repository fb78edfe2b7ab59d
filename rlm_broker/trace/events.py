"""What happens during a run, one frozen value each, in the order in which it happens.

`run` names a run of the tree: "1" is the root, "1.2" the second child that it started. `depth` is 0 for the root.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from rlm_broker.types import Block, Isolation, Usage, UsageSummary

PREVIEW_CHARS = 80
"""Of a prompt or a result, where a whole one would be too much."""


@dataclass(frozen=True, slots=True)
class RunStarted:
    """A run began. `metadata` is given for the root: models, limits, versions, the context; no secret."""

    run: str
    depth: int
    question: str | None
    model: str
    metadata: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class ReplReady:
    """The run's REPL is behind its walls, with the context in place."""

    run: str
    depth: int
    isolation: Isolation
    duration_s: float


@dataclass(frozen=True, slots=True)
class IterationStarted:
    """A turn began: the model is being asked. `number` counts from 1."""

    run: str
    depth: int
    number: int


@dataclass(frozen=True, slots=True)
class Replied:
    """The model answered its turn; `not_run` names what in its reply is not run, and why."""

    run: str
    depth: int
    number: int
    text: str
    not_run: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class BlockStarted:
    """A code block of turn `iteration` is being run. `block` counts over the whole run, from 1."""

    run: str
    depth: int
    iteration: int
    block: int
    code: str


@dataclass(frozen=True, slots=True)
class BlockPrinted:
    """The block that is running printed something."""

    run: str
    depth: int
    block: int
    stream: Literal["stdout", "stderr"]
    text: str


@dataclass(frozen=True, slots=True)
class BlockEnded:
    """The block ended, in whatever way; see `Block`."""

    run: str
    depth: int
    block: int
    outcome: Block


@dataclass(frozen=True, slots=True)
class CallStarted:
    """A language model is being asked. `call` counts over the whole tree, from 1."""

    run: str
    depth: int
    call: int
    requested_model: str | None
    prompt_preview: str


@dataclass(frozen=True, slots=True)
class CallText:
    """A piece of the reply, as it comes. Told where the run is followed by `stream` and the client can."""

    run: str
    depth: int
    call: int
    text: str


@dataclass(frozen=True, slots=True)
class CallRetried:
    """An attempt failed, for `reason`; the next, number `attempt`, is made after `wait_s` seconds and begins anew."""

    run: str
    depth: int
    call: int
    attempt: int
    wait_s: float
    reason: str


@dataclass(frozen=True, slots=True)
class CallEnded:
    """It answered, or failed with `error`. `model` is the one that really served."""

    run: str
    depth: int
    call: int
    model: str | None
    usage: Usage
    duration_s: float
    response: str
    error: str | None = None


@dataclass(frozen=True, slots=True)
class RunEnded:
    """A run ended: with a response, or with `error`. The usage is that of the run and of all below it."""

    run: str
    depth: int
    response: str | None
    error: str | None
    iterations: int
    duration_s: float
    usage: UsageSummary


Event = (
    RunStarted
    | ReplReady
    | IterationStarted
    | Replied
    | BlockStarted
    | BlockPrinted
    | BlockEnded
    | CallStarted
    | CallText
    | CallRetried
    | CallEnded
    | RunEnded
)
Emit = Callable[[Event], None]
"""Called with each event, on the run's own loop: it must not block, and what it raises is its own problem."""
