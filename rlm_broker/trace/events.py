"""What happens during a run, one frozen value each, in the order in which it happens.

`run` names a run of the tree: "1" is the root, "1.2" the second child that it started. `depth` is 0 for the root.
"""

from collections.abc import Callable, Mapping
from typing import Any, Concatenate, Literal, ParamSpec

import msgspec

from rlm_broker.results import Block, Isolation, Usage, UsageSummary

P = ParamSpec("P")

PREVIEW_CHARS = 80
"""Of a prompt or a result, where a whole one would be too much."""


class Event(msgspec.Struct, frozen=True):
    """Something that happened in one run of the tree."""

    run: str
    depth: int


class RunStarted(Event, frozen=True):
    """A run began. `metadata` is given for the root: models, limits, versions, the context; no secret."""

    question: str | None
    model: str
    metadata: Mapping[str, Any]


class ReplReady(Event, frozen=True):
    """The run's REPL is isolated, with the context in place."""

    isolation: Isolation
    duration_s: float


class IterationStarted(Event, frozen=True):
    """A turn began: the model is being asked. `number` counts from 1."""

    number: int


class Replied(Event, frozen=True):
    """The model answered its turn; `not_run` names what in its reply is not run, and why."""

    number: int
    text: str
    not_run: tuple[str, ...] = ()


class BlockStarted(Event, frozen=True):
    """A code block of turn `iteration` is being run. `block` counts over the whole run, from 1."""

    iteration: int
    block: int
    code: str


class BlockPrinted(Event, frozen=True):
    """The block that is running printed something."""

    block: int
    stream: Literal["stdout", "stderr"]
    text: str


class BlockEnded(Event, frozen=True):
    """The block ended, in whatever way; see `Block`."""

    block: int
    outcome: Block


class CallStarted(Event, frozen=True):
    """A language model is being asked. `call` counts over the whole tree, from 1."""

    call: int
    requested_model: str | None
    prompt_preview: str


class CallText(Event, frozen=True):
    """A piece of the reply, as it comes. Told where the run is followed by `stream` and the client can."""

    call: int
    text: str


class CallRetried(Event, frozen=True):
    """An attempt failed, for `reason`; the next, number `attempt`, is made after `wait_s` seconds and begins anew."""

    call: int
    attempt: int
    wait_s: float
    reason: str


class CallEnded(Event, frozen=True):
    """It answered, or failed with `error`. `model` is the one that really served."""

    call: int
    model: str | None
    usage: Usage
    duration_s: float
    response: str
    error: str | None = None


class RunEnded(Event, frozen=True):
    """A run ended: with a response, or with `error`. The usage is that of the run and of all below it."""

    response: str | None
    error: str | None
    iterations: int
    duration_s: float
    usage: UsageSummary


Emit = Callable[[Event], None]
"""Called with each event, on the run's own loop: it must not block, and what it raises is its own problem."""


class Emitter:
    """Emits the events of one run, so that no place has to name the run."""

    def __init__(self, emit: Emit, run: str, depth: int) -> None:
        self._emit = emit
        self._run = run
        self._depth = depth

    def __call__(self, kind: Callable[Concatenate[str, int, P], Event], *args: P.args, **kwargs: P.kwargs) -> None:
        """Emit an event of this `kind`, made of its further fields."""
        self._emit(kind(self._run, self._depth, *args, **kwargs))
