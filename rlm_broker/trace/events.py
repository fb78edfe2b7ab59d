"""What happens during a run, one frozen value each, in the order in which it happens.

`run` names a run of the tree: "1" is the root, "1.2" the second child that it started. `depth` is 0 for the root.
"""

from collections.abc import Callable, Mapping
from typing import Any, Literal

import msgspec

from rlm_broker.results import Block, Isolation, Usage, UsageSummary

PREVIEW_CHARS = 80
"""Of a prompt or a result, where a whole one would be too much."""


class RunStarted(msgspec.Struct, frozen=True):
    """A run began. `metadata` is given for the root: models, limits, versions, the context; no secret."""

    run: str
    depth: int
    question: str | None
    model: str
    metadata: Mapping[str, Any]


class ReplReady(msgspec.Struct, frozen=True):
    """The run's REPL is behind its walls, with the context in place."""

    run: str
    depth: int
    isolation: Isolation
    duration_s: float


class IterationStarted(msgspec.Struct, frozen=True):
    """A turn began: the model is being asked. `number` counts from 1."""

    run: str
    depth: int
    number: int


class Replied(msgspec.Struct, frozen=True):
    """The model answered its turn; `not_run` names what in its reply is not run, and why."""

    run: str
    depth: int
    number: int
    text: str
    not_run: tuple[str, ...] = ()


class BlockStarted(msgspec.Struct, frozen=True):
    """A code block of turn `iteration` is being run. `block` counts over the whole run, from 1."""

    run: str
    depth: int
    iteration: int
    block: int
    code: str


class BlockPrinted(msgspec.Struct, frozen=True):
    """The block that is running printed something."""

    run: str
    depth: int
    block: int
    stream: Literal["stdout", "stderr"]
    text: str


class BlockEnded(msgspec.Struct, frozen=True):
    """The block ended, in whatever way; see `Block`."""

    run: str
    depth: int
    block: int
    outcome: Block


class CallStarted(msgspec.Struct, frozen=True):
    """A language model is being asked. `call` counts over the whole tree, from 1."""

    run: str
    depth: int
    call: int
    requested_model: str | None
    prompt_preview: str


class CallText(msgspec.Struct, frozen=True):
    """A piece of the reply, as it comes. Told where the run is followed by `stream` and the client can."""

    run: str
    depth: int
    call: int
    text: str


class CallRetried(msgspec.Struct, frozen=True):
    """An attempt failed, for `reason`; the next, number `attempt`, is made after `wait_s` seconds and begins anew."""

    run: str
    depth: int
    call: int
    attempt: int
    wait_s: float
    reason: str


class CallEnded(msgspec.Struct, frozen=True):
    """It answered, or failed with `error`. `model` is the one that really served."""

    run: str
    depth: int
    call: int
    model: str | None
    usage: Usage
    duration_s: float
    response: str
    error: str | None = None


class RunEnded(msgspec.Struct, frozen=True):
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
