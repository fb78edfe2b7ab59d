"""What happens during a run, one frozen value each, in the order in which it happens.

The events of a run tree are enough to rebuild it: who asked what (`CallStarted.prompt`, and `system` where it is new),
what came back, which code ran, what it printed, and which block a call, a tool or a child belongs to. What looks like a
secret is replaced when an event is made, so that all who get it get the same.
"""

import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Concatenate, Literal, ParamSpec

import msgspec

from rlm_broker.redaction import LONGEST_CHARS, redacted
from rlm_broker.results import Block, Isolation, Usage, UsageSummary
from sandbox_worker.wire.mime import MimeType

P = ParamSpec("P")

PREVIEW_CHARS = 80
"""Characters of a prompt or a result where only its beginning is shown."""


class _OfARun(msgspec.Struct, frozen=True):
    run: str
    depth: int

    def __post_init__(self) -> None:
        for name in self.__struct_fields__:
            value = getattr(self, name)
            if (shown := redacted(value, LONGEST_CHARS)) is not value:
                msgspec.structs.force_setattr(self, name, shown)


class Event(_OfARun, frozen=True, kw_only=True):
    """Something that happened in one run of a tree.

    Attributes:
        run: Name of the run in its tree: "1" is the root, "1.2" the second child that it started.
        depth: 0 for the root.
        tree: Id of the run tree, `Run.id`.
        n: Counts all events of the tree, from 1 and without a gap.
        time: Seconds since 1970, as `time.time` says it.
    """

    tree: str = ""
    n: int = 0
    time: float = 0.0


class RunStarted(Event, frozen=True):
    """A run began. `metadata` is given for the root: models, limits, versions, the context; no secret.

    `question` is a child's whole prompt. `block` is the block of its parent that started a child; 0 for the root.
    """

    question: str | None
    model: str
    metadata: Mapping[str, Any]
    block: int = 0


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
    """The block ended, in whatever way; see `Block`.

    `outcome` is without its displays. Of each of them `displays` has the bytes or characters by MIME type; the pictures
    are in `Completion.trajectory`.
    """

    block: int
    outcome: Block
    displays: tuple[Mapping[MimeType, int], ...] = ()


class CallStarted(Event, frozen=True):
    """A language model is being asked. `call` counts over the whole tree, from 1.

    `prompt` is the last message: what the model is shown in this turn, or what code asks. Earlier turns are in earlier
    events. Where code asks with chat messages, it is the list of these, each a dict of `role` and `content`. `system`
    is the system prompt, in the first call that has it. `block` is the block that asks, or 0 where the run's own loop
    does. `batch` numbers the batches of the tree from 1, and `of` is how many calls the batch makes: one for each
    different prompt. Both are 0 for a call of its own.
    """

    call: int
    requested_model: str | None
    prompt: str | list[Any]
    system: str | None = None
    block: int = 0
    batch: int = 0
    of: int = 0


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
    """It answered, or failed with `error`. `model` is the one that really served.

    `done` of the `of` calls of its `batch` have ended with this one; all three are 0 for a call of its own. A prompt
    that is refused before it is sent makes no call.
    """

    call: int
    model: str | None
    usage: Usage
    duration_s: float
    response: str
    error: str | None = None
    batch: int = 0
    done: int = 0
    of: int = 0


class ToolStarted(Event, frozen=True):
    """Code in block `block` calls a tool. `call` counts the calls of tools in the run, from 1."""

    call: int
    block: int
    tool: str
    arguments: str


class ToolEnded(Event, frozen=True):
    """The tool returned `result`, as it is sent to the code, or failed with `error`."""

    call: int
    tool: str
    duration_s: float
    result: str
    error: str | None = None


class RunEnded(Event, frozen=True):
    """A run ended: with a response, or with `error`. The usage is that of the run and of all below it.

    `kind` is "answered", "stopped" for a run that `Run.stop` ended, or the `kind` of the error. `limit` names the limit
    that ended it, if one did. `cost_usd` is None where a price is not known.
    """

    response: str | None
    error: str | None
    iterations: int
    duration_s: float
    usage: UsageSummary
    kind: str = "answered"
    limit: str | None = None
    partial_answer: str | None = None
    cost_usd: float | None = None


class EventsMissed(Event, frozen=True):
    """`count` events are not there any more: their follower was too slow. `n` is that of the last one of them."""

    count: int


Emit = Callable[[Event], None]
"""Called with each event, on the run's own loop: it must not block, and what it raises is its own problem."""


class TreeEvents:
    """Numbers the events of one run tree, and hands each to all who want it.

    Args:
        tree: Id of the tree.
        receivers: Called with each event, in this order. Without any, no event is made.
    """

    def __init__(self, tree: str, receivers: Sequence[Emit]) -> None:
        self.is_wanted = bool(receivers)
        self._tree = tree
        self._receivers = tuple(receivers)
        self._number = 0

    def of(self, run: str, depth: int) -> "Emitter":
        """Return what emits the events of one run, so that no place has to name the run."""
        return Emitter(self, run, depth)

    def emit(self, kind: Callable[..., Event], *fields: Any, **named: Any) -> None:
        """Make an event of this `kind` and hand it on."""
        if self.is_wanted:
            self._number += 1
            event = kind(*fields, **named, tree=self._tree, n=self._number, time=round(time.time(), 6))
            for receive in self._receivers:
                receive(event)


class Emitter:
    """Emits the events of one run."""

    __slots__ = ("_depth", "_events", "_run")

    def __init__(self, events: TreeEvents, run: str, depth: int) -> None:
        self._events = events
        self._run = run
        self._depth = depth

    @property
    def is_wanted(self) -> bool:
        """Whether an event reaches anything. What is costly to say need not be found out if not."""
        return self._events.is_wanted

    def __call__(self, kind: Callable[Concatenate[str, int, P], Event], *args: P.args, **kwargs: P.kwargs) -> None:
        """Emit an event of this `kind`, made of its further fields."""
        self._events.emit(kind, self._run, self._depth, *args, **kwargs)
